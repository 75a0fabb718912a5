"""Which packages a rank has, and which of them are others than those of a checkpoint."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

from ratchet_worker.state.environment import compare, compared_facts, expand_package_difference, provenance
from ratchet_worker.state.package_list import changes, digest, editable, installed


def test_package_list_equals_importlib_metadata_without_ratchet() -> None:
    said = {f"{re.sub(r'[-_.]+', '-', d.name).lower()}=={d.version}" for d in distributions()}
    others = sorted(p for p in said if not p.startswith(("ratchet-train==", "ratchet-hooks==")))
    assert [p.partition("@")[0] for p in installed()] == others
    assert any(p.startswith("torch==") for p in installed())


def test_package_list_takes_first_of_duplicates_and_skips_leftovers(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in ("first/Lib_A-1.0+cpu.dist-info", "second/lib_a-2.0.dist-info", "second/ratchet_train-9.dist-info"):
        (tmp_path / place).mkdir(parents=True)
    (second / "old.egg-info").mkdir()
    (second / "old.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old.name\nVersion: 0.3\n")
    (second / "bad-4-py3.11.egg-info").mkdir()
    (second / "module.py").write_text("")
    for leftover in (
        "~ip-23.0.dist-info",
        "foo bar.egg-info",
        "-.dist-info",
    ):  # of pip, while it replaces one; of nobody
        (second / leftover).mkdir()
    found = installed([str(first), str(second), str(tmp_path / "absent"), str(second / "module.py")])
    assert found == ["bad==4-py3.11", "lib-a==1.0+cpu", "old-name==0.3"]


def test_package_list_has_commit_or_hash_and_marks_editable(tmp_path: Path) -> None:
    told = {
        "a": '{"url": "https://git.example/a", "vcs_info": {"vcs": "git", "commit_id": "%s"}}' % ("c0de" * 10),
        "b": '{"url": "file:///src/b", "dir_info": {"editable": true}}',
        "c": '{"url": "file:///src/c", "dir_info": {}}',
        "d": '{"url": "https://files.example/d.whl", "archive_info": {"hashes": {"sha256": "abcd"}}}',
        "e": "no json",
    }
    for name, text in told.items():
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "direct_url.json").write_text(text)
    found = installed([str(tmp_path)])
    assert found == [f"a==1@{'c0de' * 10}", "b==1@editable", "c==1", "d==1@abcd", "e==1"]
    assert editable(found) == ["b"]


def test_package_changes_are_named_with_versions() -> None:
    then, now = ["a==1", "b==1", "torch==2.9"], ["b==2", "c==3", "torch==2.13"]
    recorded = {"packages": digest(then), "torch": "2.9", **provenance(then, None)}
    current = {"packages": digest(now), "torch": "2.13"}
    found = expand_package_difference(compare(compared_facts(recorded), current), recorded, now)
    assert [(d.key, d.recorded, d.current) for d in found] == [
        ("package:a", "1", None), ("package:b", "1", "2"), ("package:c", None, "3"), ("torch", "2.9", "2.13"),
    ]  # fmt: skip
    assert changes(now, now, ()) == []


def test_package_changes_of_other_rank_are_not_named_from_rank_0_list() -> None:
    """On another node, with other packages: that they changed is known, which is not."""
    then, now, rank_0 = ["a==1"], ["a==2"], ["a==1", "b==1"]
    found = compare({"packages": digest(then)}, {"packages": digest(now)})
    assert expand_package_difference(found, provenance(rank_0, None), now) == found
    assert expand_package_difference(found, {}, now) == found
