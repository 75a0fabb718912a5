"""What a reader finds of a file while it is written, after a failed write, and after a loss of power."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.atomic_write import atomic_file, ensure_dir, write_atomic
from tests.support.power_loss import Recorder, disk_states


def contents(recorder: Recorder, target: Path, name: str, first: int) -> set[bytes | None]:
    """What ``name`` may hold after a loss of power at each call from the ``first`` on; None: it is missing."""
    found: set[bytes | None] = set()
    for count in range(first, len(recorder.ops) + 1):
        for _ in disk_states(recorder.ops, count, target):
            path = target / name
            found.add(path.read_bytes() if path.exists() else None)
            shutil.rmtree(target)
    return found


@pytest.mark.parametrize("durable", [True, False])
def test_durable_write_survives_loss_of_power(tmp_path: Path, durable: bool) -> None:
    (tmp_path / "disk").mkdir()
    recorder = Recorder(tmp_path / "disk")
    path = recorder.root / "a" / "b" / "file"
    with recorder.recording():
        ensure_dir(path.parent)
        write_atomic(path, b"old", durable=durable)
        first = len(recorder.ops)
        write_atomic(path, b"new", durable=durable)
        last = len(recorder.ops)
    after = contents(recorder, tmp_path / "after", "a/b/file", last)
    during = contents(recorder, tmp_path / "after", "a/b/file", first)
    if durable:
        assert after == {b"new"} and during == {b"old", b"new"}
    else:  # the control: the model of the disk does lose what is not synced
        assert {None, b"", b"new"} <= after


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("write", "fsync", "rename"):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
            patched.setattr(os, call, full)
            write_atomic(path, b"new", durable=True)
        assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"
    with pytest.raises(KeyboardInterrupt), atomic_file(path, durable=True) as fd:
        os.write(fd, b"ne")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_concurrent_writers_of_one_path_never_mix_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = [bytes([65 + n]) * 200_000 for n in range(4)]
    write_atomic(path, written[0], durable=False)
    done = threading.Event()

    def write(data: bytes) -> None:
        while not done.is_set():
            write_atomic(path, data, durable=False)

    threads = [threading.Thread(target=write, args=(data,)) for data in written]
    for thread in threads:
        thread.start()
    try:
        assert all(path.read_bytes() in written for _ in range(300))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "file"
    other.write_bytes(b"of another")
    path.symlink_to(other)
    write_atomic(path, b"new", durable=False, mode=0o600)
    assert not path.is_symlink() and other.read_bytes() == b"of another"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
