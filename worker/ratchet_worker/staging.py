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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from ratchet_contract.errors import StateError
from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_store.rankfile import Piece
from ratchet_store.slices import Slice
from ratchet_worker.snapshot import DTYPE_NAMES, Snapshot, Until, byte_view

_ALIGNMENT: Final = 64  # bytes: a cache line
_SMALL: Final = 4096  # bytes; below it torch's own copy costs less than finding addresses


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

    def reserve(self, nbytes: int) -> None:
        """Have at least ``nbytes``, and have touched them. Not while a copy in it is in use."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned).fill_(0)

    def stage(self, sources: Sequence[Source]) -> Staged:
        """Lay out the copies of ``sources``, and make those that cannot wait. Raises ``StateError`` for a dtype that cannot be
        stored."""
        offsets, end = [], 0
        for source in sources:
            if source.tensor.dtype not in DTYPE_NAMES:
                raise StateError(f"{source.name}: dtype {source.tensor.dtype} cannot be stored")
            offsets.append(end)
            nbytes = (source.stop - source.start) * source.tensor.element_size()
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.reserve(end)
        staged = Staged(sources, offsets, self._buffer, self._stream)
        staged.copy(Until.BOUNDARY)
        return staged


def size_of(sources: Sequence[Source]) -> int:
    """Bytes that staging these takes, at most."""
    return sum((s.stop - s.start) * s.tensor.element_size() + _ALIGNMENT for s in sources)


class Staged:
    """Copies that are made kind by kind: ``copy`` makes one kind's, in any thread; ``wait`` waits for it, in any other."""

    def __init__(self, sources: Sequence[Source], offsets: Sequence[int], buffer: torch.Tensor, stream: Any) -> None:
        self._sources, self._offsets, self._buffer, self._stream = sources, offsets, buffer, stream
        self._copied = {until: threading.Event() for until in Until}
        self._marks: dict[Until, Any] = {}
        self._versions = [_version(s.tensor) if s.until is not Until.BOUNDARY else None for s in sources]
        self.error: str | None = None

    def copy(self, until: Until) -> None:
        """Copy every source of this kind; ``error`` says what had changed before it was copied."""
        try:
            with self._queue(until):
                for source, offset, version in zip(self._sources, self._offsets, self._versions, strict=True):
                    if source.until is until:
                        self._copy(source, offset)
                        if version is not None and _version(source.tensor) != version:
                            self.error = self.error or _changed(source)
                if self._stream is not None:
                    self._marks[until] = self._stream.record_event()
        finally:
            self._copied[until].set()

    def wait(self, until: Until) -> float:
        """Until this kind may change; returns the seconds that it took. On CUDA the present stream waits, not the host."""
        copied, begun = self._copied[until], time.perf_counter()
        if not copied.is_set():
            copied.wait()
        if (mark := self._marks.get(until)) is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)
        return time.perf_counter() - begun

    def pieces(self) -> list[Piece]:
        """What is written, when all kinds are copied. The host waits for the device."""
        for mark in self._marks.values():
            mark.synchronize()
        return [
            Piece(
                source.name, DTYPE_NAMES[source.tensor.dtype], tuple(source.tensor.shape), source.start, byte_view(part)
            )
            for source, part in self.parts()
        ]

    def parts(self) -> Iterator[tuple[Source, torch.Tensor]]:
        """Every source with its copy, flat and of its dtype."""
        for source, offset in zip(self._sources, self._offsets, strict=True):
            yield source, self._part(source, offset)

    def _part(self, source: Source, offset: int) -> torch.Tensor:
        nbytes = (source.stop - source.start) * source.tensor.element_size()
        return self._buffer[offset : offset + nbytes].view(source.tensor.dtype)

    def _copy(self, source: Source, offset: int) -> None:
        tensor = source.tensor
        flat = (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)[source.start : source.stop]
        target = self._part(source, offset)
        nbytes = target.numel() * target.element_size()
        if tensor.device.type == "cpu" and nbytes >= _SMALL:
            # Without the GIL, and with stores that pass the cache by: little more than half of copy_'s time.
            ctypes.memmove(target.data_ptr(), flat.data_ptr(), nbytes)
        else:
            target.copy_(flat, non_blocking=True)

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


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _changed(source: Source) -> str:
    where = "its backward pass had ended" if source.until is Until.BACKWARD else "the optimizer's step"
    return (
        f"{source.name} was changed while it was being copied, before {where}: set checkpoint.staging to blocking, which copies "
        "everything before the next step begins"
    )
