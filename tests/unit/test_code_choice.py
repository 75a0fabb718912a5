"""What a snapshot leaves out by ignore files: the same as git, and what ``code.include`` brings back."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ratchet_contract import code_tree
from ratchet_contract.code_choice import choose
from ratchet_contract.code_tree import TreeError
from ratchet_service.snapshot import snapshot

FILES = ["train.py", "runs/a/log.txt", "data/x.bin", "data/keep/y.bin", "pkg/net.py", "pkg/weights.pt", "pkg/best.pt",
         "pkg/tmp/z", "build", "docs/build/index.html", "foo/keep.txt", "foo/other.txt", "a#b", "with space.txt"]  # fmt: skip
IGNORED = """
# outputs
runs/
*.pt
!best.pt
/data/*
!/data/keep
build
foo/*
!foo/keep.txt
\\a#b
"""
NESTED = "tmp/\n!weights.pt\n"


def project(root: Path, **ignore: str) -> Path:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for name, text in ignore.items():
        (root / f".{name}").write_text(text)
    return root


def taken(root: Path, *include: str) -> set[str]:
    return {entry.path for entry in choose(root, include).entries if not Path(entry.path).name.startswith(".")}


@pytest.mark.skipif(shutil.which("git") is None, reason="no git, whose word is the one that counts")
def test_gitignore_holds_as_in_git(tmp_path: Path) -> None:
    root = project(tmp_path / "code", gitignore=IGNORED)
    (root / "pkg" / ".gitignore").write_text(NESTED)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    told = subprocess.run(
        ["git", "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    ours = {entry.path for entry in choose(root).entries}
    assert ours == set(told.split("\0")) - {""}
    assert {"train.py", "pkg/best.pt", "pkg/weights.pt", "data/keep/y.bin", "foo/keep.txt"} <= ours
    assert not ours & {"runs/a/log.txt", "data/x.bin", "docs/build/index.html", "pkg/tmp/z", "a#b"}


def test_ratchetignore_has_the_last_word_and_both_are_named(tmp_path: Path) -> None:
    root = project(tmp_path, gitignore="runs/\n*.pt\n", ratchetignore="data/\n!weights.pt\n")
    assert taken(root) == set(FILES) - {"runs/a/log.txt", "pkg/best.pt", "data/x.bin", "data/keep/y.bin"}
    ((code, text),) = choose(root).notes()
    assert code == "code-left-out" and "data/, pkg/best.pt, runs/" in text and "code.include" in text
    (root / ".gitignore").unlink()
    (root / ".gitignore").symlink_to(".ratchetignore")  # git follows none either
    assert "runs/a/log.txt" in taken(root)


def test_include_brings_files_and_directories_back(tmp_path: Path) -> None:
    root = project(tmp_path, gitignore="runs/\n*.pt\ndata/\n")
    bare = taken(root)
    assert taken(root, "pkg/best.pt") == bare | {"pkg/best.pt"}
    assert taken(root, "./data/keep/") == bare | {"data/keep/y.bin"}
    assert taken(root, "data") == bare | {"data/keep/y.bin", "data/x.bin"}
    for name in ("missing.txt", "../train.py", "/etc/passwd", ".git"):
        with pytest.raises(TreeError, match=r"code\.include names") as refused:
            choose(root, [name])
        assert refused.value.code == "include-not-found"


def test_what_was_copied_is_whole_wherever_it_is_read(tmp_path: Path) -> None:
    """The ignore files are in the copy, and leave nothing out of it: its digest stays."""
    root = project(tmp_path / "mine", gitignore="data/\n")
    digest = snapshot(root, tmp_path / "code", include=["data/x.bin"])
    copy = tmp_path / "code" / digest
    assert (
        (copy / "data" / "x.bin").exists() and not (copy / "data" / "keep").exists() and (copy / ".gitignore").exists()
    )
    assert code_tree.digest(code_tree.entries(copy)) == digest


def test_large_files_are_named(tmp_path: Path) -> None:
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(40 << 20)
    ((code, text),) = choose(tmp_path).notes()
    assert code == "code-large-files" and "big.bin (40 MiB)" in text and ".ratchetignore" in text


@pytest.mark.parametrize("line", ["*a*a*a*a*a*b", "a\\", "**/a/**/b/**/c/**/d"])
def test_patterns_that_take_for_ever_or_mean_nothing_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / ("a" * 200)).write_text("")
    (tmp_path / ".gitignore").write_text(f"runs/\n{line}\n")
    with pytest.raises(TreeError, match="line 2") as refused:
        choose(tmp_path)
    assert refused.value.code == "ignore-file"
