"""The ranks' current directory: a copy that may be written, made whole or not at all, and only once."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.user_code.snapshot import snapshot
from ratchet_worker.agent import working_directory
from ratchet_worker.agent.working_directory import prepare


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A snapshot as the service makes it: read-only files and directories."""
    source = tmp_path / "project"
    (source / "sub").mkdir(parents=True)
    (source / "train.py").write_text("print(1)\n")
    (source / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "sub" / "link").symlink_to("../train.py")
    return tmp_path / "code" / snapshot(source, tmp_path / "code")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_working_directory_copy_is_writable_and_kept_across_attempts(code: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    prepare(code, work)
    found = {p.relative_to(work).as_posix(): stat.S_IMODE(p.lstat().st_mode) for p in work.rglob("*")}
    assert found == {"train.py": 0o644, "sub": 0o755, "sub/run.sh": 0o755, "sub/link": 0o777}
    assert str((work / "sub" / "link").readlink()) == "../train.py"
    (work / "sub" / "out.pt").write_text("mine")
    (work / "train.py").unlink()
    prepare(code, work)  # the next attempt
    assert (work / "sub" / "out.pt").read_text() == "mine" and not (work / "train.py").exists()
    assert not (code / "sub" / "out.pt").exists()


def test_working_directory_interrupted_copy_is_never_used(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    work = tmp_path / "job" / "work"

    def killed(*_: object) -> None:
        os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(shutil, "copyfile", killed)
        prepare(code, work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not work.exists() and len(list((tmp_path / "job").iterdir())) == 1
    prepare(code, work)
    assert names(tmp_path / "job") == ["work", "work.json"] and (work / "train.py").exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        prepare(code, tmp_path / "job" / "other")
    assert names(tmp_path / "job") == ["work", "work.json"]


@pytest.mark.parametrize("step", ["copy", "update"])
def test_working_directory_of_one_node_survives_another_on_the_same_disk(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 2 begins to prepare the directory, and fails, while node 1 copies its first file."""
    work, real = tmp_path / "work", shutil.copyfile
    if step == "update":
        earlier, digest = snapshot_of(tmp_path, {"train.py": "1", "gone.py": "1"})
        prepare(earlier, work, digest)
    code, digest = snapshot_of(tmp_path, {"train.py": "2", "more.py": "2"})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def meanwhile(source: Path, target: Path) -> object:
        monkeypatch.setattr(shutil, "copyfile", full)
        with pytest.raises(OSError, match="No space"):
            prepare(code, work, digest, node=2)
        monkeypatch.setattr(shutil, "copyfile", real)
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", meanwhile)
    assert prepare(code, work, digest, node=1) == []
    assert {p.name: p.read_text() for p in work.iterdir()} == {"train.py": "2", "more.py": "2"}
    assert not list(tmp_path.glob(".work-*"))


def test_working_directory_without_code_is_empty(tmp_path: Path) -> None:
    prepare(None, tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []
    with pytest.raises(FileNotFoundError):
        prepare(None, tmp_path / "nowhere" / "work")


def snapshot_of(tmp_path: Path, files: dict[str, str]) -> tuple[Path, str]:
    source = tmp_path / "changed"
    shutil.rmtree(source, ignore_errors=True)
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    digest = snapshot(source, tmp_path / "code")
    return tmp_path / "code" / digest, digest


def test_working_directory_update_replaces_only_unchanged_files(tmp_path: Path) -> None:
    work = tmp_path / "job" / "work"
    work.parent.mkdir()
    old = {
        "train.py": "1",
        "lr.txt": "0.1",
        "notes.txt": "a",
        "gone.txt": "b",
        "dir/only.txt": "c",
        "was_file": "d",
        "linked/x": "e",
    }
    code, digest = snapshot_of(tmp_path, old)
    assert prepare(code, work, digest) == []
    (work / "notes.txt").write_text("of the job")
    (work / "out.pt").write_text("of the job")
    (work / "gone.txt").unlink()
    elsewhere = tmp_path / "elsewhere"
    (work / "linked").rename(elsewhere)
    (work / "linked").symlink_to(elsewhere)  # as the user's own code may
    new = {
        "train.py": "2",
        "lr.txt": "0.2",
        "notes.txt": "z",
        "gone.txt": "b",
        "was_file/inner": "f",
        "linked/x": "g",
        "out.pt": "h",
    }
    code, digest = snapshot_of(tmp_path, new)
    assert prepare(code, work, digest) == ["linked/x", "notes.txt", "out.pt"]
    found = {p.relative_to(work).as_posix(): p.read_text() for p in work.rglob("*") if p.is_file()}
    assert found == {
        "train.py": "2",
        "lr.txt": "0.2",
        "notes.txt": "of the job",
        "out.pt": "of the job",
        "was_file/inner": "f",
    }
    assert not (work / "dir").exists() and (elsewhere / "x").read_text() == "e"
    assert stat.S_IMODE((work / "train.py").stat().st_mode) == 0o644 and names(work.parent) == ["work", "work.json"]
    (work / "lr.txt").write_text("of the job")
    assert prepare(code, work, digest) == []  # the same code: the next attempt finds what this one has left
    assert (work / "lr.txt").read_text() == "of the job"


def test_working_directory_interrupted_update_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "job" / "work"
    work.parent.mkdir()
    code, digest = snapshot_of(tmp_path, {"a": "1", "b": "1", "c": "1", "d": "1"})
    prepare(code, work, digest)
    code, digest = snapshot_of(tmp_path, {"a": "2", "b": "2", "c": "2"})
    copied, copy = [], shutil.copyfile

    def killed(source: Path, place: Path) -> None:
        copied.append(source)
        if len(copied) == 2:
            os._exit(9)
        copy(source, place)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(shutil, "copyfile", killed)
        prepare(code, work, digest)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [(work / name).read_text() for name in "abc"] == ["2", "1", "1"]
    assert prepare(code, work, digest) == []
    assert [(work / name).read_text() for name in "abc"] == ["2", "2", "2"]
    assert names(work) == ["a", "b", "c"] and names(work.parent) == ["work", "work.json"]


def test_working_directory_interrupted_update_can_switch_to_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "job" / "work"
    work.parent.mkdir()
    first = snapshot_of(tmp_path, {"a": "1", "b": "1", "back": "1", "gone": "1", "own": "1"})
    prepare(first[0], work, first[1])
    (work / "own").write_text("of the job")
    second = snapshot_of(tmp_path, {"a": "2", "b": "2", "c": "2", "own": "1"})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(working_directory, "_replace_file", _until(full, 2))
            with pytest.raises(OSError, match="No space"):
                prepare(second[0], work, second[1])
    third = snapshot_of(tmp_path, {"a": "1", "b": "3", "back": "1", "own": "1"})
    assert prepare(third[0], work, third[1]) == []
    assert {path.name: path.read_text() for path in work.iterdir()} == {
        "a": "1", "b": "3", "back": "1", "own": "of the job"
    }  # fmt: skip


def test_working_directory_interrupted_update_is_undone_by_the_old_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "job" / "work"
    work.parent.mkdir()
    old = snapshot_of(tmp_path, {"a": "1", "b": "1", "gone": "1", "own": "1"})
    prepare(old[0], work, old[1])
    (work / "own").write_text("of the job")
    new = snapshot_of(tmp_path, {"a": "2", "added": "2", "b": "2", "own": "2"})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(working_directory, "_replace_file", _until(full, 3))
        with pytest.raises(OSError, match="No space"):
            prepare(new[0], work, new[1])
    assert {path.name: path.read_text() for path in work.iterdir()} == {
        "a": "2", "added": "2", "b": "1", "own": "of the job"
    }  # fmt: skip
    assert prepare(old[0], work, old[1]) == []
    found = {path.name: path.read_text() for path in work.iterdir()}
    assert found == {"a": "1", "b": "1", "gone": "1", "own": "of the job"}
    (work / "a").unlink()  # by the job: the update is over now
    assert prepare(old[0], work, old[1]) == [] and not (work / "a").exists()


def _until(failing: Callable[..., None], calls: int) -> Callable[..., None]:
    """``_put`` that fails from the call of this number on."""
    put, done = working_directory._replace_file, []

    def some(*arguments: Any) -> None:
        done.append(arguments)
        (failing if len(done) >= calls else put)(*arguments)

    return some


def test_working_directory_update_restores_code_file_removed_by_job(tmp_path: Path) -> None:
    work = tmp_path / "job" / "work"
    work.parent.mkdir()
    code, digest = snapshot_of(tmp_path, {"kept": "1", "removed": "1", "deleted": "1"})
    prepare(code, work, digest)
    for name in ("kept", "removed"):
        (work / name).write_text("of the job")
    (work / "deleted").unlink()
    code, digest = snapshot_of(tmp_path, {"kept": "2", "removed": "2", "deleted": "1"})
    assert prepare(code, work, digest) == ["kept", "removed"]
    (work / "removed").unlink()
    assert prepare(code, work, digest) == []
    found = {path.name: path.read_text() for path in work.iterdir()}
    assert found == {"kept": "of the job", "removed": "2"}
    (work / "removed").unlink()  # now it is one of those that were copied
    assert prepare(code, work, digest) == [] and not (work / "removed").exists()
