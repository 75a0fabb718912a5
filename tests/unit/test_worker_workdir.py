"""The ranks' current directory: a copy that may be written, made whole or not at all, and only once."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from ratchet_service.snapshot import snapshot
from ratchet_worker.workdir import prepare


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


def test_the_copy_is_writable_and_kept(code: Path, tmp_path: Path) -> None:
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


def test_a_copy_that_was_cut_short_is_never_used(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [p.name for p in (tmp_path / "job").iterdir()] == ["work"] and (work / "train.py").exists()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        prepare(code, tmp_path / "job" / "other")
    assert [p.name for p in (tmp_path / "job").iterdir()] == ["work"]


def test_without_code_it_is_empty_and_its_place_must_be_there(tmp_path: Path) -> None:
    prepare(None, tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []
    with pytest.raises(FileNotFoundError):
        prepare(None, tmp_path / "nowhere" / "work")
