"""Fetch a checkpoint from an object store to the local directory, which is a cache of the store from then on.

A few concurrent connections fill the files in a directory of another name among the checkpoints. The received bytes of every
block are compared with its digest. The manifest comes last, then one rename, so what has a checkpoint's name was whole when it
got that name.
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

from ratchet_contract.checkpoint.manifest import FileEntry, Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import CHANGED_NAME, FINISHED_NAME, MANIFEST_NAME, PINNED_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import (
    DAMAGED,
    MISSING,
    atomic_write,
    ensure_dir,
    fsync_dir,
    write_all,
    write_error,
)
from ratchet_store.format.manifest_file import MAX_MARKER_BYTES, checkpoint_dirs, read_manifest
from ratchet_store.object_store.client import REMOTE, ObjectStore
from ratchet_store.object_store.download_directory import open_download_directory, remove_lock
from ratchet_store.object_store.remote_checkpoints import Id, RemoteCheckpoints
from ratchet_store.read.checkpoint_reader import verify_files
from ratchet_store.read.find_base import move_to_quarantine, read_valid_manifest
from ratchet_store.retention.delete import delete

CONNECTIONS: Final = 4
_REQUEST_BYTES: Final = 8 << 20  # bytes of one request, at least a block


class FetchResult(NamedTuple):
    """Result of ``fetch_newest``. ``fetched``: manifest of the checkpoint that was fetched, and ``uri``: where it came from;
    both None if nothing was fetched, since the store has no intact newer one. ``notes``: sentences on damaged checkpoints, which
    were quarantined in the store and skipped."""

    fetched: Manifest | None
    uri: str | None
    notes: list[str]


@dataclass
class Progress:
    """Progress of a fetch, shared with another thread. ``nbytes``: bytes received or read so far; ``stop``: set by the other
    thread to end the fetch."""

    nbytes: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes


def newest_local(
    checkpoints: Path,
    lineage: Sequence[Segment],
    progress: Progress | None = None,
    *,
    expected_job_id: str | None = None,
    root: Base | None = None,
) -> Id | None:
    """Return step and attempt of the newest intact checkpoint of the lineage on this disk; None if there is none. Every byte of
    it is read and verified here. Missing and damaged ones are skipped, not moved; ``expected_job_id`` and ``root``, and which
    ones count as damaged: as in ``find_base``. ``progress`` counts the bytes that are read; its ``stop`` has no effect here.

    Raises ``CheckpointError`` for a checkpoint that cannot be judged (unreadable, another format version).
    """
    progress = progress or Progress()
    for step, attempt, directory in checkpoint_dirs(checkpoints):
        if not lineage_contains(lineage, step, attempt):
            continue
        try:
            manifest = read_valid_manifest(directory, lineage, expected_job_id, root)
            verify_files(directory, manifest, progress=progress.add)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            continue
        return step, attempt
    return None


def fetch_newest(
    remote: RemoteCheckpoints,
    checkpoints: Path,
    quarantine: Path,
    lineage: Sequence[Segment],
    local: Id | None,
    progress: Progress | None = None,
) -> FetchResult:
    """Fetch the newest checkpoint of the lineage in the store that is newer than ``local`` (None: any), and return the result.
    Its ``fetched`` is None if there is no such checkpoint. One with wrong bytes, an object of the wrong size or a damaged
    manifest is quarantined in the store; one that lacks an object is only skipped. In both cases the next older one is tried.

    Raises ``CheckpointError``, such as ``checkpoint-remote``, ``checkpoint-remote-denied`` or ``checkpoint-not-written``.
    """
    notes: list[str] = []
    for (step, attempt), names in remote.list_checkpoints().items():
        if not lineage_contains(lineage, step, attempt) or (local is not None and (step, attempt) <= local):
            continue
        if MANIFEST_NAME not in names:
            continue
        folder = checkpoint_dir_name(step, attempt)
        try:
            manifest = fetch(remote, folder, checkpoints, quarantine, sizes=names, progress=progress)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            if error.code == DAMAGED:
                remote.quarantine(folder)
                notes.append(f"{folder} in {remote.objects.url} is damaged and was set aside: {error.detail}")
            continue
        return FetchResult(manifest, f"{remote.objects.url}/{folder}", notes)
    return FetchResult(None, None, notes)


def fetch(
    remote: RemoteCheckpoints,
    folder: str,
    checkpoints: Path,
    quarantine: Path,
    *,
    sizes: dict[str, int] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Fetch the checkpoint named ``folder`` into the directory ``checkpoints``, verified and durable; returns its manifest. If
    ``checkpoints`` has a directory of that name that is no intact copy, it is moved to ``quarantine`` if it has a manifest, and
    deleted if not. An intact copy stays as it is, and the downloaded one is dropped.

    ``sizes``: bytes of the checkpoint's objects in the store, by name; None: they are listed. The marker files named there are
    restored. No file is fetched if one has another size than the manifest says.

    Raises ``CheckpointError``: ``checkpoint-missing`` (no manifest, or an object is missing), ``checkpoint-damaged``,
    ``checkpoint-format``, ``checkpoint-remote`` (also after ``progress.stop`` was set), ``checkpoint-remote-denied``,
    ``checkpoint-not-written``, ``checkpoint-unreadable`` (what has that name here cannot be moved or deleted).
    """
    progress = progress or Progress()
    raw = remote.raw_manifest(folder)
    manifest = remote.parse(folder, raw)
    if sizes is None:
        sizes = {path.rpartition("/")[2]: size for path, size in remote.objects.list(f"{folder}/").items()}
    for entry in manifest.files:  # stores refuse a request beyond the end as they do other wrong requests
        size = sizes.get(entry.name, entry.size)
        if size != entry.size:
            name = f"{remote.objects.url}/{folder}/{entry.name}"
            raise CheckpointError(f"{name} has {size} bytes, the manifest says {entry.size}", code=DAMAGED)
    target = checkpoints / folder
    try:
        ensure_dir(checkpoints)
        with open_download_directory(checkpoints, folder) as place:
            _Download(remote.objects, folder, place, manifest.files, progress).run()
            for mark in (FINISHED_NAME, PINNED_NAME):
                if mark in sizes:
                    (place / mark).touch()
            if CHANGED_NAME in sizes:
                (place / CHANGED_NAME).write_bytes(remote.objects.get(f"{folder}/{CHANGED_NAME}", MAX_MARKER_BYTES))
            with atomic_write(place / MANIFEST_NAME) as fd:
                write_all(fd, memoryview(raw))
            remove_lock(place)
            fsync_dir(place)
            if not _is_present(target, manifest):
                _clear_target(target, quarantine)
                place.rename(target)
            fsync_dir(checkpoints)
    except OSError as error:
        raise write_error(target, error) from error
    return read_manifest(target)


def _is_present(target: Path, manifest: Manifest) -> bool:
    """True if ``target`` is an intact copy of the checkpoint already, for example because another process has fetched it
    meanwhile. Reads every byte of ``target``. False also if ``target`` is missing or cannot be read."""
    try:
        there = read_manifest(target)
        verify_files(target, there)
    except CheckpointError:
        return False
    return there.digest == manifest.digest


def _clear_target(target: Path, quarantine: Path) -> None:
    """Remove what has the checkpoint's name here: a directory with a manifest is moved to ``quarantine``, one without is
    deleted. Raises ``CheckpointError``."""
    if not os.path.lexists(target):
        return
    if not (target / MANIFEST_NAME).exists():
        delete(target)
        return
    move_to_quarantine(target, quarantine)


class _Part(NamedTuple):
    """Blocks ``first <= n < last`` of a file."""

    entry: FileEntry
    first: int
    last: int


class _Download:
    """Downloads the rank files of one checkpoint into ``directory``, in daemon threads: a thread that hangs in a request ends
    with the process."""

    def __init__(
        self, objects: ObjectStore, folder: str, directory: Path, files: Sequence[FileEntry], progress: Progress
    ) -> None:
        self._objects, self._folder, self._directory, self._progress = objects, folder, directory, progress
        self._parts = deque(part for entry in files for part in _parts(entry))
        self._files = files
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Download and sync all files; blocks until that is done. Raises the first error of a thread, and ``CheckpointError``
        if ``Progress.stop`` has been set; other threads may then still be at work."""
        for entry in self._files:
            with (self._directory / entry.name).open("wb") as file:
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
            raise CheckpointError(f"the fetch of {self._objects.url}/{self._folder} was stopped", code=REMOTE)
        for entry in self._files:
            fd = os.open(self._directory / entry.name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _work(self) -> None:
        """Fetch parts until none is left, one has failed, or the fetch is stopped. An error is recorded for ``run``."""
        while self._failure is None and not self._progress.stop.is_set():
            with suppress(IndexError):
                part = self._parts.popleft()
                try:
                    self._fetch_part(part)
                except BaseException as error:
                    self._failure = self._failure or error
                continue
            return

    def _fetch_part(self, part: _Part) -> None:
        """Fetch one part, a second time if its bytes are wrong. Raises ``CheckpointError`` (``checkpoint-damaged``) if they
        are wrong again."""
        fault = ""
        for _ in range(2):  # once more: the network may have been at fault
            fault = self._try_part(part)
            if not fault:
                return
        raise CheckpointError(f"{self._objects.url}/{self._folder}/{part.entry.name}: {fault}", code=DAMAGED)

    def _try_part(self, part: _Part) -> str:
        """Fetch the blocks of a part once, write them to the file and compare their digests. Returns a text on what is wrong with
        the bytes, empty if nothing is; wrong bytes may then be in the file. Raises ``CheckpointError`` if the store fails, and
        ``OSError``."""
        block, digests = part.entry.block_size, part.entry.blocks
        name, path = f"{self._folder}/{part.entry.name}", self._directory / part.entry.name
        begin, end = part.first * block, min(part.last * block, part.entry.size)
        hasher, position = xxhash.xxh3_128(), begin
        fd = os.open(path, os.O_WRONLY)
        try:
            while position < end:
                data = self._objects.get_range(name, position, min(position + _REQUEST_BYTES, end))
                if not data:
                    return f"it ends at byte {position} of {part.entry.size}"
                fault, hasher = _hash(data, position, block, part.entry.size, digests, hasher)
                if fault:
                    return fault
                end_of_data = position + len(data)
                while position < end_of_data:  # a nearly full disk accepts a part, and refuses only the rest
                    position += os.pwrite(fd, data[position - end_of_data :], position)
                with self._lock:
                    self._progress.add(len(data))
        finally:
            os.close(fd)
        return ""


def _parts(entry: FileEntry) -> list[_Part]:
    """Split a file into parts of whole blocks: as many as fit into ``_REQUEST_BYTES``, but at least one."""
    block, digests = entry.block_size, entry.blocks
    many = max(1, _REQUEST_BYTES // block)
    return [_Part(entry, first, min(first + many, len(digests))) for first in range(0, len(digests), many)]


def _hash(
    data: memoryview, position: int, block: int, size: int, digests: Sequence[str], hasher: xxhash.xxh3_128
) -> tuple[str, xxhash.xxh3_128]:
    """Hash data received for offset ``position`` of the file, and compare the digest at each block's end. ``hasher``: state of
    the block that contains ``position``; ``block``: bytes per block; ``size``: bytes of the file.

    Returns a text on the first block that is wrong (empty: none is), and the hasher to use for the data that follows.
    """
    done = 0
    while done < len(data):
        number = (position + done) // block
        end = min((number + 1) * block, size)
        count = min(end - position - done, len(data) - done)
        hasher.update(data[done : done + count])
        done += count
        if position + done == end:
            if hasher.hexdigest() != digests[number]:
                return f"block {number} (bytes {number * block} to {end - 1}) differs from the saved data", hasher
            hasher = xxhash.xxh3_128()
    return "", hasher
