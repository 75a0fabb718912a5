"""A copy of what one rank writes, made while its tensors stay as they are.

After a step boundary the training goes on, and each kind of tensor may stay uncopied until something changes it: buffers and
all that is small only until the boundary ends (the forward pass changes them), the hook's state until the next backward pass
calls the hook, parameters and optimizer until the next ``optimizer.step()``.

What changes too early all the same is noticed by torch's own count of in-place changes, and that save fails; ``tensor.data``
has a count of its own, so what is done through it is not noticed (see ``audit``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ratchet_contract.errors import StateError
from ratchet_store.blockwise import Range
from ratchet_store.rankfile import Piece, file_order
from ratchet_store.slices import Slice
from ratchet_worker.held import GONE
from ratchet_worker.latch import Latch
from ratchet_worker.memcpy import memcpy as _memcpy
from ratchet_worker.moves import SHARE, Move, Work, cut
from ratchet_worker.room import Room
from ratchet_worker.snapshot import DTYPE_NAMES, Until, byte_view
from ratchet_worker.sources import Source, Sources


class Staging:
    """The buffer of one rank; ``stage`` begins a copy into it, one at a time. ``cores``: with one alone whoever waits for a copy
    makes the rest of it, with more the saving thread goes on beside."""

    def __init__(self, device: torch.device, cores: int = 1) -> None:
        self._cores = cores
        on_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._room = Room(pinned=on_cuda)
        self._form: object = None  # of the layout
        self._layout = _Layout([])

    def reserve(self, nbytes: int) -> None:
        """In the saving thread, before any save: have room for copies of so many bytes. Raises ``MemoryError``."""
        self._room.reserve(nbytes)

    def stage(self, sources: Sources) -> Staged:
        """Lay out the copies of ``sources``, and make those that cannot wait. Raises ``StateError`` for a dtype that cannot be
        stored."""
        layout = self.lay_out(sources)
        staged = Staged(sources, layout, self._room.take(layout.end), self._stream, self._cores)
        staged.copy(Until.BOUNDARY)
        staged.wait(Until.BOUNDARY)
        return staged

    def lay_out(self, sources: Sources) -> _Layout:
        """Where the copies of ``sources`` will lie. Raises ``StateError`` for a dtype that cannot be stored."""
        if sources.form is None or sources.form is not self._form:
            self._form, self._layout = None, _Layout(sources.each)
            self._form = sources.form
        return self._layout

    def beside(self) -> AbstractContextManager[Any]:
        """Where live tensors are read while training goes on: on CUDA the copies' own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def size_of(sources: Sources) -> int:
    """Bytes that staging these takes."""
    return sum(source.nbytes for source in sources.each)


class _Layout:
    """Where in the buffer the copies of such sources lie; what follows from their names, shapes and dtypes alone."""

    def __init__(self, sources: Sequence[Source]) -> None:
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
            self.kinds[source.until].append(number)
        skipped = [source.start * source.tensor.element_size() for source in sources]  # bytes of the tensor
        self.columns = {  # compact: they are read while training waits, behind a step that has emptied the caches
            until: tuple(array("Q", map(column.__getitem__, numbers)) for column in (offsets, skipped, sizes))
            for until, numbers in self.kinds.items()
        }
        self.large = {until: any(sizes[n] > 2 * SHARE for n in numbers) for until, numbers in self.kinds.items()}
        self.places = [
            _Place(offset, size, s.start, s.tensor.dtype)
            for s, offset, size in zip(sources, offsets, sizes, strict=True)
        ]
        self._names = [s.name for s in sources]
        self._under: dict[str, dict[str, _Place]] = {}

    def under(self, prefix: str) -> Mapping[str, _Place]:
        """The places of names that begin so, by the rest of the name. To be asked by one thread at a time."""
        if prefix not in self._under:
            found = zip(self._names, self.places, strict=True)
            self._under[prefix] = {name.removeprefix(prefix): at for name, at in found if name.startswith(prefix)}
        return self._under[prefix]


class _Place(NamedTuple):
    """In the buffer: ``offset`` and ``nbytes``; the copy's first element is the tensor's element ``start``."""

    offset: int
    nbytes: int
    start: int
    dtype: torch.dtype


class Staged:
    """Copies that are made kind by kind: ``copy`` makes one kind's, in any thread; ``wait`` waits for it, in any other, and takes
    part in it, or takes it over."""

    def __init__(self, sources: Sources, layout: _Layout, buffer: torch.Tensor, stream: Any, cores: int) -> None:
        self._sources, self._tensors, self._addresses = sources.each, sources.tensors, sources.addresses
        self._layout, self._buffer, self._stream, self._gone = layout, buffer, stream, sources.gone
        self._alone = cores < 2
        self._copied = {until: Latch() for until in Until}
        self._marks: dict[Until, Any] = {}
        self._work = {until: Work(self._moves_of(until)) for until in Until}
        self.error: str | None = None

    def _moves_of(self, until: Until) -> list[Move]:
        start, numbers = self._buffer.data_ptr(), self._layout.kinds[until]
        tensors = [self._tensors[number] for number in numbers]
        versions = _versions(tensors) if until is not Until.BOUNDARY else [None] * len(numbers)
        addresses = map(self._addresses.__getitem__, numbers)
        moves = [
            (number, version, start + offset, address and address + skipped, nbytes)
            for number, version, address, offset, skipped, nbytes in zip(
                numbers, versions, addresses, *self._layout.columns[until], strict=True
            )
        ]
        return [*chain.from_iterable(map(cut, moves))] if self._layout.large[until] else moves

    def copy(self, until: Until, *, alone: bool = False) -> None:
        """Copy every source of this kind that nobody else is copying; ``error`` says what had changed before it was copied.
        ``alone``: other threads leave the rest to this one."""
        work = self._work[until]
        try:
            if alone:
                work.take_over()
            with self._queue(until):
                while moves := work.take():
                    for number, version, target, origin, nbytes in moves:
                        if not origin:
                            self._copy(number)
                        elif self._is_there(number):
                            _memcpy(target, origin, nbytes)  # without the GIL
                        if origin and not self._is_there(number):
                            self.error = self.error or GONE.format(name=self._sources[number].name)
                        if version is not None and self._tensors[number]._version != version:
                            self.error = self.error or _changed(self._sources[number])
                    work.made(len(moves))
                if self._stream is not None:
                    self._marks[until] = self._stream.record_event()
            if work.is_made:
                self._copied[until].set()
        except BaseException:  # be all of it made or not: who waits must hear of it
            self.abandon()
            raise

    def finish(self) -> None:
        """Copy what is not copied yet, and wait for what others are copying. Raises ``StateError`` where that was not what was to
        be saved."""
        for until in (Until.BACKWARD, Until.STEP):
            self.copy(until)
            self._copied[until].wait()
        if not all(work.is_made for work in self._work.values()):
            self.error = self.error or "a thread that was copying the state was interrupted"
        if self.error is not None:
            raise StateError(self.error)

    def abandon(self) -> None:
        """Nothing more is copied: who waits for a copy waits in vain."""
        for until, copied in self._copied.items():
            self._work[until].end()
            copied.set()

    def wait(self, until: Until) -> None:
        """Until this kind may change. On CUDA the present stream waits, not the host."""
        copied = self._copied[until]
        if not copied.is_set() and self._stream is None:
            self.copy(until, alone=self._alone)
        if not copied.is_set():
            copied.wait()
        if (mark := self._marks.get(until)) is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def written(self) -> tuple[list[Piece], memoryview]:
        """What is written, and its bytes, when all kinds are copied. The host waits for the device. The same list of as long as
        names, shapes and dtypes are the same."""
        for mark in self._marks.values():
            mark.synchronize()
        return self._layout.pieces, byte_view(self._buffer[: self._layout.end])

    @property
    def form(self) -> object:
        """The same object as long as the copies lie where they lay."""
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
        return {name: self._part(place) for name, place in self._layout.under(prefix).items()}

    def _part(self, place: _Place) -> torch.Tensor:
        return self._buffer[place.offset : place.offset + place.nbytes].view(place.dtype)

    def _is_there(self, number: int) -> bool:
        """Does the memory still belong to it that its address is of? A storage may be resized, whoever holds it."""
        return self._tensors[number].data_ptr() == self._addresses[number] or not self._gone(number)

    def _copy(self, number: int) -> None:
        source, tensor = self._sources[number], self._sources[number].tensor.detach()
        if not source.nbytes:
            return
        flat = (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)[source.start : source.stop]
        self._part(self._layout.places[number]).copy_(flat, non_blocking=True)

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


_version = attrgetter("_version")


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # inference tensors have none
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _changed(source: Source) -> str:
    return (
        f"{source.name} was changed before it was copied, by something else than the backward pass or optimizer.step(): set "
        "checkpoint.staging to blocking, which copies everything before the next step begins"
    )
