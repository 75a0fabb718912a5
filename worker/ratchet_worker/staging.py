"""A copy of what one rank writes, made while its tensors stay as they are.

After a step boundary the training goes on, and each kind of tensor may stay uncopied until something changes it: buffers and
all that is small only until the boundary ends (the forward pass changes them), the hook's state until the next backward pass
calls the hook, parameters and optimizer until the next ``optimizer.step()``. The copy lies in one buffer that is kept from save
to save and whose pages are there before the first: fresh pages cost more than twice the copy.

What changes too early all the same is noticed by torch's own count of in-place changes, and that save fails; ``tensor.data``
has a count of its own, so what is done through it is not noticed (see ``audit``).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from ratchet_contract.errors import StateError
from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_store.rankfile import Piece
from ratchet_store.slices import Slice
from ratchet_worker.snapshot import DTYPE_NAMES, Snapshot, Until, byte_view

_ALIGNMENT: Final = 64  # bytes: a cache line


class Source(NamedTuple):
    """Elements ``start <= i < stop`` (row-major) of a live tensor. ``name``: with its prefix, as it is stored."""

    name: str
    tensor: torch.Tensor
    start: int
    stop: int
    until: Until


def sources_of(snapshot: Snapshot, rank: int, slices: Sequence[Slice]) -> list[Source]:
    """What this rank writes: its ``slices`` of the shared tensors, and all of its private ones."""
    until, prefix = snapshot.until, f"{RANK_PREFIX}{rank}/"
    shared = [
        Source(f"{SHARED_PREFIX}{s.name}", snapshot.shared[s.name], s.start, s.stop, until.get(s.name, Until.BOUNDARY))
        for s in slices
    ]
    return shared + [
        Source(f"{prefix}{name}", t, 0, t.numel(), until.get(name, Until.BOUNDARY))
        for name, t in snapshot.private.items()
    ]


class Staging:
    """The buffer of one rank; ``stage`` begins a copy into it, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._pinned else None  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()  # the saving thread may still make room when the first save is begun

    def reserve(self, nbytes: int) -> torch.Tensor:
        """Have at least ``nbytes``, and have touched them. Not while a copy in it is in use. Raises ``MemoryError``."""
        with self._lock:
            if self._buffer.numel() < nbytes:
                self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
                try:
                    self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned).fill_(0)
                except RuntimeError as error:  # so torch says it
                    raise MemoryError(f"no memory for a copy of {nbytes} bytes: {error}") from error
            return self._buffer

    def stage(self, sources: Sequence[Source]) -> Staged:
        """Lay out the copies of ``sources``, and make those that cannot wait. Raises ``StateError`` for a dtype that cannot be
        stored."""
        offsets, end = [], 0
        for source in sources:
            if source.tensor.dtype not in DTYPE_NAMES:
                raise StateError(f"{source.name}: dtype {source.tensor.dtype} cannot be stored")
            offsets.append(end)
            end += -(-_bytes(source) // _ALIGNMENT) * _ALIGNMENT
        staged = Staged(sources, offsets, self.reserve(end), self._stream)
        staged.copy(Until.BOUNDARY)
        staged.wait(Until.BOUNDARY)
        return staged

    def beside(self) -> AbstractContextManager[Any]:
        """Where live tensors are read while training goes on: on CUDA the copies' own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def size_of(sources: Sequence[Source]) -> int:
    """Bytes that staging these takes, at most."""
    return sum(_bytes(s) + _ALIGNMENT for s in sources)


class Staged:
    """Copies that are made kind by kind: ``copy`` makes one kind's, in any thread; ``wait`` waits for it, in any other."""

    def __init__(self, sources: Sequence[Source], offsets: Sequence[int], buffer: torch.Tensor, stream: Any) -> None:
        self._sources, self._offsets, self._buffer, self._stream = sources, offsets, buffer, stream
        self._copied = {until: threading.Event() for until in Until}
        self._marks: dict[Until, Any] = {}
        self._moves: dict[Until, list[_Move]] = {until: [] for until in Until}
        start = buffer.data_ptr()
        for number, (source, offset) in enumerate(zip(sources, offsets, strict=True)):
            self._moves[source.until].append(_move(number, source, start + offset))
        self.error: str | None = None

    def copy(self, until: Until) -> None:
        """Copy every source of this kind; ``error`` says what had changed before it was copied."""
        try:
            with self._queue(until):
                for number, version, target, origin, nbytes in self._moves[until]:
                    if origin:
                        _memmove(target, origin, nbytes)  # without the GIL, in little more than half of copy_'s time
                    elif nbytes:
                        self._copy(number)
                    if version is not None and self._sources[number].tensor._version != version:
                        self.error = self.error or _changed(self._sources[number])
                if self._stream is not None:
                    self._marks[until] = self._stream.record_event()
        finally:
            self._copied[until].set()

    def abandon(self) -> None:
        """Nothing more is copied: who waits for a copy waits in vain."""
        for copied in self._copied.values():
            copied.set()

    def wait(self, until: Until) -> None:
        """Until this kind may change. On CUDA the present stream waits, not the host."""
        copied = self._copied[until]
        if not copied.is_set():
            copied.wait()
        if (mark := self._marks.get(until)) is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def pieces(self) -> list[Piece]:
        """What is written, when all kinds are copied. The host waits for the device."""
        for mark in self._marks.values():
            mark.synchronize()
        whole = byte_view(self._buffer)
        return [
            Piece(
                s.name, DTYPE_NAMES[s.tensor.dtype], tuple(s.tensor.shape), s.start, whole[offset : offset + _bytes(s)]
            )
            for s, offset in zip(self._sources, self._offsets, strict=True)
        ]

    def parts(self) -> Iterator[tuple[Source, torch.Tensor]]:
        """Every source with its copy, flat and of its dtype."""
        for source, offset in zip(self._sources, self._offsets, strict=True):
            yield source, self._part(source, offset)

    def _part(self, source: Source, offset: int) -> torch.Tensor:
        return self._buffer[offset : offset + _bytes(source)].view(source.tensor.dtype)

    def _copy(self, number: int) -> None:
        source, tensor = self._sources[number], self._sources[number].tensor
        flat = (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)[source.start : source.stop]
        self._part(source, self._offsets[number]).copy_(flat, non_blocking=True)

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


class _Move(NamedTuple):
    """One copy. ``version``: torch's count when it was asked for; None: it is made at once. Addresses of contiguous memory of the
    host; ``origin`` 0: torch makes the copy."""

    number: int
    version: int | None
    target: int
    origin: int
    nbytes: int


_memmove = ctypes.memmove


def _move(number: int, source: Source, target: int) -> _Move:
    tensor = source.tensor
    counted = source.until is not Until.BOUNDARY and not tensor.is_inference()
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    origin = tensor.data_ptr() + source.start * tensor.element_size() if plain else 0
    return _Move(number, tensor._version if counted else None, target, origin, _bytes(source))


def _bytes(source: Source) -> int:
    return (source.stop - source.start) * source.tensor.element_size()


def _changed(source: Source) -> str:
    return (
        f"{source.name} was changed before it was copied, by something else than the backward pass or optimizer.step(): set "
        "checkpoint.staging to blocking, which copies everything before the next step begins"
    )
