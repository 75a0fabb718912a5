"""Snapshots of user code: by content, read-only, once, and only removed when nobody names them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet_contract.code.tree import Limits
from ratchet_contract.errors import SpecError
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.job import JobSpec
from ratchet_service.launchers.registry import load
from ratchet_service.preflight.paths import Roots
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.user_code import snapshot as snapshots
from ratchet_service.user_code.snapshot import inspect, remove_unreferenced, snapshot


@pytest.fixture
def code(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("import pkg.model\n")
    (root / "pkg" / "model.py").write_text("width = 3\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "alias.py").symlink_to("pkg/model.py")
    return root


def test_snapshot_is_complete_and_unaffected_by_later_edits(code: Path, tmp_path: Path) -> None:
    store = tmp_path / "code"
    first = snapshot(code, store)
    (code / "pkg" / "model.py").write_text("width = 4\n")
    assert (store / first / "pkg" / "model.py").read_text() == "width = 3\n"
    assert (store / first / "alias.py").read_text() == "width = 3\n"
    assert os.access(store / first / "run.sh", os.X_OK)
    second = snapshot(code, store)
    assert second != first
    assert (store / second / "pkg" / "model.py").read_text() == "width = 4\n"
    (code / "pkg" / "model.py").write_text("width = 3\n")
    assert snapshot(code, store) == first


def test_snapshot_is_read_only(code: Path, tmp_path: Path) -> None:
    target = tmp_path / "code" / snapshot(code, tmp_path / "code")
    writable = [p for p in [target, *target.rglob("*")] if not p.is_symlink() and p.stat().st_mode & 0o222]
    assert writable == []


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "train.py").write_text("import pkg\n"),
        lambda root: (root / "train.py").rename(root / "main.py"),
        lambda root: (root / "train.py").chmod(0o755),
        lambda root: (root / "new.py").write_text(""),
        lambda root: ((root / "alias.py").unlink(), (root / "alias.py").symlink_to("train.py")),
    ],
    ids=["content", "name", "mode", "file", "link"],
)
def test_snapshot_digest_changes_with_content_mode_or_name(code: Path, tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    before = snapshot(code, tmp_path / "code")
    change(code)
    assert snapshot(code, tmp_path / "code") != before


def test_snapshot_leaves_out_caches_and_tool_directories(code: Path, tmp_path: Path) -> None:
    before = snapshot(code, tmp_path / "code")
    for folder in (".git", "__pycache__", ".venv", "pkg/__pycache__", "environment"):
        (code / folder).mkdir(parents=True)
        (code / folder / "x.txt").write_text("x")
    (code / "environment" / "pyvenv.cfg").write_text("home = /usr\n")
    (code / "pkg" / "model.pyc").write_bytes(b"\0")
    assert snapshot(code, tmp_path / "code") == before


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "pkg/../../secret"])
def test_snapshot_refuses_links_outside_directory(code: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("x")
    (code / "leak").symlink_to(target)
    with pytest.raises(SpecError, match="points outside") as caught:
        snapshot(code, tmp_path / "code")
    assert caught.value.errors[0].pointer == "/code/path"
    assert not (tmp_path / "code").exists()


@pytest.mark.parametrize(
    ("path", "code_word"),
    [("/nowhere/at/all", "not-a-directory"), ("mine", "relative-path")],
    ids=["missing", "relative"],
)
def test_a_path_that_is_no_directory_is_refused(path: str, code_word: str) -> None:
    with pytest.raises(SpecError) as caught:
        inspect(path)
    assert caught.value.errors[0].code == code_word


def test_code_directory_too_large_is_refused(code: Path) -> None:
    inspect(code)
    with pytest.raises(SpecError, match="more than"):
        inspect(code, limits=Limits(max_bytes=10))
    with pytest.raises(SpecError, match="more than"):
        inspect(code, limits=Limits(max_files=2))


def test_unreferenced_snapshots_are_removed_after_grace(code: Path, tmp_path: Path) -> None:
    store = tmp_path / "code"
    kept = snapshot(code, store)
    (code / "train.py").write_text("pass\n")
    gone = snapshot(code, store)
    (store / ".tmp-torn").mkdir()
    assert remove_unreferenced(store, lambda: {kept}) == []
    assert remove_unreferenced(store, lambda: {kept}, grace=0.0) == sorted([gone, ".tmp-torn"])
    assert (store / kept / "train.py").exists()
    assert not (store / gone).exists()


def test_two_submissions_at_once_make_one_copy(code: Path, tmp_path: Path) -> None:
    program = "import sys, pathlib; from ratchet_service.user_code.snapshot import snapshot as s; "
    program += "print(s(sys.argv[1], pathlib.Path(sys.argv[2])))"
    command = [sys.executable, "-c", program, str(code), str(tmp_path / "code")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(digests) == 1
    assert {p.name for p in (tmp_path / "code").iterdir()} == digests | {".lock"}


@pytest.mark.parametrize("what", ["the directory", "a directory in it", "a link's directory", "a file"])
def test_snapshot_refuses_path_replaced_by_link_after_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The check of what a spec may name, then a link is put into the path, then the copy."""
    home, allowed, secret = tmp_path / "home", tmp_path / "allowed", tmp_path / "secret"
    for folder in (home, allowed / "job" / "sub", secret / "sub"):
        folder.mkdir(parents=True)
    for folder in (allowed / "job", allowed / "job" / "sub", secret, secret / "sub"):
        if what == "a link's directory":
            (folder / "link").symlink_to("nothing")
        else:
            (folder / "main.py").write_text(f"# {folder.name}\n")
    roots = Roots(home, (allowed,), ())
    named = allowed / "named"
    named.symlink_to("job" if what != "a file" else "job/main.py")
    assert roots.allows_path(named.resolve()) and not roots.allows_path(secret)

    def swap() -> None:
        if what in ("the directory", "a file"):
            named.unlink()
            named.symlink_to(secret if what == "the directory" else secret / "main.py")
        else:
            (allowed / "job" / "sub").rename(allowed / "job" / "was")
            (allowed / "job" / "sub").symlink_to(secret / "sub")

    if what in ("the directory", "a file"):
        swap()
    else:
        choose = snapshots.choose
        monkeypatch.setattr(snapshots, "choose", lambda *given: (choose(*given), swap())[0])
    copy = snapshots.snapshot_file if what == "a file" else snapshots.snapshot
    with pytest.raises(SpecError) as refused:
        copy(named, home / "code", allowed=roots.allows_path)
    pointer = "/start_from/path" if what == "a file" else "/code/path"
    assert [(p.pointer, p.code) for p in refused.value.errors] == [(pointer, "path-not-allowed")]
    assert [entry.name for entry in (home / "code").iterdir()] == [".lock"], "nothing half copied stays"


def test_parent_ignore_files_apply_only_within_code_root(
    code: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same by the check at submission and by the snapshot."""
    home = HomePaths(tmp_path_factory.mktemp("home"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.sh\n")
    spec = JobSpec.model_validate(
        {"name": "a", "script": ["train.py"], "code": {"path": str(code)}, "world": {"device": "cpu"}}
    )
    for root, taken in ((code, True), (tmp_path, False)):
        ports = LocalSubmission(home, Machine((), 8), load(home, None), roots=Roots(home.home, (root,)))
        said = [w.code for w in ports.resolve(spec)[1]]
        assert ("code-left-out" in said, (home.code / ports.snapshot(code) / "run.sh").exists()) == (not taken, taken)
