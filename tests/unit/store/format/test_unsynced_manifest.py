"""A manifest got its name, and then the system would not say that this lasts: nothing counts on it, and nothing that a reader
may take is removed.

No disk here fails the sync of a directory, so the call itself is replaced; what a loss of power leaves then is the model's."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract import atomic_write
from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_store.filesystem.durable_io import NOT_WRITTEN
from ratchet_store.format import manifest_file as store_commit
from ratchet_store.format.manifest_file import checkpoint_dirs, read_manifest
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.read.find_base import find_base
from ratchet_store.retention.attempt_retention import Keeper
from ratchet_store.retention.delete import sweep
from tests.support.checkpoints import list_names, make_checkpoint, manifest_of, write_ranks
from tests.support.one_shot_writers import commit
from tests.support.power_loss import Recorder, disk_states
from tests.support.retention import run_retention

LINEAGE = [Segment(attempt=1, after_step=0)]
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "its own": lambda directory: directory,
    "all checkpoints'": lambda directory: directory.parent,
    "the job's": lambda directory: directory.parent.parent,
}


def base(root: Path) -> Manifest | None:
    manifest, moved = find_base(root / "checkpoints", root / "quarantine", LINEAGE)
    assert moved == [], "a half-written checkpoint counted"
    return manifest


class Disk:
    """Syncs of one folder fail once a manifest is in it. ``stuck``: no name can be removed either, as on a file system that went
    read-only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, stuck: bool = False) -> None:
        self._patch, self._folder = monkeypatch, folder
        for module in (store_commit, atomic_write):
            monkeypatch.setattr(module, "fsync_path", self._sync)
        if stuck:
            monkeypatch.setattr(os, "unlink", self._remove)

    def _sync(self, path: Path) -> None:
        if path == self._folder and any(path.rglob(MANIFEST_NAME)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync_path(path)

    def _remove(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def mended(self) -> None:
        self._patch.undo()


def save(checkpoints: Path, step: int, parent: Manifest, *, state: Any = None) -> Manifest:
    """Seals another manifest each time: ``state`` is in the files, too."""
    directory = checkpoints / checkpoint_dir_name(step, 1)
    files, tensors = write_ranks(directory, seed=step, state=state)
    return commit(directory, manifest_of(step, 1, files, tensors, parent=parent.base))


@pytest.mark.parametrize("which", FOLDERS)
def test_commit_with_failed_directory_sync_is_undone_and_repeatable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = make_checkpoint(checkpoints, 10)
    directory = checkpoints / checkpoint_dir_name(20, 1)
    disk = Disk(monkeypatch, FOLDERS[which](directory))
    with pytest.raises(CheckpointError, match="input/output error") as caught:
        save(checkpoints, 20, first)
    assert caught.value.code == NOT_WRITTEN and MANIFEST_NAME not in list_names(directory)
    assert base(tmp_path) == first
    with pytest.raises(CheckpointError, match="input/output error"):  # a second sync proves nothing of the first name
        save(checkpoints, 20, first)
    assert base(tmp_path) == first
    disk.mended()
    again = save(checkpoints, 20, first, state={"another": "try"})
    assert base(tmp_path) == again and verify(directory).ok


def test_acknowledged_commit_survives_later_sync_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    first = make_checkpoint(checkpoints, 10)
    there = save(checkpoints, 20, first)
    Disk(monkeypatch, checkpoints)
    with pytest.raises(CheckpointError, match="input/output error"):
        commit(checkpoints / there.id, there)
    assert base(tmp_path) == there


def test_unsynced_manifest_that_cannot_be_removed_keeps_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    keeper = Keeper(checkpoints, CheckpointSpec(keep_last=2), 1)
    first = make_checkpoint(checkpoints, 10)
    keeper.on_committed(first)
    directory = checkpoints / checkpoint_dir_name(20, 1)
    disk = Disk(monkeypatch, directory, stuck=True)
    with pytest.raises(
        CheckpointError, match=r"was renamed into place, but .*Input/output.*Read-only.*not count as saved"
    ) as caught:
        save(checkpoints, 20, first)
    assert caught.value.code == NOT_WRITTEN
    disk.mended()
    unsure = read_manifest(directory)
    assert base(tmp_path) == unsure and verify(directory).ok  # a reader takes it, whole
    chain = [first]
    for step in (
        30,
        40,
        50,
    ):  # they do not descend from it, and those of the lineage that were acknowledged are counted alone
        chain.append(save(checkpoints, step, chain[-1]))
        keeper.on_committed(chain[-1])
        assert verify(directory).ok
    assert base(tmp_path) == chain[-1]
    assert sweep(checkpoints, dead_attempts={1}) == [] and verify(directory).ok
    assert run_retention(checkpoints, keep_last=2, lineage=LINEAGE) == [
        (20, 1)
    ]  # once the attempt is over, as any of its age


def test_power_loss_around_failed_sync_keeps_acknowledged_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    recorder = Recorder(tmp_path / "disk")
    checkpoints = recorder.root / "checkpoints"
    with recorder.recording():
        first = make_checkpoint(checkpoints, 10)
        start = len(recorder.ops)
        disk = Disk(monkeypatch, checkpoints / checkpoint_dir_name(20, 1))
        with pytest.raises(CheckpointError):
            save(checkpoints, 20, first)
        failed = len(recorder.ops)
        disk.mended()
        second = save(checkpoints, 20, first)
    assert start < failed < len(recorder.ops)
    seen: set[str] = set()
    for count in range(start, len(recorder.ops) + 1):
        for name in disk_states(recorder.ops, count, tmp_path / "after", 3):
            root = tmp_path / "after"
            found = base(root)
            assert found is not None and (found == second or count < len(recorder.ops)), name
            seen.add("first" if found == first else "unsure" if count < failed else "later")
            sweep(root / "checkpoints", dead_attempts={1})
            left = [directory for _, _, directory in checkpoint_dirs(root / "checkpoints")]
            assert base(root) == found and all(verify(directory).ok for directory in left), name
            shutil.rmtree(root)
    assert seen == {"first", "unsure", "later"}
