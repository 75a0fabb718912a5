"""Read requested parts of a checkpoint. Every block that is read is verified."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ratchet_contract.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from ratchet_contract.errors import CheckpointError
from ratchet_hooks.state.safetensors_header import ITEMSIZE, LENGTH_BYTES, MAX_HEADER
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING
from ratchet_store.format.manifest_file import check_files, read_manifest
from ratchet_store.format.manifest_structure import file_order
from ratchet_store.format.safetensors_header import header_entry, parse_header, parse_json, tensor_key
from ratchet_store.read.block_reader import (
    Block,
    Progress,
    Region,
    every,
    open_rank_file,
    overlapping_blocks,
    read_blocks,
)

JsonValue = Any
Into = Callable[[TensorEntry], memoryview | None]


@dataclass(frozen=True)
class Loaded:
    """Result of ``load``. ``pieces``: selected pieces that had no target memory, with their bytes; ``states``: the JSON state of
    each rank whose file was read."""

    pieces: list[tuple[TensorEntry, bytearray]] = field(default_factory=list)
    states: dict[int, JsonValue] = field(default_factory=dict)
    bytes_read: int = 0


class VerifyOutcome(NamedTuple):
    """Result of ``verify``. ``error``: the first damage, None if ``ok``; ``bytes_checked``: bytes that were verified, 0 if not
    ``ok``."""

    ok: bool
    error: str | None
    bytes_checked: int


def load(
    directory: Path,
    manifest: Manifest,
    is_selected: Callable[[TensorEntry], bool],
    get_buffer: Into | None = None,
    *,
    ranks: Collection[int] = (),
    complete_ranks: Collection[int] = (),
    progress: Progress | None = None,
    threads: int = 1,
) -> Loaded:
    """Read and verify the pieces for which ``is_selected`` is True, and the JSON states of ``ranks``.

    ``get_buffer(entry)`` returns the memory for a piece; if it returns None, the piece is in ``Loaded.pieces``. The files of
    ``complete_ranks`` are read completely. Raises ``CheckpointError``, or ``ValueError`` for unsuitable memory; the targets may
    then be partly overwritten.
    """
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        by_file[entry.file].append(entry)
    pieces: list[tuple[TensorEntry, bytearray]] = []
    states: dict[int, JsonValue] = {}
    total = 0

    def target_of(entry: TensorEntry) -> memoryview:
        """Return the memory for a selected piece; a new bytearray, added to ``pieces``, if ``get_buffer`` has none."""
        target = get_buffer(entry) if get_buffer is not None else None
        if target is None:
            data = bytearray(entry.nbytes)
            pieces.append((entry, data))
            return memoryview(data)
        if target.readonly or target.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name}: need a writable buffer of {entry.nbytes} bytes, got {target.nbytes}")
        return target.cast("B") if target.nbytes else target

    # each rank begins with another file, so that ranks that read concurrently do not wait for the same bytes
    first = min(complete_ranks, default=0)
    for file in sorted(manifest.files, key=lambda f: ((f.rank - first) % manifest.world_size, f.rank)):
        entries = file_order(by_file[file.name])
        picked = [entry for entry in entries if is_selected(entry)]
        if picked or file.rank in ranks or file.rank in complete_ranks:
            states[file.rank], count = _read_file(
                directory, file, entries, picked, target_of, file.rank in complete_ranks, progress, threads
            )
            total += count
    return Loaded(pieces, states, total)


def read_state(directory: Path, manifest: Manifest, rank: int) -> JsonValue:
    """Return the JSON state of one rank; its bytes are verified. Raises ``CheckpointError``, and ``ValueError`` for an unknown
    rank."""
    if not 0 <= rank < manifest.world_size:
        raise ValueError(f"rank {rank} is not in 0..{manifest.world_size - 1}")
    return load(directory, manifest, lambda _: False, ranks=(rank,)).states[rank]


def verify_files(
    directory: Path,
    manifest: Manifest,
    *,
    ranks: Collection[int] | None = None,
    progress: Progress | None = None,
    threads: int = 1,
) -> int:
    """Read and verify every byte of the rank files of ``ranks`` (None: all); return the number of bytes. Raises
    ``CheckpointError`` if a file is damaged or unreadable."""
    ranks = range(manifest.world_size) if ranks is None else ranks
    return load(
        directory, manifest, lambda _: False, complete_ranks=ranks, progress=progress, threads=threads
    ).bytes_read


def verify(directory: Path) -> VerifyOutcome:
    """Verify the manifest and the rank files of one checkpoint. Damage is returned; other errors are raised as
    ``CheckpointError``."""
    try:
        return VerifyOutcome(True, None, verify_files(directory, read_manifest(directory)))
    except CheckpointError as error:
        if error.code != DAMAGED:
            raise
        return VerifyOutcome(False, error.detail, 0)


def damaged_blocks(
    directory: Path, file: FileEntry, entries: Collection[TensorEntry], progress: Progress | None = None
) -> Iterator[Block]:
    """Read one whole file and yield its damaged blocks. ``entries``: the manifest's entries of this file. Raises
    ``CheckpointError`` for a fault of the whole file, such as its size. A block that cannot be read raises it, too, after the
    damaged blocks before it were yielded."""
    order, intact = file_order(list(entries)), True
    with open_rank_file(directory, file) as fd:
        header, regions = _regions(file, order, {})
        for number in every(file):
            for block in read_blocks(fd, file, regions, [number], progress):
                intact = False
                yield block
        if intact:
            _check_header(header, file, order)


def _read_file(
    directory: Path,
    file: FileEntry,
    entries: list[TensorEntry],
    selected: list[TensorEntry],
    target_of: Callable[[TensorEntry], memoryview],
    complete: bool,
    progress: Progress | None,
    threads: int,
) -> tuple[JsonValue, int]:
    """Read and verify the ``selected`` pieces of one rank file. Returns the rank's JSON state and the number of bytes read.
    ``entries``: all pieces in the file, in file order. ``complete``: read and verify the whole file."""
    with open_rank_file(directory, file) as fd:
        targets = {(entry.offset, entry.nbytes): target_of(entry) for entry in selected}
        header, regions = _regions(file, entries, targets)
        ranges = [(0, len(header)), *((entry.offset, entry.offset + entry.nbytes) for entry in selected)]
        blocks = every(file) if complete else overlapping_blocks(file, ranges)
        for block in read_blocks(fd, file, regions, blocks, progress, threads=threads, stop_at_first=True):
            raise CheckpointError(str(block), code=DAMAGED)
        size = file.block_size
        return _check_header(header, file, entries), sum(min(size, file.size - n * size) for n in blocks)


def _regions(
    file: FileEntry, entries: list[TensorEntry], targets: dict[tuple[int, int], memoryview]
) -> tuple[memoryview, list[Region]]:
    """Return a buffer for the header, and regions that cover the whole file. ``targets``: memory by a tensor's offset and
    size."""
    data_start = entries[0].offset if entries else min(file.size, LENGTH_BYTES + MAX_HEADER)
    if not LENGTH_BYTES <= data_start <= LENGTH_BYTES + MAX_HEADER:
        raise CheckpointError("the header's length is impossible")
    header = memoryview(bytearray(data_start))
    regions = [Region(0, data_start, header)]
    position = data_start
    for entry in entries:
        if entry.offset != position:
            raise CheckpointError(f"tensors do not follow one another at {entry.name!r}")
        position += entry.nbytes
        target = targets.get((entry.offset, entry.nbytes))
        last = regions[-1]
        if target is None and last.target is None:
            regions[-1] = Region(last.begin, position, None)
        elif entry.nbytes:
            regions.append(Region(entry.offset, position, target))
    if position != file.size and entries:
        raise CheckpointError(f"{file.size - position} bytes after the last tensor")
    if position != file.size:
        regions.append(Region(position, file.size, None))
    return header, regions


def _check_header(header: memoryview, file: FileEntry, entries: list[TensorEntry]) -> JsonValue:
    """Return the rank's JSON state from the header. Raises ``CheckpointError`` if the header is invalid or does not match
    ``entries``."""
    length = int.from_bytes(header[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER, file.size - LENGTH_BYTES):
        raise CheckpointError("the header's length is impossible")
    data_start = LENGTH_BYTES + length
    stored, text = parse_header(bytes(header[LENGTH_BYTES:data_start]))
    if stored != {tensor_key(e): header_entry(e, data_start) for e in entries}:
        raise CheckpointError(
            "the header lists other tensors than the manifest: the file belongs to another checkpoint"
        )
    if data_start != len(header):
        raise CheckpointError(f"{file.size - data_start} bytes after the last tensor")
    return parse_json(text)


class StoredTensor(NamedTuple):
    """One whole tensor, put together from its pieces. ``data``: the elements in row-major order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class CheckpointReader:
    """A committed checkpoint, opened for inspection; what its methods return has been verified. Raises ``CheckpointError`` if
    something that is needed is damaged or unreadable."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        check_files(directory, self.manifest)  # before any size that the manifest claims is allocated

    def state(self, rank: int) -> JsonValue:
        """Return the JSON state of one rank. Raises ``ValueError`` for an unknown rank."""
        return read_state(self.directory, self.manifest, rank)

    def tensors(self, wanted: str | Collection[str] = "") -> dict[str, StoredTensor]:
        """Return whole tensors by name. ``wanted``: a prefix, or a collection of names. Raises ``CheckpointError`` if one of
        these is not stored."""
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

        def get_buffer(entry: TensorEntry) -> memoryview:
            begin = entry.start * ITEMSIZE[entry.dtype]
            return memoryview(whole[entry.name].data)[begin : begin + entry.nbytes]

        load(self.directory, self.manifest, lambda entry: entry.name in names, get_buffer)
        return whole
