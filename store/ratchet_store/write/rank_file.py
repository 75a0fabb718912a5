"""Write one rank's file: its slices of the shared tensors, its private tensors, its JSON state."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from ratchet_contract.atomic_write import atomic_file, ensure_dir
from ratchet_contract.checkpoint.manifest import RANK_PREFIX, FileEntry, TensorEntry, dump_entries
from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, rank_file_name
from ratchet_hooks.state.safetensors_header import ITEMSIZE, Stored, entries_json
from ratchet_store.filesystem.durable_io import DAMAGED, EXISTS, wait_for_writeback, write_error
from ratchet_store.format.json_state import JsonValue, encode_state
from ratchet_store.format.safetensors_header import MAX_DIMENSIONS, build_header, is_complete
from ratchet_store.write.block_writer import BLOCK, Blockwise, Range

BytesLike = Any
"""Anything with a contiguous buffer: bytes, bytearray, memoryview, a numpy array of uint8."""


_TENSOR_ALIGNMENT: Final = 64  # bytes; torch's tensors begin on multiples of it


class Piece(NamedTuple):
    """A tensor, or consecutive elements of a tensor. ``shape``: shape of the whole tensor. ``start``: row-major index of the
    first element. ``dtype``: in safetensors' notation, such as ``F32``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Written(NamedTuple):
    """The manifest's entries for a rank file. ``tensors``: in file order; ``tensors_json``: the same as JSON; ``digests``: of the
    ranges passed to ``write``."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]
    tensors_json: str
    digests: list[str]


def file_order(names: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """Return the order in which pieces are stored, as a list of indices. Raises ``StateError`` for a dtype that cannot be
    stored."""
    for name, dtype in zip(names, dtypes, strict=True):
        if dtype not in ITEMSIZE:
            raise StateError(
                f"tensor {name!r} has dtype {dtype!r}, which safetensors cannot hold; known: {', '.join(ITEMSIZE)}"
            )
    return sorted(range(len(names)), key=lambda i: _sort_key(names[i], dtypes[i], sizes[i]))


def _sort_key(name: str, dtype: str, size: int) -> tuple[int, bool, int]:
    """Return the key by which ``file_order`` sorts a piece of ``size`` bytes."""
    # Wide elements first: without gaps, every piece then starts on a multiple of its element size. Then shared tensors, which
    # other ranks read. Then sizes divisible by a larger power of two: copies between aligned addresses are faster.
    return -ITEMSIZE[dtype], name.startswith(RANK_PREFIX), -math.gcd(size, _TENSOR_ALIGNMENT)


class RankWriter:
    """Writes the files of one rank, one after another. The layout of a file is computed again only if the pieces have
    changed."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self._name = rank, rank_file_name(rank, world_size)
        self._layout: _Layout | None = None
        self._lock = threading.Lock()
        self._active_writer: Blockwise | None = None  # what is being written

    def write(
        self, directory: Path, pieces: Sequence[Piece], data: BytesLike, state: JsonValue, ranges: Sequence[Range] = ()
    ) -> Written:
        """Write the file ``rank-<rank>-of-<world_size>.safetensors`` into ``directory``, and sync both. ``pieces``: in
        ``file_order``. ``data``: the bytes of all pieces, which must not change during the call. ``ranges``: parts of ``data``
        for ``Written.digests``. Raises ``StateError`` for state or pieces that cannot be stored, for pieces in another order, and
        for ``data`` of another size than theirs. Raises ``CheckpointError`` if the file cannot be written, or if the checkpoint
        in ``directory`` is committed or being deleted."""
        header, view = self._header_and_data(pieces, data, state)
        with _new_file(directory, self._name, len(header) + len(view)) as fd:
            return self._written(len(header), *self._stream(Blockwise(fd, header, view, BLOCK, ranges)))

    def describe(
        self, pieces: Sequence[Piece], data: BytesLike, state: JsonValue, ranges: Sequence[Range] = ()
    ) -> tuple[bytes, Written]:
        """Return the header of the file that ``write`` would write, and what ``write`` would return. Raises ``StateError``."""
        header, view = self._header_and_data(pieces, data, state)
        return header, self._written(len(header), *self._stream(Blockwise(None, header, view, BLOCK, ranges)))

    def help(self) -> None:
        """Help another thread that is inside ``write``: write blocks of its file until none is left. Does nothing if no file
        is being written. Errors are raised by ``write``."""
        with self._lock:
            found = self._active_writer
        if found is not None:
            found.work()

    def _header_and_data(self, pieces: Sequence[Piece], data: BytesLike, state: JsonValue) -> tuple[bytes, memoryview]:
        """Return the file's header and the bytes after it. Raises ``StateError``."""
        text, layout, view = encode_state(state), self._layout_for(pieces), _bytes(data)
        if len(view) != layout.size:
            raise StateError(f"the tensors of the rank file have {layout.size} bytes, but {len(view)} were passed")
        return b"".join(build_header(layout.members, text)), view

    def _written(self, data_start: int, size: int, blocks: list[str], digests: list[str]) -> Written:
        """Return the manifest's entries for the file. ``data_start``: offset of the first piece."""
        assert self._layout is not None
        file = FileEntry(name=self._name, rank=self.rank, size=size, block_size=BLOCK, blocks=blocks)
        return Written(file, *self._layout.entries(data_start), digests)

    def _stream(self, blocks: Blockwise) -> tuple[int, list[str], list[str]]:
        """Write all blocks. Returns the file's size in bytes, the digests of the blocks, and those of the ranges."""
        with self._lock:
            self._active_writer = blocks
        try:
            blocks.work()
        finally:
            with self._lock:
                self._active_writer = None
        return blocks.size, *blocks.finish()

    def _layout_for(self, pieces: Sequence[Piece]) -> _Layout:
        """Return the layout of the pieces: the previous layout if the pieces are equal, else a new one. Raises
        ``StateError``."""
        if self._layout is None or (self._layout.pieces is not pieces and self._layout.pieces != pieces):
            self._layout = None
            self._layout = _Layout(self._name, pieces)
        return self._layout


def write_described(directory: Path, file: FileEntry, header: bytes, data: memoryview) -> None:
    """Write a rank file of which ``describe`` has returned ``file`` and ``header`` into ``directory``, and sync both. Raises
    ``CheckpointError``: ``checkpoint-damaged`` if the bytes are others, or as ``RankWriter.write``."""
    with _new_file(directory, file.name, file.size) as fd:
        blocks = Blockwise(fd, header, data, file.block_size)
        blocks.work()
        if blocks.size != file.size or blocks.finish()[0] != file.blocks:
            raise CheckpointError(f"the bytes of {file.name} are not those that were described", code=DAMAGED)


@contextmanager
def _new_file(directory: Path, name: str, size: int) -> Iterator[int]:
    """Context manager: yield the descriptor of a new file of ``size`` bytes; at the end of the block the file and its name are
    synced. Raises ``CheckpointError`` if that fails, or if the checkpoint in ``directory`` is committed or being deleted."""
    path = directory / name
    try:
        ensure_dir(directory.parent)
        directory.mkdir(exist_ok=True)  # the commit makes its name durable; before that nothing in it counts
        _raise_if_committed(directory)
        with atomic_file(path, durable=True) as fd:
            yield fd
            wait_for_writeback(fd, size)
    except OSError as error:
        raise write_error(path, error, size) from error


class _Layout:
    """The part of a rank file that depends on the pieces, but not on their bytes. Raises ``StateError`` for pieces that cannot
    be stored or are not in ``file_order``."""

    def __init__(self, file: str, pieces: Sequence[Piece]) -> None:
        order = file_order([p.name for p in pieces], [p.dtype for p in pieces], [p.nbytes for p in pieces])
        for piece in pieces:
            _check_piece(piece)
        if order != [*range(len(pieces))]:
            raise StateError("the tensors of the rank file are not in its order (file_order)")
        self._file, self.pieces = file, pieces
        self._stored = _header_entries(pieces)
        self.members, self.size = entries_json(self._stored), sum(piece.nbytes for piece in pieces)
        self._entries: tuple[int, tuple[TensorEntry, ...], str] | None = None

    def entries(self, data_start: int) -> tuple[tuple[TensorEntry, ...], str]:
        """Return the manifest's entries of the pieces, also as JSON text. ``data_start``: offset of the first piece in the
        file."""
        if self._entries is None or self._entries[0] != data_start:
            made = tuple(
                TensorEntry(
                    name=piece.name, file=self._file, offset=data_start + place.begin, nbytes=piece.nbytes,
                    shape=list(piece.shape), dtype=piece.dtype, start=piece.start,
                )
                for piece, place in zip(self.pieces, self._stored.values(), strict=True)
            )  # fmt: skip
            self._entries = data_start, made, dump_entries(made)
        return self._entries[1:]


def _header_entries(pieces: Sequence[Piece]) -> dict[str, Stored]:
    """Return the header's entries by key, in the order of ``pieces``. Raises ``StateError`` for a repeated or reserved key."""
    stored: dict[str, Stored] = {}
    position = 0
    for name, dtype, shape, start, nbytes in pieces:
        whole = is_complete(shape, dtype, start, nbytes)
        key = name if whole else f"{name}#{start}"
        if key in stored or key == "__metadata__":
            raise StateError(f"tensor name {key!r} occurs twice in a rank file, or is reserved: rename it")
        there = shape if whole else (nbytes // ITEMSIZE[dtype],)
        stored[key] = Stored(dtype, there, position, position + nbytes)
        position += nbytes
    return stored


def _check_piece(piece: Piece) -> None:
    """Check that name, shape and size of a piece with a known dtype can be stored. Raises ``StateError``."""
    where = f"tensor {piece.name!r}"
    try:
        piece.name.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"{where} has a name that is no text: {error}") from None
    if not piece.name or len(piece.shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in piece.shape):
        raise StateError(f"{where} has no name or no valid shape: {piece.shape}")
    numel = math.prod(piece.shape)
    count, rest = divmod(piece.nbytes, ITEMSIZE[piece.dtype])
    if rest or count < 0 or piece.start < 0 or piece.start + count > numel:
        raise StateError(
            f"{where}: {piece.nbytes} bytes from element {piece.start} do not fit {piece.dtype} of shape {list(piece.shape)}"
        )
    if count == 0 and numel:
        raise StateError(f"{where}: a piece without elements of a tensor that has some")


def _bytes(data: BytesLike) -> memoryview:
    """Return a view of the buffer's bytes. Raises ``StateError`` if they are not contiguous."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise StateError(f"the bytes of the tensors are not contiguous ({error}): pass a uint8 view") from None


def _raise_if_committed(directory: Path) -> None:
    """Raise ``CheckpointError`` (``checkpoint-exists``) if the directory has a committed manifest, or one that is being
    deleted."""
    for name in (MANIFEST_NAME, DELETED_MANIFEST_NAME):
        if (directory / name).exists():
            raise CheckpointError(
                f"{directory} already holds a checkpoint ({name}): nothing in it is changed", code=EXISTS
            )
