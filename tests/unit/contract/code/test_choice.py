"""What a snapshot leaves out by ignore files: the same as git, and what ``code.include`` brings back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ratchet_contract.code import choice, tree
from ratchet_contract.code.choice import choose
from ratchet_contract.code.tree import TreeError
from ratchet_service.isolation.file_access import as_user
from ratchet_service.user_code.snapshot import snapshot
from tests.support.run_as import USER, open_directory

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


def by_git(root: Path) -> set[str]:
    """What git does not ignore in the directory."""
    command = ["git", "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return set(told.split("\0")) - {""}


GIT = pytest.mark.skipif(shutil.which("git") is None, reason="no git, whose word is the one that counts")


@GIT
@pytest.mark.parametrize("code", ["sub", "sub/inner", "."])
def test_gitignore_of_parent_directories_applies_as_in_git(tmp_path: Path, code: str) -> None:
    repository = tmp_path / "repository"
    root = project(repository / code)
    (tmp_path / ".gitignore").write_text("*\n")  # above the repository
    (repository / ".gitignore").write_text(
        "runs/\n/pkg/*\n*.bin\nbuild\n!x.bin\n/sub/a#b\n/sub/inner/foo/\nsub/*/docs\n"
    )
    (repository / "sub").mkdir(exist_ok=True)
    (repository / "sub" / ".gitignore").write_text("*.txt\n!y.bin\n/inner/a#b\n")
    if code != ".":
        (root / "pkg" / ".gitignore").write_text("tmp/\n")
    bare = {entry.path for entry in choose(root).entries}
    assert ("build" in bare) == (code != ".")
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    ours = {entry.path for entry in choose(root).entries}
    assert ours == by_git(root) and {"train.py", "data/x.bin"} <= ours and not {"runs/a/log.txt", "build"} & ours
    assert "runs/" in choose(root).left_out
    assert {entry.path for entry in choose(root, ["runs"]).entries} == ours | {"runs/a/log.txt"}
    assert choose(root).is_left_out("runs/a/log.txt") and not choose(root, ["runs/a/log.txt"]).is_left_out(
        "runs/a/log.txt"
    )
    unread = {entry.path for entry in choose(root, is_allowed=lambda path: path.is_relative_to(root)).entries}
    assert unread == (ours if code == "." else bare)


def test_code_directory_ignored_by_repository_uses_own_gitignore(tmp_path: Path) -> None:
    """Like a project in a home directory whose dotfiles are in git."""
    root = project(tmp_path / "home" / "desk" / "code", gitignore="runs/\n")
    (tmp_path / "home" / ".git").mkdir()
    for pattern in ("*", "/*\n!.vimrc", "/desk/", "code"):
        (tmp_path / "home" / ".gitignore").write_text(f"{pattern}\n*.pt\n")
        assert taken(root) == set(FILES) - {"runs/a/log.txt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another owner needs root")
def test_gitignore_of_repository_owned_by_another_user_is_not_read(tmp_path: Path) -> None:
    root = project(tmp_path / "code")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.py\n")
    assert "train.py" not in taken(root)
    os.chown(tmp_path / ".git", 12345, 12345)
    assert taken(root) == set(FILES)


@GIT
def test_gitignore_holds_as_in_git(tmp_path: Path) -> None:
    root = project(tmp_path / "code", gitignore=IGNORED)
    (root / "pkg" / ".gitignore").write_text(NESTED)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    told = by_git(root)
    ours = {entry.path for entry in choose(root).entries}
    assert ours == told
    assert {"train.py", "pkg/best.pt", "pkg/weights.pt", "data/keep/y.bin", "foo/keep.txt"} <= ours
    assert not ours & {"runs/a/log.txt", "data/x.bin", "docs/build/index.html", "pkg/tmp/z", "a#b"}


@GIT
@pytest.mark.parametrize(
    "pattern",
    [
        *(f"x[[:{name}:]]" for name in ("alnum", "alpha", "blank", "cntrl", "digit", "graph", "lower", "print", "punct")),
        "x[[:space:]]", "x[[:upper:]]", "x[[:xdigit:]]", "x[^[:alpha:]]", "x[![:digit:]_]", "x[_[:lower:][:digit:]]",
        "x[:alpha:]", "x\\[[:alpha:]]",
    ],
)  # fmt: skip
def test_character_classes_of_ignore_patterns_match_as_in_git(tmp_path: Path, pattern: str) -> None:
    root = project(tmp_path / "code", gitignore=f"{pattern}\n")
    for character in ["", *map(chr, range(1, 127))]:
        if character not in "/\r\n":
            (root / f"x{character}").write_text("")
    (root / "x[a]").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    assert {entry.path for entry in choose(root).entries} == by_git(root)


@GIT
@pytest.mark.parametrize("text", ["\ufefftrain.py\nbuild\n", "\ufeff!train.py\r\nbuild", "\ufeff\ufefftrain.py\n"])
def test_byte_order_mark_at_the_start_of_an_ignore_file_is_skipped_as_in_git(tmp_path: Path, text: str) -> None:
    root = project(tmp_path / "code", gitignore=text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    assert {entry.path for entry in choose(root).entries} == by_git(root)


def test_ratchetignore_overrides_gitignore_and_note_names_left_out_files(tmp_path: Path) -> None:
    root = project(tmp_path, gitignore="runs/\n*.pt\n", ratchetignore="data/\n!weights.pt\n")
    assert taken(root) == set(FILES) - {"runs/a/log.txt", "pkg/best.pt", "data/x.bin", "data/keep/y.bin"}
    ((code, text),) = choose(root).notes()
    assert code == "code-left-out" and "data/, pkg/best.pt, runs/" in text and "code.include" in text
    assert "does not exist when it starts: create it in the code (os.makedirs)" in text
    (root / ".ratchetignore").write_text("x.bin\n")
    (root / ".gitignore").write_text("best.pt\n")
    assert "makedirs" not in choose(root).notes()[0][1], "files alone, no directory"
    (root / ".gitignore").unlink()
    (root / ".gitignore").symlink_to(".ratchetignore")  # git follows none either
    assert "runs/a/log.txt" in taken(root)


def test_code_include_restores_ignored_files_and_directories(tmp_path: Path) -> None:
    root = project(tmp_path, gitignore="runs/\n*.pt\ndata/\n")
    bare = taken(root)
    assert taken(root, "pkg/best.pt") == bare | {"pkg/best.pt"}
    assert taken(root, "./data/keep/") == bare | {"data/keep/y.bin"}
    assert taken(root, "data") == bare | {"data/keep/y.bin", "data/x.bin"}
    for name in ("missing.txt", "../train.py", "/etc/passwd", ".git"):
        with pytest.raises(TreeError, match=r"code\.include names") as refused:
            choose(root, [name])
        assert refused.value.code == "include-not-found"


def test_snapshot_copy_has_same_digest_as_source(tmp_path: Path) -> None:
    """The ignore files are in the copy, and leave nothing out of it: its digest stays."""
    root = project(tmp_path / "mine", gitignore="data/\n")
    digest = snapshot(root, tmp_path / "code", include=["data/x.bin"])
    copy = tmp_path / "code" / digest
    assert (
        (copy / "data" / "x.bin").exists() and not (copy / "data" / "keep").exists() and (copy / ".gitignore").exists()
    )
    assert tree.tree_digest(tree.list_entries(copy)) == digest


def test_large_files_in_code_are_noted(tmp_path: Path) -> None:
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(40 << 20)
    ((code, text),) = choose(tmp_path).notes()
    assert code == "code-large-files" and "big.bin (40 MiB)" in text and ".ratchetignore" in text


@pytest.mark.parametrize("line", ["*a*a*a*a*a*b", "**/a/**/b/**/c/**/d"])
def test_ignore_pattern_with_exponential_matching_is_refused_with_line(tmp_path: Path, line: str) -> None:
    (tmp_path / ("a" * 200)).write_text("")
    (tmp_path / ".gitignore").write_text(f"runs/\n{line}\n")
    with pytest.raises(TreeError, match="line 2: .*" + re.escape(repr(line))) as refused:
        choose(tmp_path)
    assert refused.value.code == "ignore-file"


@pytest.mark.parametrize("name", choice.IGNORE_FILES)
@pytest.mark.parametrize("above", [False, True])
def test_directory_in_place_of_an_ignore_file_is_refused_by_name(tmp_path: Path, name: str, above: bool) -> None:
    root = project(tmp_path / "code")
    (tmp_path / ".git").mkdir()
    folder = (tmp_path if above else root) / name
    folder.mkdir()
    with pytest.raises(TreeError, match=re.escape(f"{str(folder)!r} cannot be read")) as refused:
        choose(root)
    assert refused.value.code == "ignore-file"
    assert str(folder) not in [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]


def test_unreadable_ignore_file_is_refused_by_name() -> None:
    """The files that it names must not be copied because of a wrong permission."""
    with open_directory() as folder:
        root = project(folder, gitignore="*.pt\n")
        (root / ".gitignore").chmod(0)
        with (
            as_user(USER if os.geteuid() == 0 else None),
            pytest.raises(TreeError, match=r"\.gitignore' cannot be read: Permission denied") as refused,
        ):
            choose(root)
        assert refused.value.code == "ignore-file"


@GIT
@pytest.mark.parametrize("line", ["!", "a\\", "/", "\x0cruns", "train.py\r"])
def test_meaningless_ignore_lines_are_skipped_as_in_git(tmp_path: Path, line: str) -> None:
    root = project(tmp_path / "code")
    (root / ".gitignore").write_bytes(f"*.pt\n{line}\nbuild\n".encode())
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    assert {entry.path for entry in choose(root).entries} == by_git(root)


def test_ignored_file_count_is_bounded_but_not_inside_ignored_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_MAX_NAMES", 20)
    (tmp_path / "runs").mkdir()
    for name in range(30):
        (tmp_path / "runs" / f"{name}.log").touch()
    (tmp_path / ".gitignore").write_text("*.log\n")
    with pytest.raises(TreeError, match=r"as a whole, with a line like data/ in \.ratchetignore") as refused:
        choose(tmp_path)
    assert refused.value.code == "too-large"
    (tmp_path / ".ratchetignore").write_text("runs/\n")
    assert [entry.path for entry in choose(tmp_path).entries] == [".gitignore", ".ratchetignore"]
