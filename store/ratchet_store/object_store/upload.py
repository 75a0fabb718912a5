"""Copy the local directory of checkpoints to an object store, and delete the copies of checkpoints that were deleted here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ratchet_contract.checkpoint.manifest import FileEntry, Manifest
from ratchet_contract.checkpoint.resume_report import Segment, lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import CHANGED_NAME, FINISHED_NAME, MANIFEST_NAME, PINNED_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING, open_regular, read_error
from ratchet_store.format.manifest_file import MAX_MANIFEST_BYTES, MAX_MARKER_BYTES, checkpoint_dirs
from ratchet_store.object_store.client import DENIED, REMOTE
from ratchet_store.object_store.remote_checkpoints import (
    QUARANTINED_MANIFEST,
    Id,
    RemoteCheckpoints,
    digest_of,
    is_complete,
)
from ratchet_store.object_store.upload_marker import RECORD_NAME, Record, read_bytes

_MARKERS: Final = (PINNED_NAME, FINISHED_NAME, CHANGED_NAME)
_CHUNK: Final = 4 << 20
_RELIST_SECONDS: Final = 600.0
"""Seconds after which the store is listed again: objects may have been deleted there."""
_RANK_FILE: Final = re.compile(r"rank-\d{5,}-of-(\d{5,})\.safetensors", re.ASCII)
_STORE_FAILURES: Final = frozenset({REMOTE, DENIED})
"""Failures that concern every checkpoint; others concern one only, and the uploads of the rest continue."""


class Uploaded(NamedTuple):
    """A checkpoint whose copy in the store is complete. ``nbytes``: bytes sent, 0 if the copy existed already; ``seconds``:
    duration."""

    manifest: Manifest
    uri: str
    nbytes: int
    seconds: float


class Failed(NamedTuple):
    """A checkpoint that cannot be copied although the store works, such as a damaged one. The ``Mirror`` does not retry it."""

    folder: str
    error: str


class Step(NamedTuple):
    """Result of ``Mirror.step``. ``uploaded``: the checkpoint whose copy is complete now; ``failed``: one that cannot be copied;
    ``removed``: checkpoints whose copies were deleted; ``idle``: there was nothing to do."""

    uploaded: Uploaded | None = None
    failed: Failed | None = None
    removed: Sequence[Id] = ()
    idle: bool = False


class Mirror:
    """Copies local checkpoints of ``attempt`` and ``lineage`` to the object store. Deletes the copies of checkpoints that were
    deleted here, except pinned ones and the newest complete copy. Call ``step`` repeatedly, in one thread."""

    def __init__(
        self, remote: RemoteCheckpoints, checkpoints: Path, quarantine: Path, lineage: Sequence[Segment], attempt: int
    ) -> None:
        self._remote = remote
        self._checkpoints, self._quarantine = checkpoints, quarantine
        self._lineage, self._attempt = lineage, attempt
        self._remote_files: dict[Id, dict[str, int]] | None = None
        self._listed_at = 0.0
        self._uploaded: dict[Id, Manifest] = {}
        self._failed: set[Id] = set()
        self._record = Record(checkpoints / RECORD_NAME, remote.objects.url)

    def pending(self) -> list[str]:
        """Return the names of committed checkpoints of this attempt and its lineage without a known complete copy, newest
        first."""
        return [checkpoint_dir_name(*one) for one in self._committed() if one not in self._uploaded]

    def step(self, check_interrupted: Callable[[], None] = lambda: None) -> Step:
        """Copy the newest checkpoint that has no copy yet; those whose copy has failed are left out. If none is to be copied,
        update marker files, and delete copies of deleted checkpoints. Blocks; an exception from ``check_interrupted`` ends the
        call. An error of one checkpoint alone is part of the result; other errors are raised as ``CheckpointError``."""
        try:
            return self._step(check_interrupted)
        except BaseException:
            self._remote_files = None  # the result of what was in progress is unknown
            raise

    def _step(self, check_interrupted: Callable[[], None]) -> Step:
        """Do the work of ``step``. If nothing is to be copied and the listing of the store is too old, this call only discards
        the listing."""
        here = self._committed()
        todo = [one for one in here if one not in self._uploaded and one not in self._failed]
        if todo:
            return self._upload(todo[0], here[todo[0]], check_interrupted)
        if self._remote_files is not None and time.monotonic() - self._listed_at > _RELIST_SECONDS:
            self._remote_files, self._uploaded = None, {}
            return Step()
        marked = sum(self._sync_markers(one, here[one]) for one in here if one in self._uploaded) > 0
        removed = self._remove_deleted()
        return Step(removed=removed, idle=not (marked or removed))

    def _committed(self) -> dict[Id, Path]:
        """Return the directories of the committed checkpoints of this attempt and its lineage on this disk, newest first."""
        return {
            (step, attempt): directory
            for step, attempt, directory in checkpoint_dirs(self._checkpoints)
            if self._is_own((step, attempt)) and (directory / MANIFEST_NAME).is_file()
        }

    def _is_own(self, checkpoint: Id) -> bool:
        """True if the checkpoint is this attempt's own or of its lineage."""
        return checkpoint[1] == self._attempt or lineage_contains(self._lineage, *checkpoint)

    def _list_remote(self) -> dict[Id, dict[str, int]]:
        """Return the sizes of the objects in the store, by checkpoint and name. A new listing also deletes incomplete copies that
        nothing will complete."""
        if self._remote_files is None:
            there = self._remote.list_checkpoints()
            local = {(step, attempt) for step, attempt, _ in checkpoint_dirs(self._checkpoints)}
            for one, names in list(there.items()):
                if one[1] < self._attempt and one not in local and _is_orphan(names):
                    self._remote.remove(checkpoint_dir_name(*one), list(names))
                    del there[one]
            self._remote_files, self._listed_at = there, time.monotonic()
        return self._remote_files

    # --- upload ---

    def _upload(self, checkpoint: Id, directory: Path, check_interrupted: Callable[[], None]) -> Step:
        """Copy one checkpoint and return the result. An error of the checkpoint itself is ``failed`` in the result; other
        errors are raised. The result is empty if the checkpoint was deleted meanwhile."""
        begin, folder = time.monotonic(), directory.name
        try:
            raw = read_bytes(directory / MANIFEST_NAME, MAX_MANIFEST_BYTES)
            manifest = self._remote.parse(folder, raw)
            nbytes = self._upload_files(checkpoint, directory, manifest, raw, check_interrupted)
        except CheckpointError as error:
            if error.code in _STORE_FAILURES:
                raise
            if not (directory / MANIFEST_NAME).exists():  # retention deleted it meanwhile
                self._remove_incomplete(checkpoint)
                return Step()
            self._failed.add(checkpoint)
            return Step(failed=Failed(folder, error.detail))
        self._record.add(folder, manifest.digest, pinned=(directory / PINNED_NAME).exists())
        self._uploaded[checkpoint] = manifest  # only after the record: what is not recorded is reported by a later call
        uri = f"{self._remote.objects.url}/{folder}"
        return Step(uploaded=Uploaded(manifest, uri, nbytes, time.monotonic() - begin))

    def _upload_files(
        self, checkpoint: Id, directory: Path, manifest: Manifest, raw: bytes, check_interrupted: Callable[[], None]
    ) -> int:
        """Send a checkpoint's files, as far as needed, its manifest last. Returns the number of bytes sent, 0 if the copy is
        complete already."""
        objects, folder = self._remote.objects, directory.name
        names = self._list_remote().setdefault(checkpoint, {})
        nbytes = 0
        if MANIFEST_NAME in names and is_complete(manifest, names):
            self._remote.commit(folder, raw, manifest.digest)  # compares the manifests
            return 0
        doubted = QUARANTINED_MANIFEST in names  # the bytes were wrong, whatever their recorded size and digest
        for entry in manifest.files:
            check_interrupted()
            path, digest = f"{folder}/{entry.name}", digest_of(entry)
            if not doubted and names.get(entry.name) == entry.size and self._has(path, digest):
                continue
            objects.put(path, _read_verified(directory / entry.name, entry, check_interrupted), entry.size, digest)
            names[entry.name] = entry.size
            nbytes += entry.size
        for mark in _MARKERS:
            if (directory / mark).exists():
                objects.put_if_absent(f"{folder}/{mark}", _marker_content(directory, mark))
                names[mark] = 0
        self._remote.commit(folder, raw, manifest.digest)
        names[MANIFEST_NAME] = len(raw)
        if doubted:
            objects.delete([f"{folder}/{QUARANTINED_MANIFEST}"])
            del names[QUARANTINED_MANIFEST]
        return nbytes + len(raw)

    def _has(self, path: str, digest: str) -> bool:
        """True if the store has the object ``path`` with this digest."""
        try:
            return self._remote.objects.head(path).digest == digest
        except CheckpointError as error:
            if error.code != MISSING:
                raise
            return False

    def _remove_incomplete(self, checkpoint: Id) -> None:
        """Delete the copy of a checkpoint that is gone on this disk, unless the copy has a manifest."""
        names = self._list_remote().pop(checkpoint, {})
        if names and MANIFEST_NAME not in names:
            self._remote.remove(checkpoint_dir_name(*checkpoint), list(names))

    def _sync_markers(self, checkpoint: Id, directory: Path) -> bool:
        """Create or delete the checkpoint's marker files in the store, as on this disk. True if anything was changed."""
        names, changed = self._list_remote().setdefault(checkpoint, {}), False
        for mark in _MARKERS:
            here = (directory / mark).exists()
            if here == (mark in names) or not directory.is_dir():
                continue
            path = f"{directory.name}/{mark}"
            if here:
                self._remote.objects.put_if_absent(path, _marker_content(directory, mark))
                names[mark] = 0
            else:
                self._remote.objects.delete([path])
                del names[mark]
            changed = True
        if changed:
            self._record.add(directory.name, self._uploaded[checkpoint].digest, pinned=PINNED_NAME in names)
        return changed

    # --- remove ---

    def _remove_deleted(self) -> list[Id]:
        """Delete the copies of checkpoints that were deleted here, except pinned ones and the newest complete copy. Returns those
        whose copies are gone."""
        # only what this directory's record has: of a lost directory, no complete copy is deleted
        gone = [one for one in self._record.ids() if self._is_deleted(one)]
        if not gone:
            return []
        there = self._list_remote()
        whole = [
            one
            for one, names in there.items()
            if self._is_own(one) and MANIFEST_NAME in names and not _is_orphan(names)
        ]
        newest = max(whole, default=None)
        removed: list[Id] = []
        for one in gone:
            names = there.get(one, {})
            if one == newest or self._record.is_pinned(one) or PINNED_NAME in names:
                continue
            folder = checkpoint_dir_name(*one)
            try:
                if names:
                    self._remote.remove(folder, list(names))
                    there.pop(one)
                self._record.drop(folder)
            except CheckpointError:
                if not removed:
                    raise
                self._remote_files = None
                break  # report what is gone now; the failure is raised by the next call
            self._uploaded.pop(one, None)
            removed.append(one)
        return removed

    def _is_deleted(self, checkpoint: Id) -> bool:
        """True if the checkpoint's directory is gone from this disk, and the checkpoint is not in quarantine."""
        folder = checkpoint_dir_name(*checkpoint)
        return not os.path.lexists(self._checkpoints / folder) and not any(self._quarantine.glob(f"{folder}*"))


def _marker_content(directory: Path, marker: str) -> bytes:
    """Return the bytes to store for a marker file: those of the local file for ``CHANGED_NAME``, ``b""`` for the others."""
    return read_bytes(directory / marker, MAX_MARKER_BYTES) if marker == CHANGED_NAME else b""


def _is_orphan(names: dict[str, int]) -> bool:
    """True if the objects ``names`` lack the manifest or rank files. False for a quarantined checkpoint."""
    if QUARANTINED_MANIFEST in names:
        return False
    files = [match for name in names if (match := _RANK_FILE.fullmatch(name)) is not None]
    return MANIFEST_NAME not in names or not files or len(files) != int(files[0][1])


def _read_verified(path: Path, entry: FileEntry, check_interrupted: Callable[[], None]) -> Iterator[bytes]:
    """Yield the bytes of a rank file; each block is verified before its last chunk is yielded. Raises ``CheckpointError`` if it
    is damaged or unreadable."""
    block, digests = entry.block_size, entry.blocks
    try:
        fd = open_regular(path)
    except OSError as error:
        raise read_error(path, error) from error
    with os.fdopen(fd, "rb", buffering=0) as file:
        for number, digest in enumerate(digests):
            left = min(block, entry.size - number * block)
            hasher = xxhash.xxh3_128()
            while left > 0:
                check_interrupted()
                try:
                    data = file.read(min(left, _CHUNK))
                except OSError as error:
                    raise read_error(path, error) from error
                hasher.update(data)
                left -= len(data)
                if not data or (left == 0 and hasher.hexdigest() != digest):
                    raise CheckpointError(
                        f"{path}: block {number} differs from the saved data: the copy on this disk is damaged",
                        code=DAMAGED,
                    )
                yield data
