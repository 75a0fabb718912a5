"""A copy of what one rank writes, made while its tensors stay as they are.

After a step boundary the training goes on. Large tensors stay uncopied until something changes them: the hook's state until the
next backward pass calls the hook, parameters and optimizer until the next ``optimizer.step()``. Buffers, which the forward pass
changes, and all that is small are copied at the boundary.

A tensor that changes earlier fails its save, not the training: torch counts in-place changes, and a storage that was resized
mostly has another address (``live_memory``). Not seen are a storage that was freed and allocated again at the same address until
code fills it, and changes through ``tensor.data``, which has a counter of its own (see ``audit``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ratchet_contract.errors import StateError
from ratchet_hooks.files import DTYPE_NAMES
from ratchet_hooks.torch_compat import foreach_copy_, version_of
from ratchet_store.blockwise import Range
from ratchet_store.rankfile import Piece, file_order
from ratchet_store.slices import Slice
from ratchet_worker.latch import Latch
from ratchet_worker.live_memory import Bytes, SafeReader, address, changed, is_freed, is_row_major, live_bytes, resized
from ratchet_worker.moves import Move, Work, cut
from ratchet_worker.room import Room
from ratchet_worker.snapshot import Until, byte_view
from ratchet_worker.sources import Source, Sources

_SMALL: Final = 64 << 10
"""Bytes of a CPU tensor below which it is copied at the boundary: handing it to another thread takes the training longer."""


class Staging:
    """The buffer of one rank; ``stage`` begins a copy into it, one at a time. ``cores``: with one alone whoever waits for a copy
    makes the rest of it, with more the saving thread goes on beside."""

    def __init__(self, device: torch.device, cores: int = 1) -> None:
        self._cores = cores
        on_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._room, self._reader = Room(pinned=on_cuda), SafeReader()
        self._form: object = None  # of the layout
        self._layout = _Layout([], 0)

    def reserve(self, nbytes: int) -> None:
        """In the saving thread, before any save: have room for copies of so many bytes. Raises ``MemoryError``."""
        self._room.reserve(nbytes)

    def stage(self, sources: Sources) -> Staged:
        """Lay out the copies of ``sources``, and make those that cannot wait. Raises ``StateError`` for a dtype that cannot be
        stored."""
        layout = self.lay_out(sources)
        buffer = self._room.take(layout.end)
        staged = Staged(sources, layout, buffer, self._stream, self._cores, self._reader)
        staged.copy_at_boundary()
        return staged

    def lay_out(self, sources: Sources) -> _Layout:
        """Where the copies of ``sources`` will lie. Raises ``StateError`` for a dtype that cannot be stored."""
        if sources.form is None or sources.form is not self._form:
            self._form = None
            self._layout = _Layout(sources.each, _SMALL if self._stream is None else 0)
            self._form = sources.form
        return self._layout

    def beside(self) -> AbstractContextManager[Any]:
        """Where live tensors are read while training goes on: on CUDA the copies' own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def size_of(sources: Sources) -> int:
    """Bytes that staging these takes."""
    return sum(source.nbytes for source in sources.each)


class _Layout:
    """Where in the buffer the copies of such sources lie; it follows from their names, shapes and dtypes alone. ``small``: bytes
    below which a source is copied at the boundary."""

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
        self.end = 0
        for number in order:
            offsets[number] = self.end
            self.end += sizes[number]
        self.kinds: dict[Until, list[int]] = {until: [] for until in Until}
        for number, source in enumerate(sources):
            self.kinds[source.until if sizes[number] >= small else Until.BOUNDARY].append(number)
        self.row_major = [is_row_major(source.tensor) for source in sources]
        self.moves = {
            until: [m for n in numbers for m in cut(n, sizes[n], whole=not self.row_major[n])]
            for until, numbers in self.kinds.items()
        }
        self.places = [
            _Place(
                offset, size, s.start, s.tensor.dtype, s.tensor.shape if s.stop - s.start == s.tensor.numel() else None
            )
            for s, offset, size in zip(sources, offsets, sizes, strict=True)
        ]
        self._names = [s.name for s in sources]
        self._under: dict[str, dict[str, _Place]] = {}
        self._targets: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def under(self, prefix: str) -> Mapping[str, _Place]:
        """The places of names that begin so, by the rest of the name. For one thread at a time."""
        if prefix not in self._under:
            found = zip(self._names, self.places, strict=True)
            self._under[prefix] = {name.removeprefix(prefix): at for name, at in found if name.startswith(prefix)}
        return self._under[prefix]

    def boundary_targets(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where in ``buffer`` the sources lie that are copied at the boundary, in their shapes."""
        if self._targets is None or self._targets[0] is not buffer:
            self._targets = buffer, [self.places[n].of(buffer) for n in self.kinds[Until.BOUNDARY]]
        return self._targets[1]


class _Place(NamedTuple):
    """In the buffer: ``offset`` and ``nbytes``; the copy's first element is the tensor's element ``start``. ``shape``: of the
    tensor where all of it is copied, else None."""

    offset: int
    nbytes: int
    start: int
    dtype: torch.dtype
    shape: torch.Size | None

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The copy in ``buffer``: in the tensor's shape, or flat where only a part of it is copied."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat if self.shape is None else flat.view(self.shape)


class Staged:
    """Copies that are made kind by kind: ``copy`` makes one kind's, in any thread; ``wait`` waits for it, in any other, and takes
    part in it, or takes it over."""

    def __init__(
        self, sources: Sources, layout: _Layout, buffer: torch.Tensor, stream: Any, cores: int, reader: SafeReader
    ) -> None:
        live = sources.live
        self._sources, self._tensors = sources.each, live.tensors
        self._addresses, self._versions = live.addresses, live.versions
        self._layout, self._buffer, self._stream, self._reader = layout, buffer, stream, reader
        self._bytes: Bytes = buffer.numpy()
        self._alone = cores < 2
        self._copied = {until: Latch() for until in Until}
        self._waited: set[Until] = set()
        self._direct = threading.Lock()
        self._marks: dict[Until, Any] = {}
        self._memory: dict[int, Bytes] = {}
        self._work = {until: Work(layout.moves[until]) for until in (Until.BACKWARD, Until.STEP)}
        self.error: StateError | None = None

    def copy_at_boundary(self) -> None:
        """Copy what cannot wait, in the loop's thread. Raises ``StateError`` for a tensor without memory."""
        numbers = self._layout.kinds[Until.BOUNDARY]
        for number in numbers:
            if not self._addresses[number] and is_freed(self._tensors[number]):
                name = self._sources[number].name
                raise StateError(f"{name} has no memory: its storage was emptied before the step's end")
        with self._queue(Until.BOUNDARY), torch.no_grad():
            if self._stream is None:
                foreach_copy_(self._layout.boundary_targets(self._buffer), [self._part(number) for number in numbers])
            else:
                for number in numbers:
                    self._copy(number, self._tensors[number])
                self._marks[Until.BOUNDARY] = self._stream.record_event()
        self._copied[Until.BOUNDARY].set()
        self.wait(Until.BOUNDARY)

    def copy(self, until: Until, *, alone: bool = False, waits: bool = False) -> None:
        """Copy every source of this kind that no other thread is copying; ``error`` says what had changed before it was copied.
        ``alone``: other threads leave the rest to this one. ``waits``: the caller is the loop's thread, which runs nothing else
        meanwhile."""
        work = self._work[until]
        try:
            if alone:
                work.take_over()
            with self._queue(until):
                while moves := work.take():
                    for move in moves:
                        if waits or not self._made_while_waited(move, until):
                            self._make(move, direct=waits)
                    work.made(len(moves))
                if self._stream is not None:
                    self._marks[until] = self._stream.record_event()
            if work.is_made:
                self._copied[until].set()
        except BaseException:  # whether all of it was copied or not, a thread that waits for it must go on
            self.abandon()
            raise

    def _made_while_waited(self, move: Move, until: Until) -> bool:
        """Make a direct copy if the loop's thread waits for this kind. It cannot leave ``wait`` before the copy is made, also
        where a signal handler raises there."""
        with self._direct:
            waited = until in self._waited
            if waited:
                self._make(move, direct=True)
        return waited

    def _make(self, move: Move, *, direct: bool) -> None:
        """One copy. ``direct``: the loop's code does not run meanwhile, which could free the memory."""
        number, begin, end = move
        tensor, place = self._tensors[number], self._layout.places[number]
        lost = address(tensor) != self._addresses[number]
        if not lost and place.nbytes:
            try:
                if not self._layout.row_major[number]:
                    self._copy(number, tensor if direct or not tensor.is_cpu else self._reader.private(tensor))
                else:
                    memory = self._memory_of(number)[begin:end]
                    target = self._bytes[place.offset + begin : place.offset + end]
                    _copy_bytes(memory, target, None if direct else self._reader)
            except BufferError:
                lost = True
            except RuntimeError as error:  # torch's, for a view of a storage that is too small, or the device's
                name = self._sources[number].name
                self.error = self.error or StateError(f"{name} could not be copied: {error}")
        self._check(number, lost=lost)

    def _check(self, number: int, *, lost: bool = False) -> None:
        """Note an error where the tensor is not what it was at the boundary."""
        tensor = self._tensors[number]
        if lost or address(tensor) != self._addresses[number]:
            self.error = self.error or resized(self._sources[number].name)
        if version_of(tensor) != self._versions[number]:
            self.error = self.error or changed(self._sources[number].name)

    def require_intact(self, until: Until) -> None:
        """Raises ``StateError`` where a tensor of this kind is not what it was at the boundary. To be called before it may
        change."""
        for number in self._layout.kinds[until]:
            self._check(number)
        if self.error is not None:
            raise self.error

    def _memory_of(self, number: int) -> Bytes:
        """The bytes of the source in the live tensor's memory."""
        if number not in self._memory:
            place = self._layout.places[number]
            begin = place.start * place.dtype.itemsize
            self._memory[number] = live_bytes(self._tensors[number])[begin : begin + place.nbytes]
        return self._memory[number]

    def finish(self) -> None:
        """In the saving thread: copy what is not copied yet, and wait for what other threads are copying. Raises ``StateError``
        where that was not what was to be saved."""
        for until in self._work:
            self.copy(until)
            self._copied[until].wait()
        if not all(work.is_made for work in self._work.values()):
            self.error = self.error or StateError("a thread that was copying the state was interrupted")
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Nothing more is copied, and no thread waits for a copy any more."""
        for work in self._work.values():
            work.end()
        for copied in self._copied.values():
            copied.set()

    def wait(self, until: Until) -> None:
        """Until this kind may change. On CUDA the present stream waits, not the host."""
        copied = self._copied[until]
        if not copied.is_set():
            self._waited.add(until)
            try:
                if self._stream is None:
                    self.copy(until, alone=self._alone, waits=True)
                copied.wait()
            finally:
                self._waited.discard(until)
                with self._direct:  # a direct copy that has begun
                    pass
        if (mark := self._marks.get(until)) is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def written(self) -> tuple[list[Piece], memoryview]:
        """What is written, and its bytes, when all kinds are copied. The host waits for the device. The list is the same object
        as long as names, shapes and dtypes are the same."""
        for mark in self._marks.values():
            mark.synchronize()
        return self._layout.pieces, byte_view(self._buffer[: self._layout.end])

    @property
    def form(self) -> object:
        """The same object as long as the copies have the same places."""
        return self._layout

    def ranges(self, prefix: str, slices: Iterable[Slice]) -> list[Range]:
        """Where in what is written slices lie that are in the sources; their names without ``prefix``."""
        places = self._layout.under(prefix)
        ranges: list[Range] = []
        for name, start, stop in slices:
            at = places[name]
            zero = at.offset - at.start * at.dtype.itemsize  # where the tensor's first element would lie
            ranges.append((zero + start * at.dtype.itemsize, zero + stop * at.dtype.itemsize))
        return ranges

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """The copies of sources whose names begin so, by the rest of the name: flat, and of their dtypes."""
        return {name: place.of(self._buffer).view(-1) for name, place in self._layout.under(prefix).items()}

    def _part(self, number: int) -> torch.Tensor:
        """The elements of a live tensor that are copied: all of it in its shape, or a part of it, flat."""
        tensor, place = self._tensors[number], self._layout.places[number]
        if place.shape is not None:
            return tensor
        return tensor.contiguous().view(-1)[place.start : place.start + place.nbytes // place.dtype.itemsize]

    def _copy(self, number: int, tensor: torch.Tensor) -> None:
        """By torch: from another device, or where torch has to order or conjugate the elements."""
        place = self._layout.places[number]
        if place.nbytes:
            flat = tensor.detach().contiguous().view(-1)
            flat = flat[place.start : place.start + place.nbytes // place.dtype.itemsize]
            place.of(self._buffer).view(-1).copy_(flat, non_blocking=True)

    @contextmanager
    def _queue(self, until: Until) -> Iterator[None]:
        """On CUDA a stream beside the present one, and behind what that has queued before the boundary."""
        if self._stream is None:
            yield
            return
        if until is Until.BOUNDARY:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _copy_bytes(memory: Bytes, target: Bytes, reader: SafeReader | None) -> None:
    """Copy ``memory``, by ``reader`` where user code may free it meanwhile. Without Python's lock."""
    if reader is None:
        np.copyto(target, memory)
    else:
        reader.copy(memory, target)
