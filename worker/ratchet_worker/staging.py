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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from ratchet_contract.errors import StateError
from ratchet_store.rankfile import Piece
from ratchet_worker.fingerprint import Copy
from ratchet_worker.snapshot import DTYPE_NAMES, Until, byte_view, is_plain
from ratchet_worker.sources import Source, Sources

_ALIGNMENT: Final = 64  # bytes: a cache line


class Staging:
    """The buffer of one rank; ``stage`` begins a copy into it, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._pinned else None  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._form: object = None  # of the layout
        self._layout = _Layout([])
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

    def stage(self, sources: Sources) -> Staged:
        """Lay out the copies of ``sources``, and make those that cannot wait. Raises ``StateError`` for a dtype that cannot be
        stored."""
        if sources.form is None or sources.form is not self._form:
            self._form, self._layout = None, _Layout(sources.each)
            self._form = sources.form
        staged = Staged(sources.each, self._layout, self.reserve(self._layout.end), self._stream)
        staged.copy(Until.BOUNDARY)
        staged.wait(Until.BOUNDARY)
        return staged

    def beside(self) -> AbstractContextManager[Any]:
        """Where live tensors are read while training goes on: on CUDA the copies' own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def size_of(sources: Sources) -> int:
    """Bytes that staging these takes."""
    return _Layout(sources.each).end


class _Layout:
    """Where in the buffer the copies of such sources lie; what follows from their shapes and dtypes alone."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.offsets: list[int] = []
        self.sizes = [source.nbytes for source in sources]
        self.end = 0
        for source, nbytes in zip(sources, self.sizes, strict=True):
            if source.tensor.dtype not in DTYPE_NAMES:
                raise StateError(f"{source.name}: dtype {source.tensor.dtype} cannot be stored")
            self.offsets.append(self.end)
            self.end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.kinds: dict[Until, list[int]] = {until: [] for until in Until}
        for number, source in enumerate(sources):
            self.kinds[source.until].append(number)
        self.skipped = [source.start * source.tensor.element_size() for source in sources]  # bytes of the tensor
        self._pieces: list[Piece] = []
        self._copies: dict[str, dict[str, Copy]] = {}
        self._buffer: torch.Tensor | None = None  # theirs

    def pieces(self, sources: Sequence[Source], buffer: torch.Tensor) -> list[Piece]:
        """The same list for the same buffer: what has changed is in the bytes alone. To be asked first by one thread alone."""
        if self._buffer is not buffer:
            whole = byte_view(buffer)
            self._pieces = [
                Piece(
                    s.name, DTYPE_NAMES[s.tensor.dtype], tuple(s.tensor.shape), s.start, whole[offset : offset + size]
                )
                for s, offset, size in zip(sources, self.offsets, self.sizes, strict=True)
            ]
            self._buffer, self._copies = buffer, {}
        return self._pieces

    def copies(self, sources: Sequence[Source], pieces: Sequence[Piece], prefix: str) -> Mapping[str, Copy]:
        if prefix not in self._copies:
            self._copies[prefix] = {
                s.name.removeprefix(prefix): Copy(s.start, s.tensor.element_size(), piece.data)
                for s, piece in zip(sources, pieces, strict=True)
                if s.name.startswith(prefix)
            }
        return self._copies[prefix]


class Staged:
    """Copies that are made kind by kind: ``copy`` makes one kind's, in any thread; ``wait`` waits for it, in any other."""

    def __init__(self, sources: Sequence[Source], layout: _Layout, buffer: torch.Tensor, stream: Any) -> None:
        self._sources, self._layout, self._buffer, self._stream = sources, layout, buffer, stream
        self._copied = {until: threading.Event() for until in Until}
        self._marks: dict[Until, Any] = {}
        self._moves = {until: self._moves_of(until) for until in Until}
        self.error: str | None = None

    def _moves_of(self, until: Until) -> list[_Move]:
        start, layout, counts = self._buffer.data_ptr(), self._layout, until is not Until.BOUNDARY
        moves: list[_Move] = []
        for number in layout.kinds[until]:
            tensor = self._sources[number].tensor
            plain = is_plain(tensor)
            version = tensor._version if counts and not tensor.is_inference() else None
            origin = tensor.data_ptr() + layout.skipped[number] if plain else 0
            moves.append((number, version, start + layout.offsets[number], origin, layout.sizes[number]))
        return moves

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
        return self._layout.pieces(self._sources, self._buffer)

    def copies(self, prefix: str) -> Mapping[str, Copy]:
        """Of the sources whose names begin so, by the rest of the name."""
        return self._layout.copies(self._sources, self.pieces(), prefix)

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """The same, flat and of their dtypes."""
        found = enumerate(self._sources)
        return {s.name.removeprefix(prefix): self._part(number) for number, s in found if s.name.startswith(prefix)}

    def _part(self, number: int) -> torch.Tensor:
        offset = self._layout.offsets[number]
        return self._buffer[offset : offset + self._layout.sizes[number]].view(self._sources[number].tensor.dtype)

    def _copy(self, number: int) -> None:
        source, tensor = self._sources[number], self._sources[number].tensor.detach()
        flat = (tensor if tensor.is_contiguous() else tensor.contiguous()).view(-1)[source.start : source.stop]
        self._part(number).copy_(flat, non_blocking=True)

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


_Move = tuple[int, int | None, int, int, int]
"""One copy: the source's number; torch's count of changes when it was asked for, or None where it is made at once; addresses to
and from in contiguous memory of the host (from 0: torch makes the copy); bytes."""

_memmove = ctypes.memmove


def _changed(source: Source) -> str:
    return (
        f"{source.name} was changed before it was copied, by something else than the backward pass or optimizer.step(): set "
        "checkpoint.staging to blocking, which copies everything before the next step begins"
    )
