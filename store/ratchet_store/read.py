"""Read a checkpoint back: every byte of every file that is touched goes through XXH3-128 on its way.

What the header of a file says must be what the manifest says; a file of another checkpoint, a stale or a torn one is found
by size, header or digest.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import FileEntry, Manifest, TensorEntry
from ratchet_store.commit import check_files, read_manifest
from ratchet_store.files import DAMAGED, MISSING, not_read, open_regular
from ratchet_store.header import ITEMSIZE, LENGTH_BYTES, MAX_HEADER, parse_header, parse_json, stored_of, tensor_key
from ratchet_store.structure import file_order

JsonValue = Any
Into = Callable[[TensorEntry], memoryview | None]

CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class Loaded:
    """What ``load`` brought: pieces without a place of their own, and the JSON state of every rank whose file was read."""

    pieces: list[tuple[TensorEntry, bytearray]] = field(default_factory=list)
    states: dict[int, JsonValue] = field(default_factory=dict)
    bytes_read: int = 0


class VerifyOutcome(NamedTuple):
    """``error`` says what is damaged when not ``ok``; ``bytes_checked`` are bytes of rank files read and hashed."""

    ok: bool
    error: str | None
    bytes_checked: int


def load(
    directory: Path,
    manifest: Manifest,
    wanted: Callable[[TensorEntry], bool],
    into: Into | None = None,
    *,
    ranks: Collection[int] = (),
) -> Loaded:
    """Read the wanted pieces, and the states of ``ranks``; each file that holds any of it is read and verified whole, once.

    ``into(entry)`` names where a wanted piece goes: a writable contiguous memoryview of exactly ``entry.nbytes`` bytes (of live
    memory: elements ``entry.start`` and following), or None for a fresh bytearray, returned in ``Loaded.pieces``. A digest
    is known only at the file's end: when this raises, what ``into`` gave is partly overwritten and must not be used.
    Raises ``CheckpointError``: ``checkpoint-damaged`` or ``checkpoint-unreadable``.
    """
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        by_file[entry.file].append(entry)
    pieces: list[tuple[TensorEntry, bytearray]] = []
    states: dict[int, JsonValue] = {}
    total = 0

    def place(entry: TensorEntry) -> memoryview | None:
        if not wanted(entry):
            return None
        target = into(entry) if into is not None else None
        if target is None:
            data = bytearray(entry.nbytes)
            pieces.append((entry, data))
            return memoryview(data)
        if target.readonly or target.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name}: need a writable buffer of {entry.nbytes} bytes, got {target.nbytes}")
        return target.cast("B") if target.nbytes else target

    for file in sorted(manifest.files, key=lambda f: f.rank):
        entries = by_file[file.name]
        if file.rank in ranks or any(wanted(entry) for entry in entries):
            states[file.rank] = _read_file(directory, file, entries, place)
            total += file.size
    return Loaded(pieces, states, total)


def read_state(directory: Path, manifest: Manifest, rank: int) -> JsonValue:
    """The JSON state of one rank, its whole file verified. Raises ``CheckpointError``; ``ValueError`` for an unknown rank."""
    if not 0 <= rank < manifest.world_size:
        raise ValueError(f"rank {rank} is not in 0..{manifest.world_size - 1}")
    return load(directory, manifest, lambda _: False, ranks=(rank,)).states[rank]


def verify_files(directory: Path, manifest: Manifest) -> int:
    """Check every byte of every rank file; returns their number. Raises ``CheckpointError``."""
    return load(directory, manifest, lambda _: False, ranks=range(manifest.world_size)).bytes_read


def verify(directory: Path) -> VerifyOutcome:
    """Check a checkpoint off-line: manifest and every byte of every file. What proves no damage (not committed, newer format,
    unreadable) is raised as ``CheckpointError``."""
    try:
        return VerifyOutcome(True, None, verify_files(directory, read_manifest(directory)))
    except CheckpointError as error:
        if error.code != DAMAGED:
            raise
        return VerifyOutcome(False, error.detail, 0)


def _read_file(
    directory: Path, file: FileEntry, entries: list[TensorEntry], place: Callable[[TensorEntry], memoryview | None]
) -> JsonValue:
    path = directory / file.name
    try:
        fd = open_regular(path)
    except OSError as error:
        raise not_read(path, error) from error
    try:
        return _read_verified(fd, file, file_order(entries), place)
    except OSError as error:
        raise not_read(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.detail}", code=error.code) from None
    finally:
        os.close(fd)


def _read_verified(
    fd: int, file: FileEntry, entries: list[TensorEntry], place: Callable[[TensorEntry], memoryview | None]
) -> JsonValue:
    """Returns the rank's state after the last byte agreed."""
    size = os.fstat(fd).st_size
    if size != file.size:
        raise CheckpointError(f"{size} bytes, the manifest says {file.size}: truncated or replaced")
    reader = _HashingReader(fd)
    length = int.from_bytes(reader.take(LENGTH_BYTES), "little")
    if length > min(MAX_HEADER, size - LENGTH_BYTES):
        raise CheckpointError("the header's length is impossible")
    data_start = LENGTH_BYTES + length
    stored, text = parse_header(reader.take(length))
    if stored != {tensor_key(e): stored_of(e, data_start) for e in entries}:
        raise CheckpointError(
            "the header lists other tensors than the manifest: the file belongs to another checkpoint"
        )
    position = data_start
    scratch = memoryview(bytearray(CHUNK))
    for entry in entries:
        if entry.offset != position:
            raise CheckpointError(f"tensors do not follow one another at {entry.name!r}")
        target = place(entry)
        if target is None:
            reader.skip(entry.nbytes, scratch)
        else:
            reader.fill(target)
        position += entry.nbytes
    if position != size:
        raise CheckpointError(f"{size - position} bytes after the last tensor")
    if reader.hexdigest() != file.xxh3_128:
        raise CheckpointError("the bytes do not match their XXH3-128 digest: the file was altered or torn")
    return parse_json(text)


class _HashingReader:
    """Reads forward from a descriptor; everything that passes is hashed while it is in the processor's cache."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._hasher = xxhash.xxh3_128()

    def fill(self, target: memoryview) -> None:
        position = 0
        while position < len(target):
            count = os.readv(self._fd, [target[position : position + CHUNK]])
            if count == 0:
                raise CheckpointError("the file ends early: truncated")
            self._hasher.update(target[position : position + count])
            position += count

    def take(self, count: int) -> bytes:
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def skip(self, count: int, scratch: memoryview) -> None:
        while count:
            part = scratch[: min(count, len(scratch))]
            self.fill(part)
            count -= len(part)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


class StoredTensor(NamedTuple):
    """A tensor put together from its pieces: row-major bytes, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class CheckpointReader:
    """A committed checkpoint, opened for looking into: ``.manifest``, ``.state(rank)``, ``.tensors(...)``; all verified.

    Raises ``CheckpointError`` when the manifest or, later, a file that is needed is missing, damaged or unreadable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        check_files(directory, self.manifest)  # before any size that the manifest claims is allocated

    def state(self, rank: int) -> JsonValue:
        """The JSON state of one rank."""
        return read_state(self.directory, self.manifest, rank)

    def tensors(self, wanted: str | Collection[str] = "") -> dict[str, StoredTensor]:
        """Whole tensors by name: those whose name starts with the string ``wanted``, or those of the given names.

        Raises ``CheckpointError`` (``checkpoint-missing``) for a given name that is not stored.
        """
        known = {entry.name for entry in self.manifest.tensors}
        names = {name for name in known if name.startswith(wanted)} if isinstance(wanted, str) else set(wanted)
        if unknown := names - known:
            raise CheckpointError(f"{self.directory} holds no tensor {min(unknown)!r}", code=MISSING)
        whole: dict[str, StoredTensor] = {}
        for entry in self.manifest.tensors:
            if entry.name in names and entry.name not in whole:
                shape = tuple(entry.shape)
                whole[entry.name] = StoredTensor(
                    entry.dtype, shape, bytearray(math.prod(shape) * ITEMSIZE[entry.dtype])
                )

        def into(entry: TensorEntry) -> memoryview:
            begin = entry.start * ITEMSIZE[entry.dtype]
            return memoryview(whole[entry.name].data)[begin : begin + entry.nbytes]

        load(self.directory, self.manifest, lambda entry: entry.name in names, into)
        return whole
