"""Copies what one rank writes, while its tensors stay unchanged: the hook's state may be copied until the next backward pass
calls the hook, large parameters and optimizer tensors until the next ``optimizer.step()``. A change that is detected fails the
save, not the training."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ratchet_contract.errors import StateError
from ratchet_hooks.state.files import DTYPE_NAMES
from ratchet_hooks.torch_compat import foreach_copy_, version_of
from ratchet_store.format.shard_slices import Slice
from ratchet_store.write.block_writer import Range
from ratchet_store.write.rank_file import Piece, file_order
from ratchet_worker.checkpoint.copy_buffer import StagingBuffer
from ratchet_worker.checkpoint.copy_chunks import Move, Work, split_copy
from ratchet_worker.checkpoint.copy_sources import Source, Sources
from ratchet_worker.checkpoint.threads import Signal
from ratchet_worker.ipc.memory_copies import Region
from ratchet_worker.state.live_memory import (
    Bytes,
    SafeReader,
    address,
    changed_error,
    is_freed,
    is_row_major,
    live_bytes,
    resized_error,
)
from ratchet_worker.state.snapshot import Until, byte_view

_SMALL_BYTES: Final = 64 << 10
"""Without CUDA, a source of fewer bytes is copied at the boundary: passing it to another thread would take the training
longer."""


class Staging:
    """The host buffers of one rank, into which ``stage`` copies live tensors. A buffer has the copies of one save at a time.
    ``cores``: number of processor cores of this rank. ``regions``: parts of a file in memory that are the buffers; None: there is
    one buffer, in memory of this process."""

    def __init__(self, device: torch.device, cores: int = 1, regions: Sequence[Region | None] = (None,)) -> None:
        self._cores = cores
        on_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._staging_buffers = [StagingBuffer(pinned=on_cuda, region=region) for region in regions]
        self._reader = SafeReader()
        self._layout_key: object = None  # of the layout
        self._layout = _Layout([], 0)

    def reserve(self, nbytes: int) -> None:
        """Allocate the buffer for copies of ``nbytes``, unless a save has used it already. Raises ``MemoryError``."""
        self._staging_buffers[0].reserve(nbytes)

    def stage(self, sources: Sources, number: int = 0) -> Staged:
        """Copy the ``sources`` due at the boundary, and return an object that copies the others later. ``number``: of the buffer.
        Raises ``StateError`` for a tensor that cannot be stored, and ``MemoryError``."""
        layout = self.lay_out(sources)
        buffer = self._staging_buffers[number].acquire(layout.nbytes)
        staged = Staged(sources, layout, buffer, self._stream, self._cores, self._reader)
        staged.copy_at_boundary()
        return staged

    def lay_out(self, sources: Sources) -> _Layout:
        """Return the layout of the copies of ``sources``. Raises ``StateError`` for a dtype that cannot be stored."""
        if sources.layout_key is None or sources.layout_key is not self._layout_key:
            self._layout_key = None
            self._layout = _Layout(sources.entries, _SMALL_BYTES if self._stream is None else 0)
            self._layout_key = sources.layout_key
        return self._layout

    def reading_context(self) -> AbstractContextManager[Any]:
        """Return a context for reading live tensors during training; on CUDA it sets the stream of the copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def size_of(sources: Sources) -> int:
    """Return the number of bytes that copies of ``sources`` take in the buffer."""
    return sum(source.nbytes for source in sources.entries)


class _Layout:
    """The places of the copies in the buffer. ``small``: a source of fewer bytes is copied at the boundary. Raises ``StateError``
    for a dtype that cannot be stored."""

    def __init__(self, sources: Sequence[Source], small: int) -> None:
        for source in sources:
            if source.tensor.dtype not in DTYPE_NAMES:
                raise StateError(f"{source.name}: dtype {source.tensor.dtype} cannot be stored")
        dtypes = [DTYPE_NAMES[source.tensor.dtype] for source in sources]
        order = file_order([s.name for s in sources], dtypes, [s.nbytes for s in sources])
        self.pieces = [
            Piece(s.name, dtypes[i], tuple(s.tensor.shape), s.start, s.nbytes)
            for i, s in ((i, sources[i]) for i in order)
        ]
        sizes = [source.nbytes for source in sources]
        offsets = [0] * len(sources)
        self.nbytes = 0
        for number in order:
            offsets[number] = self.nbytes
            self.nbytes += sizes[number]
        self.numbers_by_until: dict[Until, list[int]] = {until: [] for until in Until}
        for number, source in enumerate(sources):
            self.numbers_by_until[source.until if sizes[number] >= small else Until.BOUNDARY].append(number)
        self.row_major = [is_row_major(source.tensor) for source in sources]
        self.moves = {
            until: [m for n in numbers for m in split_copy(n, sizes[n], undivided=not self.row_major[n])]
            for until, numbers in self.numbers_by_until.items()
        }
        self.places = [
            _Place(
                offset, size, s.start, s.tensor.dtype, s.tensor.shape if s.stop - s.start == s.tensor.numel() else None
            )
            for s, offset, size in zip(sources, offsets, sizes, strict=True)
        ]
        self._names = [s.name for s in sources]
        self._by_prefix: dict[str, dict[str, _Place]] = {}
        self._targets: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def with_prefix(self, prefix: str) -> Mapping[str, _Place]:
        """Return the places of sources whose names begin with ``prefix``, by the rest of the name. Not thread-safe."""
        if prefix not in self._by_prefix:
            found = zip(self._names, self.places, strict=True)
            self._by_prefix[prefix] = {name.removeprefix(prefix): at for name, at in found if name.startswith(prefix)}
        return self._by_prefix[prefix]

    def boundary_targets(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of ``buffer`` for each source that is copied at the boundary, flat for a part of a tensor."""
        for known, targets in self._targets:
            if known is buffer:
                return targets
        made = [self.places[n].view_in(buffer) for n in self.numbers_by_until[Until.BOUNDARY]]
        self._targets = [*self._targets[-1:], (buffer, made)]  # of two buffers that take turns
        return made


class _Place(NamedTuple):
    """The place of one copy in the buffer. ``start``: row-major index of its first element; ``shape``: the tensor's, None for a
    part."""

    offset: int
    nbytes: int
    start: int
    dtype: torch.dtype
    shape: torch.Size | None

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the copy as a view of ``buffer``, flat if only a part of the tensor is copied."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat if self.shape is None else flat.view(self.shape)


class Staged:
    """The copies of one save, perhaps still in progress. They are made kind by kind; the kind (``Until``) is how long a tensor
    stays unchanged. ``error``: set if a tensor has changed too early or could not be copied."""

    def __init__(
        self, sources: Sources, layout: _Layout, buffer: torch.Tensor, stream: Any, cores: int, reader: SafeReader
    ) -> None:
        live = sources.live_tensors
        self._sources, self._tensors = sources.entries, live.tensors
        self._addresses, self._versions = live.addresses, live.versions
        self._layout, self._buffer, self._stream, self._reader = layout, buffer, stream, reader
        self._bytes: Bytes = buffer.numpy()
        self._single_core = cores < 2
        self._copied = set[Until]()  # the kinds that no thread need wait for any more
        self._signal = Signal()
        self._awaited: set[Until] = set()
        self._direct_copy_lock = threading.Lock()
        self._events: dict[Until, Any] = {}
        self._memory: dict[int, Bytes] = {}
        self._work = {until: Work(layout.moves[until]) for until in (Until.BACKWARD, Until.STEP)}
        self.error: StateError | None = None

    def copy_at_boundary(self) -> None:
        """Copy the sources that are due at the boundary. Raises ``StateError`` for a tensor whose storage was emptied."""
        numbers = self._layout.numbers_by_until[Until.BOUNDARY]
        for number in numbers:
            if not self._addresses[number] and is_freed(self._tensors[number]):
                name = self._sources[number].name
                raise StateError(f"{name} has no memory: its storage was emptied before the step's end")
        with self._copy_stream(Until.BOUNDARY), torch.no_grad():
            if self._stream is None:
                targets = self._layout.boundary_targets(self._buffer)
                origins = [*map(self._elements_to_copy, numbers)]
                if {*map(type, origins)} <= {torch.Tensor}:
                    foreach_copy_(targets, origins)
                else:  # a subclass may implement ``copy_`` only
                    for target, origin in zip(targets, origins, strict=True):
                        target.copy_(origin)
            else:
                for number in numbers:
                    self._copy(number, self._tensors[number])
                self._events[Until.BOUNDARY] = self._stream.record_event()
        self._set_copied(Until.BOUNDARY)
        self.wait(Until.BOUNDARY)

    def copy(self, until: Until, *, exclusive: bool = False, is_waiting: bool = False) -> None:
        """Copy all parts of the kind ``until`` that no thread has taken or reserved. ``exclusive``: other threads leave the rest
        to this one; ``is_waiting``: the caller is the loop's thread."""
        work = self._work[until]
        try:
            if exclusive:
                work.take_over()
            with self._copy_stream(until):
                while moves := work.take():
                    for move in moves:
                        if is_waiting or not self._copy_if_awaited(move, until):
                            self._copy_move(move, direct=is_waiting)
                    work.mark_done(len(moves))
                if self._stream is not None:
                    self._events[until] = self._stream.record_event()
            if work.is_done:
                self._set_copied(until)
        except BaseException:  # a thread that waits for this kind must continue, whether all of it was copied or not
            self.abandon()
            raise

    def _copy_if_awaited(self, move: Move, until: Until) -> bool:
        """Make one copy directly if the loop's thread waits for the kind ``until``; return False if it does not."""
        with self._direct_copy_lock:
            # the loop's thread cannot leave ``wait`` before the copy is made, even if a signal handler raises there
            waited = until in self._awaited
            if waited:
                self._copy_move(move, direct=True)
        return waited

    def _copy_move(self, move: Move, *, direct: bool) -> None:
        """Make one copy; sets ``error`` if the tensor has changed or cannot be copied. ``direct``: no code that could free the
        memory runs meanwhile."""
        number, begin, end = move
        tensor, place = self._tensors[number], self._layout.places[number]
        lost = address(tensor) != self._addresses[number]
        if not lost and place.nbytes:
            try:
                if not self._layout.row_major[number]:
                    self._copy(number, tensor if direct or not tensor.is_cpu else self._reader.private_copy(tensor))
                else:
                    memory = self._memory_of(number)[begin:end]
                    target = self._bytes[place.offset + begin : place.offset + end]
                    _copy_bytes(memory, target, None if direct else self._reader)
            except BufferError:
                lost = True
            except RuntimeError as error:  # from torch, for a view of a storage that is too small, or from the device
                name = self._sources[number].name
                self.error = self.error or StateError(f"{name} could not be copied: {error}")
        self._check(number, is_lost=lost)

    def _check(self, number: int, *, is_lost: bool = False) -> None:
        """Set ``error`` if the tensor with this number has another address or count of changes than at the boundary. ``is_lost``:
        its memory could not be read."""
        tensor = self._tensors[number]
        if is_lost or address(tensor) != self._addresses[number]:
            self.error = self.error or resized_error(self._sources[number].name)
        if version_of(tensor) != self._versions[number]:
            self.error = self.error or changed_error(self._sources[number].name)

    def require_intact(self, until: Until) -> None:
        """Raise ``StateError`` if ``_check`` finds a changed tensor of the kind ``until``, or ``error`` is set."""
        for number in self._layout.numbers_by_until[until]:
            self._check(number)
        if self.error is not None:
            raise self.error

    def _memory_of(self, number: int) -> Bytes:
        """Return the bytes of the source in the live tensor's memory. Raises ``BufferError`` if the tensor has no memory."""
        if number not in self._memory:
            place = self._layout.places[number]
            begin = place.start * place.dtype.itemsize
            self._memory[number] = live_bytes(self._tensors[number])[begin : begin + place.nbytes]
        return self._memory[number]

    def finish(self) -> None:
        """Copy what is not copied yet, and wait for other threads' copies. Raises ``StateError`` if a tensor changed too early or
        was not copied."""
        for until in self._work:
            self.copy(until)
            self._wait_until_copied(until)
        if not all(work.is_done for work in self._work.values()):
            self.error = self.error or StateError("a thread that was copying the state was interrupted")
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Drop the copies that no thread has taken, and release all threads that wait for a copy."""
        for work in self._work.values():
            work.cancel()
        self._set_copied(*Until)

    def _set_copied(self, *untils: Until) -> None:
        """Release the threads that wait for these kinds."""
        self._copied.update(untils)
        self._signal.notify()

    def _wait_until_copied(self, until: Until) -> None:
        self._signal.wait_for(lambda: until in self._copied)

    def wait(self, until: Until) -> None:
        """Wait until tensors of the kind ``until`` are copied or the copies are abandoned. On CUDA, the host waits only until the
        copies are queued; otherwise the caller takes part in the copying."""
        if until not in self._copied:
            self._awaited.add(until)
            try:
                if self._stream is None:
                    self.copy(until, exclusive=self._single_core, is_waiting=True)
                self._wait_until_copied(until)
            finally:
                self._awaited.discard(until)
                with self._direct_copy_lock:  # waits for a direct copy that has begun
                    pass
        if (mark := self._events.get(until)) is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def data_to_write(self) -> tuple[list[Piece], memoryview]:
        """Return the pieces to write, and all their bytes in file order. Call it when all kinds are copied."""
        for mark in self._events.values():
            mark.synchronize()
        return self._layout.pieces, byte_view(self._buffer[: self._layout.nbytes])

    @property
    def layout_key(self) -> object:
        """Return an object to compare by identity: while it is the same, the copies have the same places."""
        return self._layout

    def ranges(self, prefix: str, slices: Iterable[Slice]) -> list[Range]:
        """Return the byte range of each of ``slices`` in the bytes to write. ``prefix``: what the sources' names begin with."""
        places = self._layout.with_prefix(prefix)
        ranges: list[Range] = []
        for name, start, stop in slices:
            at = places[name]
            zero = at.offset - at.start * at.dtype.itemsize  # where the tensor's first element would be
            ranges.append((zero + start * at.dtype.itemsize, zero + stop * at.dtype.itemsize))
        return ranges

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the copies of sources whose names begin with ``prefix``, by the rest of the name, as flat views."""
        return {name: place.view_in(self._buffer).view(-1) for name, place in self._layout.with_prefix(prefix).items()}

    def _elements_to_copy(self, number: int) -> torch.Tensor:
        """Return the elements of a live tensor that are copied: the tensor itself, or a part of it, flat."""
        tensor, place = self._tensors[number], self._layout.places[number]
        if place.shape is not None:
            return tensor
        return tensor.contiguous().view(-1)[place.start : place.start + place.nbytes // place.dtype.itemsize]

    def _copy(self, number: int, tensor: torch.Tensor) -> None:
        """Copy a source with torch; on CUDA only queue the copy. ``tensor``: the live tensor, or a private copy."""
        place = self._layout.places[number]
        if place.nbytes:
            flat = tensor.detach().contiguous().view(-1)
            flat = flat[place.start : place.start + place.nbytes // place.dtype.itemsize]
            place.view_in(self._buffer).view(-1).copy_(flat, non_blocking=True)

    @contextmanager
    def _copy_stream(self, until: Until) -> Iterator[None]:
        """Context manager: on CUDA, make the copies' stream the current one, at the boundary after the caller's queued work."""
        if self._stream is None:
            yield
            return
        if until is Until.BOUNDARY:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _copy_bytes(memory: Bytes, target: Bytes, reader: SafeReader | None) -> None:
    """Copy ``memory`` to ``target``, mostly without the GIL. ``reader``: for memory that may be freed meanwhile; None: read
    directly."""
    if reader is None:
        np.copyto(target, memory)
    else:
        reader.copy(memory, target)
