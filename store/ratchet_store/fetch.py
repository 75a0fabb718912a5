"""A checkpoint out of an object store into the local directory, which is a cache of it from then on.

Its files are filled by a few connections at once in a directory of another name beside, every block compared with its digest
before it is written; the manifest comes last, then one rename. So what has a checkpoint's name was whole when it got it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import FileEntry, Manifest
from ratchet_contract.paths import CHANGED_NAME, FINISHED_NAME, MANIFEST_NAME, PINNED_NAME, checkpoint_dir_name
from ratchet_contract.resume import Segment, holds
from ratchet_store.commit import MAX_MARK, checkpoint_dirs, read_manifest
from ratchet_store.files import (
    DAMAGED,
    MISSING,
    ensure_dir,
    fsync_dir,
    not_written,
    replacing,
    write_all,
)
from ratchet_store.filling import done, filling
from ratchet_store.lineage import set_aside
from ratchet_store.objects import ObjectStore
from ratchet_store.read import verify_files
from ratchet_store.remote import Id, RemoteCheckpoints
from ratchet_store.retain import delete

CONNECTIONS: Final = 4
_RANGE: Final = 8 << 20  # bytes of one request, at least a block


class Brought(NamedTuple):
    """``fetched`` and where it came from; None: what is here is as new. ``notes``: what was damaged and passed over."""

    fetched: Manifest | None
    uri: str | None
    notes: list[str]


@dataclass
class Progress:
    """Of a fetch, for another thread to look at: bytes that have come, and the wish that it ends."""

    nbytes: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes


def newest_local(checkpoints: Path, lineage: Sequence[Segment], progress: Progress | None = None) -> Id | None:
    """The newest checkpoint of the lineage on this disk whose every byte is right. Raises ``CheckpointError`` for one that cannot
    be judged (unreadable, of a newer format): those who start from here say so with all they know. ``progress`` counts what was
    read, too: it is no silence."""
    progress = progress or Progress()
    for step, epoch, directory in checkpoint_dirs(checkpoints):
        if not holds(lineage, step, epoch):
            continue
        try:
            verify_files(directory, read_manifest(directory), progress=progress.add)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            continue
        return step, epoch
    return None


def bring(
    remote: RemoteCheckpoints,
    checkpoints: Path,
    quarantine: Path,
    lineage: Sequence[Segment],
    local: Id | None,
    progress: Progress | None = None,
) -> Brought:
    """Fetch the newest checkpoint of the lineage that is newer than ``local``. One with wrong bytes is set aside there, under its
    name, and the one before it is taken. Raises ``CheckpointError`` (``checkpoint-remote``, ``-denied``, ``-not-written``)."""
    notes: list[str] = []
    for (step, epoch), names in remote.listing().items():
        if not holds(lineage, step, epoch) or (local is not None and (step, epoch) <= local):
            continue
        if MANIFEST_NAME not in names:
            continue
        folder = checkpoint_dir_name(step, epoch)
        try:
            manifest = fetch(remote, folder, checkpoints, quarantine, marks=names, progress=progress)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            if error.code == DAMAGED:
                remote.set_aside(folder)
                notes.append(f"{folder} in {remote.objects.where} is damaged and was set aside: {error.detail}")
            continue
        return Brought(manifest, f"{remote.objects.where}/{folder}", notes)
    return Brought(None, None, notes)


def fetch(
    remote: RemoteCheckpoints,
    folder: str,
    checkpoints: Path,
    quarantine: Path,
    *,
    marks: Sequence[str] | dict[str, int] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Bring the checkpoint ``folder``; what lies under its name here and is no whole checkpoint is moved away or swept.

    Raises ``CheckpointError``: ``checkpoint-missing`` (not there, or taken away meanwhile), ``-damaged``, ``-newer``,
    ``-remote``, ``-not-written``.
    """
    progress = progress or Progress()
    raw = remote.raw_manifest(folder)
    manifest = remote.parse(folder, raw)
    if marks is None:
        marks = [path.rpartition("/")[2] for path in remote.objects.list(f"{folder}/")]
    target = checkpoints / folder
    try:
        ensure_dir(checkpoints)
        with filling(checkpoints, folder) as place:
            _Download(remote.objects, folder, place, manifest.files, progress).run()
            for mark in (FINISHED_NAME, PINNED_NAME):
                if mark in marks:
                    (place / mark).touch()
            if CHANGED_NAME in marks:
                (place / CHANGED_NAME).write_bytes(remote.objects.get(f"{folder}/{CHANGED_NAME}", MAX_MARK))
            with replacing(place / MANIFEST_NAME) as fd:
                write_all(fd, memoryview(raw))
            done(place)
            fsync_dir(place)
            if not _is_there(target, manifest):
                _clear(target, quarantine)
                place.rename(target)
            fsync_dir(checkpoints)
    except OSError as error:
        raise not_written(target, error) from error
    return read_manifest(target)


def _is_there(target: Path, manifest: Manifest) -> bool:
    """Has somebody else brought it meanwhile?"""
    try:
        there = read_manifest(target)
        verify_files(target, there)
    except CheckpointError:
        return False
    return there.digest == manifest.digest


def _clear(target: Path, quarantine: Path) -> None:
    """What has the checkpoint's name here: a damaged one goes to quarantine whole, what never was one is removed."""
    if not os.path.lexists(target):
        return
    if not (target / MANIFEST_NAME).exists():
        delete(target)
        return
    set_aside(target, quarantine)


class _Part(NamedTuple):
    """Blocks ``first <= n < last`` of a file."""

    entry: FileEntry
    first: int
    last: int


class _Download:
    """Threads that nobody has to wait for: one that hangs in a request ends with the process."""

    def __init__(
        self, objects: ObjectStore, folder: str, place: Path, files: Sequence[FileEntry], progress: Progress
    ) -> None:
        self._objects, self._folder, self._place, self._progress = objects, folder, place, progress
        self._parts = deque(part for entry in files for part in _parts(entry))
        self._files = files
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        for entry in self._files:
            with (self._place / entry.name).open("wb") as file:
                os.truncate(file.fileno(), entry.size)
        threads = [threading.Thread(target=self._work, name="fetch", daemon=True) for _ in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and self._failure is None and not self._progress.stop.is_set():
                thread.join(0.05)
        if self._failure is not None:
            raise self._failure
        if self._progress.stop.is_set():
            raise CheckpointError(f"the fetch of {self._objects.where}/{self._folder} was stopped")
        for entry in self._files:
            fd = os.open(self._place / entry.name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _work(self) -> None:
        while self._failure is None and not self._progress.stop.is_set():
            with suppress(IndexError):
                part = self._parts.popleft()
                try:
                    self._bring(part)
                except BaseException as error:
                    self._failure = self._failure or error
                continue
            return

    def _bring(self, part: _Part) -> None:
        fault = ""
        for _ in range(2):  # once more: the network may have been at fault
            fault = self._try(part)
            if not fault:
                return
        raise CheckpointError(f"{self._objects.where}/{self._folder}/{part.entry.name}: {fault}", code=DAMAGED)

    def _try(self, part: _Part) -> str:
        """Fill the blocks of a part; what is wrong with them, or an empty text."""
        block, digests = part.entry.block_size, part.entry.blocks
        name, path = f"{self._folder}/{part.entry.name}", self._place / part.entry.name
        begin, end = part.first * block, min(part.last * block, part.entry.size)
        hasher, position = xxhash.xxh3_128(), begin
        fd = os.open(path, os.O_WRONLY)
        try:
            while position < end:
                data = self._objects.get_range(name, position, min(position + _RANGE, end))
                if not data:
                    return f"it ends at byte {position} of {part.entry.size}"
                fault, hasher = _hash(data, position, block, part.entry.size, digests, hasher)
                if fault:
                    return fault
                end_of_data = position + len(data)
                while position < end_of_data:  # a disk that is nearly full takes a part, and refuses only the rest
                    position += os.pwrite(fd, data[position - end_of_data :], position)
                with self._lock:
                    self._progress.add(len(data))
        finally:
            os.close(fd)
        return ""


def _parts(entry: FileEntry) -> list[_Part]:
    block, digests = entry.block_size, entry.blocks
    many = max(1, _RANGE // block)
    return [_Part(entry, first, min(first + many, len(digests))) for first in range(0, len(digests), many)]


def _hash(
    data: memoryview, position: int, block: int, size: int, digests: Sequence[str], hasher: xxhash.xxh3_128
) -> tuple[str, xxhash.xxh3_128]:
    """Hash what came at ``position``, compare at each block's end. ``hasher``: of the block that ``position`` lies in."""
    done = 0
    while done < len(data):
        number = (position + done) // block
        end = min((number + 1) * block, size)
        count = min(end - position - done, len(data) - done)
        hasher.update(data[done : done + count])
        done += count
        if position + done == end:
            if hasher.hexdigest() != digests[number]:
                return f"block {number} (bytes {number * block} to {end - 1}) is not what was saved", hasher
            hasher = xxhash.xxh3_128()
    return "", hasher
