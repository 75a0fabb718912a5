"""Write one rank's file: its slices of the shared tensors, its private tensors, its JSON state."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.manifest import RANK_PREFIX, FileEntry, TensorEntry, dump_entries
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, rank_file_name
from ratchet_store.files import EXISTS, ensure_dir, fsync_dir, not_written, replacing, start_writeback
from ratchet_store.header import ITEMSIZE, MAX_DIMENSIONS, Stored, build_header, is_whole, members_of

JsonValue = Any
BytesLike = Any
"""Anything with a contiguous buffer: bytes, bytearray, memoryview, a numpy array of uint8."""

BLOCK: Final = 16 << 20  # bytes of the file under one digest: what a reader reads at least
CHUNK: Final = 1 << 20  # hashed, then written while still in the processor's cache; divides a block
_WRITEBACK: Final = 8 << 20  # bytes after which the disk is told to begin: write + fsync then take about half the time
_BATCH: Final = 256  # buffers per writev; Linux allows 1024
_SMALL: Final = 4096  # bytes: below, a copy costs less than what Python does for a buffer of its own
_EMPTY: Final = memoryview(b"")
_MAX_DEPTH: Final = 64
_KEYS: Final = frozenset({str})
_ATOMS: Final = frozenset({str, int, bool, type(None)})


class Piece(NamedTuple):
    """A tensor, or consecutive elements of one.

    ``shape`` is the whole tensor's, ``start`` the first element (row-major) in ``data``, ``dtype`` safetensors' name ("F32",
    "I64", "BF16", "BOOL", ...). ``data`` is not copied: it must not change until the file is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    data: BytesLike


class Written(NamedTuple):
    """The manifest's entries of a file that was written, those of the tensors in file order. ``listing``: the same as JSON text.
    Where they are those of the writer's last file, they are the same objects."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]
    listing: str


class RankWriter:
    """Writes the files of one rank, one after the other. From save to save the tensors have other bytes, seldom
    other names or shapes: what follows from these is checked and made when they are new, and kept."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self._name = rank, rank_file_name(rank, world_size)
        self._layout: _Layout | None = None

    def write(self, directory: Path, pieces: Sequence[Piece], state: JsonValue) -> Written:
        """Write ``rank-<rank>-of-<world_size>.safetensors`` durably.

        ``.tmp``, hashed while written, fsync, rename, fsync of the directory (created when missing). Nothing of it counts before
        ``commit``. Raises ``StateError`` for what cannot be stored (names the tensor or key) and ``CheckpointError`` when the
        system refuses (``checkpoint-not-written``; the ``.tmp`` is removed) or the directory holds a committed checkpoint.
        """
        text = encode_state(state)
        layout, buffers = self._laid_out(pieces)
        header = build_header(layout.members, text)
        data_start = sum(map(len, header))
        tensors, listing = layout.entries(data_start)
        path = directory / self._name
        try:
            ensure_dir(directory)
            _refuse_committed(directory)
            size, digests = _write(path, [*(memoryview(part) for part in header), *(buffers[i] for i in layout.order)])
        except OSError as error:
            raise not_written(path, error, data_start + sum(layout.sizes)) from error
        file = FileEntry(name=self._name, rank=self.rank, size=size, block_size=BLOCK, blocks=digests)
        return Written(file, tensors, listing)

    def _laid_out(self, pieces: Sequence[Piece]) -> tuple[_Layout, list[memoryview]]:
        """The pieces' bytes, flat, and where they go; checked against the descriptions, unless these are as they were."""
        *told, data = zip(*pieces, strict=True) if pieces else ((), ())
        if self._layout is not None and self._layout.told == told:
            try:
                buffers = [view.cast("B") if view.nbytes else _EMPTY for view in (memoryview(one) for one in data)]
            except TypeError:
                pass  # said below, with the name
            else:
                if self._layout.sizes == list(map(len, buffers)):
                    return self._layout, buffers
        buffers = [_buffer(piece) for piece in pieces]
        self._layout = _Layout(self._name, told, buffers)
        return self._layout, buffers


class _Layout:
    """What follows from names, dtypes, shapes and starts, which ``told`` has one after the other, and from the sizes of pieces
    that were found right. ``sizes`` (bytes) are in their order, ``order`` has their numbers in that of the file. Raises
    ``StateError``."""

    def __init__(self, file: str, told: list[tuple[Any, ...]], buffers: Sequence[memoryview]) -> None:
        self._file, self.told, self.sizes = file, told, list(map(len, buffers))
        self._pieces: list[tuple[str, str, tuple[int, ...], int]] = list(zip(*told, strict=True))
        # Wide elements first: without gaps between tensors, every one then starts on a multiple of its element size. Among those
        # of a width what all ranks share lies together: it is what other ranks read of this file.
        self.order = sorted(
            range(len(buffers)), key=lambda i: (-ITEMSIZE[told[1][i]], told[0][i].startswith(RANK_PREFIX))
        )
        self._stored = self._place()
        self.members = members_of(self._stored)
        self._entries: tuple[int, tuple[TensorEntry, ...], str] | None = None

    def entries(self, data_start: int) -> tuple[tuple[TensorEntry, ...], str]:
        """The manifest's entries and their JSON text, in file order. A header grows by pages: ``data_start`` seldom changes."""
        if self._entries is None or self._entries[0] != data_start:
            made = tuple(
                TensorEntry(
                    name=name, file=self._file, offset=data_start + place.begin, nbytes=place.end - place.begin,
                    shape=list(shape), dtype=dtype, start=start,
                )
                for (name, dtype, shape, start), place in zip(
                    (self._pieces[i] for i in self.order), self._stored.values(), strict=True
                )
            )  # fmt: skip
            self._entries = data_start, made, dump_entries(made)
        return self._entries[1:]

    def _place(self) -> dict[str, Stored]:
        """The header's entries, in file order."""
        stored: dict[str, Stored] = {}
        position = 0
        for i in self.order:
            (name, dtype, shape, start), nbytes = self._pieces[i], self.sizes[i]
            whole = is_whole(shape, dtype, start, nbytes)
            key = name if whole else f"{name}#{start}"
            if key in stored or key == "__metadata__":
                raise StateError(f"tensor name {key!r} occurs twice in a rank file, or is reserved: rename it")
            there = shape if whole else (nbytes // ITEMSIZE[dtype],)
            stored[key] = Stored(dtype, there, position, position + nbytes)
            position += nbytes
        return stored


def encode_state(state: JsonValue) -> str:
    """JSON text from which exactly ``state`` comes back. Raises ``StateError`` with the key for anything that would change:
    keys that are not strings, tuples, NaN and infinities, other types."""
    if not _is_json([state], 0):
        _refuse_json(state, "", 0)
    return json.dumps(state, separators=(",", ":"), allow_nan=False)


def _is_json(values: Iterable[JsonValue], depth: int) -> bool:
    """Would JSON give back all of ``values``, which lie at this depth?"""
    if depth > _MAX_DEPTH:
        return False
    for value in values:
        kind = type(value)
        if kind is list:
            if not _is_json(value, depth + 1):
                return False
        elif kind is dict:
            if not (set(map(type, value)) <= _KEYS and _is_json(value.values(), depth + 1)):
                return False
        elif kind is float:
            if not math.isfinite(value):
                return False
        elif kind not in _ATOMS:
            return False
    return True


def _refuse_json(value: JsonValue, pointer: str, depth: int) -> None:
    """Raise ``StateError`` for what is wrong with a state, and where."""
    if depth > _MAX_DEPTH:
        raise StateError(f"state at {pointer or '/'} is nested deeper than {_MAX_DEPTH} levels")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise StateError(
                    f"state at {pointer or '/'} has the key {key!r}, which is not a string: JSON would change it"
                )
            _refuse_json(item, f"{pointer}/{key}", depth + 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            _refuse_json(item, f"{pointer}/{index}", depth + 1)
    elif type(value) is float:
        if not math.isfinite(value):
            raise StateError(
                f"state at {pointer or '/'} is {value!r}, which JSON has no word for: encode it as a string"
            )
    elif type(value) not in _ATOMS:
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
        flat = view.cast("B") if view.nbytes else _EMPTY
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
    size, started, room = 0, 0, CHUNK  # bytes written, told to the disk, and still to come in this chunk of the file
    batch: list[memoryview | bytes] = []
    small: list[memoryview] = []
    for buffer in buffers:
        begin, end = 0, len(buffer)
        if end < _SMALL and end < room:
            small.append(buffer)
            room -= end
            continue
        while begin < end:
            if small:
                batch.append(b"".join(small))
                small = []
            part = buffer[begin : begin + room]
            batch.append(part)
            begin, room = begin + len(part), room - len(part)
            if room and len(batch) < _BATCH:
                continue
            size, batch = size + _writev_all(fd, batch, hasher), []
            if room:
                continue
            room = CHUNK
            if size % BLOCK == 0:
                digests.append(hasher.hexdigest())
                hasher.reset()
            if size - started >= _WRITEBACK:
                start_writeback(fd, started, size - started)
                started = size
    size += _writev_all(fd, [*batch, b"".join(small)], hasher)
    if size % BLOCK:
        digests.append(hasher.hexdigest())
    return size, digests


def _writev_all(fd: int, batch: list[memoryview | bytes], hasher: xxhash.xxh3_128) -> int:
    """Hash and write; bytes."""
    for buffer in batch:
        hasher.update(buffer)
    count = left = sum(map(len, batch))
    while left:
        written = os.writev(fd, batch)
        left -= written
        while batch and written >= len(batch[0]):
            written -= len(batch.pop(0))
        if batch:
            batch[0] = batch[0][written:]
    return count
