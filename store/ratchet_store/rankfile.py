"""Write one rank's file: its slices of the shared tensors, its private tensors, its JSON state."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.manifest import RANK_PREFIX, FileEntry, TensorEntry
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, rank_file_name
from ratchet_store.files import EXISTS, ensure_dir, fsync_dir, not_written, replacing, start_writeback
from ratchet_store.header import ITEMSIZE, MAX_DIMENSIONS, Stored, build_header, is_whole

JsonValue = Any
BytesLike = Any
"""Anything with a contiguous buffer: bytes, bytearray, memoryview, a numpy array of uint8."""

BLOCK: Final = 16 << 20  # bytes of the file under one digest: what a reader reads at least
CHUNK: Final = 1 << 20  # hashed, then written while still in the processor's cache; divides a block
_WRITEBACK: Final = 8 << 20  # bytes after which the disk is told to begin: write + fsync then take about half the time
_BATCH: Final = 256  # buffers per writev; Linux allows 1024
_MAX_DEPTH: Final = 64


@dataclass(frozen=True)
class Piece:
    """A tensor, or consecutive elements of one.

    ``shape`` is the whole tensor's, ``start`` the first element (row-major) in ``data``, ``dtype`` safetensors' name ("F32",
    "I64", "BF16", "BOOL", ...). ``data`` is not copied: it must not change until the file is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    data: BytesLike


def write_rank_file(
    directory: Path, rank: int, world_size: int, pieces: Sequence[Piece], state: JsonValue
) -> tuple[FileEntry, list[TensorEntry]]:
    """Write ``rank-<rank>-of-<world_size>.safetensors`` durably; returns the manifest's entries for it, in file order.

    ``.tmp``, hashed while written, fsync, rename, fsync of the directory (created when missing). Nothing of it counts before
    ``commit``. Raises ``StateError`` for what cannot be stored (names the tensor or key) and ``CheckpointError`` when the system
    refuses (``checkpoint-not-written``; the ``.tmp`` is removed) or the directory holds a committed checkpoint.
    """
    name = rank_file_name(rank, world_size)
    text = encode_state(state)
    buffers = [_buffer(piece) for piece in pieces]
    # Wide elements first: without gaps between tensors, every one then starts on a multiple of its element size. Among those of
    # a width what all ranks share lies together: it is what other ranks read of this file.
    order = sorted(
        range(len(pieces)), key=lambda i: (-ITEMSIZE[pieces[i].dtype], pieces[i].name.startswith(RANK_PREFIX))
    )
    header, entries = _layout(name, [(pieces[i], len(buffers[i])) for i in order], text)
    path = directory / name
    try:
        ensure_dir(directory)
        _refuse_committed(directory)
        size, digests = _write(path, [memoryview(header), *(buffers[i] for i in order)])
    except OSError as error:
        raise not_written(path, error, len(header) + sum(map(len, buffers))) from error
    return FileEntry(name=name, rank=rank, size=size, block_size=BLOCK, blocks=digests), entries


def encode_state(state: JsonValue) -> str:
    """JSON text from which exactly ``state`` comes back. Raises ``StateError`` with the key for anything that would change:
    keys that are not strings, tuples, NaN and infinities, other types."""
    _check_json(state, "", 0)
    return json.dumps(state, separators=(",", ":"), allow_nan=False)


def _check_json(value: JsonValue, pointer: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise StateError(f"state at {pointer or '/'} is nested deeper than {_MAX_DEPTH} levels")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise StateError(
                    f"state at {pointer or '/'} has the key {key!r}, which is not a string: JSON would change it"
                )
            _check_json(item, f"{pointer}/{key}", depth + 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{pointer}/{index}", depth + 1)
    elif type(value) is float:
        if not math.isfinite(value):
            raise StateError(
                f"state at {pointer or '/'} is {value!r}, which JSON has no word for: encode it as a string"
            )
    elif value is not None and type(value) not in (str, int, bool):
        raise StateError(
            f"state at {pointer or '/'} is a {type(value).__name__}: JSON would not give it back unchanged"
        )


def _buffer(piece: Piece) -> memoryview:
    """The piece's bytes, flat; checked against shape and dtype."""
    where = f"tensor {piece.name!r}"
    if piece.dtype not in ITEMSIZE:
        raise StateError(
            f"{where} has dtype {piece.dtype!r}, which safetensors cannot hold; known: {', '.join(ITEMSIZE)}"
        )
    try:
        piece.name.encode()
        view = memoryview(piece.data)
        flat = memoryview(b"") if view.nbytes == 0 else view.cast("B")
    except (TypeError, UnicodeEncodeError) as error:
        raise StateError(f"{where} has no usable name or contiguous bytes ({error}): hand over a uint8 view") from None
    numel = math.prod(piece.shape)
    if not piece.name or len(piece.shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in piece.shape):
        raise StateError(f"{where} has no name or no valid shape: {piece.shape}")
    count, rest = divmod(len(flat), ITEMSIZE[piece.dtype])
    if rest or piece.start < 0 or piece.start + count > numel:
        raise StateError(
            f"{where}: {len(flat)} bytes from element {piece.start} do not fit {piece.dtype} of shape {list(piece.shape)}"
        )
    if count == 0 and numel:
        raise StateError(f"{where}: a piece without elements of a tensor that has some")
    return flat


def _layout(file: str, pieces: list[tuple[Piece, int]], text: str) -> tuple[bytes, list[TensorEntry]]:
    """The header and the manifest's entries; ``pieces`` with their sizes in bytes, in file order."""
    stored: dict[str, Stored] = {}
    position = 0
    for piece, nbytes in pieces:
        whole = is_whole(piece.shape, piece.dtype, piece.start, nbytes)
        key = piece.name if whole else f"{piece.name}#{piece.start}"
        if key in stored or key == "__metadata__":
            raise StateError(f"tensor name {key!r} occurs twice in a rank file, or is reserved: rename it")
        shape = piece.shape if whole else (nbytes // ITEMSIZE[piece.dtype],)
        stored[key] = Stored(piece.dtype, shape, position, position + nbytes)
        position += nbytes
    header = build_header(stored, text)
    entries = [
        TensorEntry(
            name=piece.name, file=file, offset=len(header) + place.begin, nbytes=nbytes, shape=list(piece.shape),
            dtype=piece.dtype, start=piece.start,
        )
        for (piece, nbytes), place in zip(pieces, stored.values(), strict=True)
    ]  # fmt: skip
    return header, entries


def _refuse_committed(directory: Path) -> None:
    for name in (MANIFEST_NAME, DELETED_MANIFEST_NAME):
        if (directory / name).exists():
            raise CheckpointError(
                f"{directory} already holds a checkpoint ({name}): nothing in it is changed", code=EXISTS
            )


def _write(path: Path, buffers: list[memoryview]) -> tuple[int, list[str]]:
    """Size in bytes and the digests of the blocks of what was written durably under ``path``."""
    with replacing(path) as fd:
        size, digests = _stream(fd, buffers)
    fsync_dir(path.parent)
    return size, digests


def _stream(fd: int, buffers: list[memoryview]) -> tuple[int, list[str]]:
    """Write in chunks of the file, each hashed just before; system calls and hashing of a chunk leave the GIL to others."""
    hasher, digests = xxhash.xxh3_128(), []
    size, started = 0, 0
    batch: list[memoryview] = []
    pending, room = 0, CHUNK  # bytes in the batch, and still to come in this chunk of the file
    for buffer in buffers:
        begin, end = 0, len(buffer)
        while begin < end:
            part = buffer[begin : begin + room]
            hasher.update(part)
            batch.append(part)
            count = len(part)
            begin, pending, room = begin + count, pending + count, room - count
            if room and len(batch) < _BATCH:
                continue
            _writev_all(fd, batch)
            size, batch, pending = size + pending, [], 0
            if room:
                continue
            room = CHUNK
            if size % BLOCK == 0:
                digests.append(hasher.hexdigest())
                hasher.reset()
            if size - started >= _WRITEBACK:
                start_writeback(fd, started, size - started)
                started = size
    _writev_all(fd, batch)
    size += pending
    if size % BLOCK:
        digests.append(hasher.hexdigest())
    return size, digests


def _writev_all(fd: int, batch: list[memoryview]) -> None:
    while batch:
        written = os.writev(fd, batch)
        while batch and written >= len(batch[0]):
            written -= len(batch.pop(0))
        if batch:
            batch[0] = batch[0][written:]
