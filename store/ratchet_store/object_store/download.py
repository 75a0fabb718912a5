"""Fetch a job's checkpoints from an object store into the local directory of checkpoints, and verify every block."""

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

from ratchet_contract.atomic_write import ensure_dir, fsync_path, write_atomic
from ratchet_contract.checkpoint.manifest import FileEntry, Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import CHANGED_NAME, FINISHED_NAME, MANIFEST_NAME, PINNED_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import (
    DAMAGED,
    MISSING,
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
    """Result of ``fetch_newest``. ``fetched`` and ``uri``: the fetched manifest and its URI, None if nothing was fetched.
    ``notes``: sentences on damaged checkpoints."""

    fetched: Manifest | None
    uri: str | None
    notes: list[str]


@dataclass
class Progress:
    """Progress of a fetch, shared between threads. ``nbytes``: bytes received or read so far; ``stop``: set to end the fetch."""

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
    """Return step and attempt of the newest intact checkpoint of the lineage in ``checkpoints``, or None; every byte of it is
    verified. Uncommitted and damaged ones are skipped. Raises ``CheckpointError`` for other errors."""
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
    """Fetch the newest intact checkpoint of the lineage, if the store has one that is newer than ``local`` (None: any). A damaged
    checkpoint met in the search is quarantined in the store; an incomplete one is skipped. Raises ``CheckpointError`` for other
    errors."""
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
    """Fetch the checkpoint ``folder`` into ``checkpoints``, verified and durable, and return its manifest. An existing
    directory of that name is kept if it is an intact copy. Otherwise it is moved to ``quarantine`` or deleted. ``sizes``: size
    in bytes of each of the checkpoint's objects in the store, by name; None: they are listed. Raises ``CheckpointError``."""
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
            write_atomic(place / MANIFEST_NAME, raw, durable=True)
            remove_lock(place)
            fsync_path(place)
            if not _is_present(target, manifest):
                _clear_target(target, quarantine)
                place.rename(target)
            fsync_path(checkpoints)
    except OSError as error:
        raise write_error(target, error) from error
    return read_manifest(target)


def _is_present(target: Path, manifest: Manifest) -> bool:
    """True if ``target`` is an intact copy of the checkpoint already; its files are read and verified."""
    try:
        there = read_manifest(target)
        verify_files(target, there)
    except CheckpointError:
        return False
    return there.digest == manifest.digest


def _clear_target(target: Path, quarantine: Path) -> None:
    """Move ``target`` to ``quarantine`` if it has a manifest, else delete it. Raises ``CheckpointError``."""
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
    """Downloads the rank files of one checkpoint into ``directory``, in several daemon threads."""

    def __init__(
        self, objects: ObjectStore, folder: str, directory: Path, files: Sequence[FileEntry], progress: Progress
    ) -> None:
        self._objects, self._folder, self._directory, self._progress = objects, folder, directory, progress
        self._parts = deque(part for entry in files for part in _parts(entry))
        self._files = files
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Download and sync all files; blocks until that is done, has failed or was stopped. Raises the first error of a
        thread, or ``CheckpointError`` if the fetch was stopped."""
        for entry in self._files:
            with (self._directory / entry.name).open("wb") as file:
                os.truncate(file.fileno(), entry.size)
        # daemon threads: one that hangs in a request ends with the process
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
            fsync_path(self._directory / entry.name)

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
        """Fetch the blocks of a part into the file and verify them. Returns text on what is wrong with the bytes, empty if
        nothing is."""
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
    """Split a file into parts of whole blocks. A part has as many blocks as fit into ``_REQUEST_BYTES``, but at least one
    block."""
    block, digests = entry.block_size, entry.blocks
    many = max(1, _REQUEST_BYTES // block)
    return [_Part(entry, first, min(first + many, len(digests))) for first in range(0, len(digests), many)]


def _hash(
    data: memoryview, position: int, block: int, size: int, digests: Sequence[str], hasher: xxhash.xxh3_128
) -> tuple[str, xxhash.xxh3_128]:
    """Hash received data, and compare the digest of each block that ends in it. Returns text on the first wrong block (empty:
    none is), and the hasher for the data that follows."""
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
