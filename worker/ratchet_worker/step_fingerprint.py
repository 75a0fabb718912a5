"""A rank's fingerprint behind a step: a sample of its parameters, its generators, its position in the data.

The parameters are one line of bytes, cut into chunks once (``SamplePlan``); step s reads chunk s modulo their number K, so that
every element is read within K steps. The plan follows from shapes alone, so that all attempts of a job have the same. Memory on
the CPU is hashed where it lies (XXH3). On CUDA the chunk is reduced on the device, into two sums of its words by random odd
weights, which are copied to the host beside the next step; nothing waits for them.

Everything here is called by the loop's thread between two steps, so that no user code frees memory meanwhile. A step leaves the
caches full of its own data: what a fingerprint costs is how many functions and objects it touches, not the hashing. What a step
reads is therefore laid out beforehand.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from ratchet_contract.step_ring import RING_VERSION, StepFingerprint
from ratchet_worker.live_memory import address, live_bytes
from ratchet_worker.snapshot import flat

_LEAST_BYTES: Final = 32 << 10
_MOST_BYTES: Final = 512 << 10
_CHUNKS: Final = 1024
"""A chunk has so large a share of the parameters, within the two bounds: larger models have longer steps."""
_PIECES: Final = 4
"""Of different tensors in a chunk, at most: behind a step whatever is touched of each lies in no cache."""
_PENDING: Final = 64
"""Steps whose sums may be on their way from the device; beyond that the oldest is waited for."""
_ALIGNMENT: Final = 4
_EPOCH: Final = 1 << 40
"""More than the positions of an epoch."""
_WORD: Final = (1 << 64) - 1
_UNKNOWN: Final = -1
_MT19937: Final = ctypes.c_uint32 * 625
"""The Mersenne Twister's 624 words and the position among them, which numpy has behind them and Python before."""
_NO_MEMORY: Final = (RuntimeError, BufferError)
"""User code has freed or resized a storage, or given a parameter another kind of tensor: the fingerprint tells that it is so."""


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of parameter ``number``; ``buffer`` is the ctypes type of so many."""

    number: int
    start: int
    stop: int
    buffer: Any


class SamplePlan:
    """Which bytes of which parameters are read behind which step. ``chunks``: by step modulo their number. ``left_out``: numbers
    of parameters without memory of their own (sparse ones, subclasses that wrap other tensors)."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        readable = [n for n, p in enumerate(parameters) if p.numel() and address(p) and p.layout is torch.strided]
        self.left_out = sorted({n for n, p in enumerate(parameters) if p.numel()} - {*readable})
        self.sizes = [p.nbytes if n in readable else 0 for n, p in enumerate(parameters)]
        total = sum(self.sizes)
        self.chunk_bytes = min(max(total // _CHUNKS, _LEAST_BYTES), _MOST_BYTES) // _ALIGNMENT * _ALIGNMENT
        self.chunks: list[list[Piece]] = []
        room = pieces = 0
        for number in readable:
            size, start = self.sizes[number], 0
            while start < size:
                if room == 0 or pieces == 0:
                    self.chunks.append([])
                    room, pieces = self.chunk_bytes, _PIECES
                stop = min(size, start + room)
                self.chunks[-1].append(Piece(number, start, stop, ctypes.c_char * (stop - start)))
                # What follows begins at a multiple of the alignment, so that all words of a chunk are whole.
                room, pieces = (room - (stop - start)) // _ALIGNMENT * _ALIGNMENT, pieces - 1
                start = stop
        sizes = ([-(-(p.stop - p.start) // _ALIGNMENT) for p in chunk] for chunk in self.chunks)
        self.most_words = max(map(sum, sizes), default=0)
        forms = [(str(p.dtype), [*p.shape], [*p.stride()] if n in readable else None) for n, p in enumerate(parameters)]
        self.digest = xxh3_64_hexdigest(repr((RING_VERSION, forms, self.chunk_bytes, _PIECES)).encode())


class _Place(NamedTuple):
    """Where a piece lay when it was last looked at: ``begin`` of its tensor, or ``_UNKNOWN``, and ``memory``, its own bytes."""

    tensor: torch.Tensor
    begin: int
    memory: Any


class StepFingerprints:
    """Of one rank. ``parameters``: of the model, each once, in an order that is the same in every attempt."""

    def __init__(self, parameters: Sequence[torch.Tensor], device: torch.device, *, on_device: bool = False) -> None:
        """``on_device``: reduce there, as is done on CUDA in any case."""
        self.plan = SamplePlan(parameters)
        self._parameters, self._device = parameters, device
        self._dense = [_is_dense(p) for p in parameters]
        self._generators = Generators(device)
        on_device = on_device or device.type == "cuda"
        self._sums = DeviceSums(device, self.plan.most_words) if on_device else None
        here = {n for n, p in enumerate(parameters) if on_device and p.device.type == device.type}
        chunks = self.plan.chunks or [[]]
        self._on_device = [[piece for piece in chunk if piece.number in here] for chunk in chunks]
        self._on_host = [[piece for piece in chunk if piece.number not in here] for chunk in chunks]
        self._places = [[_Place(parameters[p.number], _UNKNOWN, None) for p in chunk] for chunk in self._on_host]
        self._pending: deque[tuple[int, int, int, int, _Sums]] = deque()
        self._drawn: int | None = None  # digest of the generators behind the newest step

    @property
    def has_drawn(self) -> bool:
        """Do generators stand elsewhere than behind the newest step?"""
        return self._drawn is not None and self._generators.digest() != self._drawn

    def take(self, step: int, position: tuple[int, int]) -> list[StepFingerprint]:
        """Make the fingerprint behind ``step``, whose ``position`` in the data is (epoch, place in it). Returns those that are
        there: of this step, or where they come from a device of the steps before."""
        epoch, place = position
        data, generators = (epoch * _EPOCH + place) & _WORD, self._generators.digest()
        on_host, self._drawn = self._host_digest(step % len(self._places)), generators
        if self._sums is None:
            return [StepFingerprint(step, on_host, generators, data)]
        on_device = self._device_bytes(self._on_device[step % len(self._on_device)])
        self._pending.append((step, on_host, generators, data, self._sums.begin(on_device)))
        return self._arrived(wait=len(self._pending) >= _PENDING)

    def rest(self) -> list[StepFingerprint]:
        """Those that are still on their way, waited for: the loop stands still anyway."""
        found: list[StepFingerprint] = []
        while self._pending:
            found += self._arrived(wait=True)
        return found

    def _arrived(self, *, wait: bool) -> list[StepFingerprint]:
        """``wait``: for the oldest of them."""
        found: list[StepFingerprint] = []
        while self._pending:
            step, on_host, generators, data, sums = self._pending[0]
            if not sums.there(wait=wait and not found):
                break
            self._pending.popleft()
            found.append(StepFingerprint(step, sums.digest(on_host), generators, data))
        return found

    def _host_digest(self, chunk: int) -> int:
        hasher = xxh3_64()
        for number, (tensor, begin, memory) in enumerate(self._places[chunk]):
            try:
                if tensor.data_ptr() == begin:  # a storage that is resized moves
                    hasher.update(memory)
                else:
                    hasher.update(self._found(chunk, number))
            except _NO_MEMORY:
                hasher.update(b"no memory")
        return hasher.intdigest()

    def _found(self, chunk: int, number: int) -> Any:
        """The bytes of a piece, whose place is noted for the next time."""
        tensor, *_ = self._places[chunk][number]
        parameter, start, stop, buffer = self._on_host[chunk][number]
        begin, memory = tensor.data_ptr(), None
        if begin and self._dense[parameter] and tensor.is_cpu and _reaches(tensor, self.plan.sizes[parameter]):
            memory = memoryview(buffer.from_address(begin + start)).cast("B")
        self._places[chunk][number] = _Place(tensor, _UNKNOWN if memory is None else begin, memory)
        return live_bytes(flat(tensor).cpu())[start:stop].data if memory is None else memory

    def _device_bytes(self, pieces: list[Piece]) -> list[torch.Tensor]:
        """Their bytes, in parts whose sizes are multiples of the alignment."""
        found: list[torch.Tensor] = []
        for number, start, stop, _ in pieces:
            tensor = self._parameters[number].detach()
            try:
                dense = self._dense[number] and _reaches(tensor, stop)
                line = tensor.as_strided((tensor.numel(),), (1,)) if dense else flat(tensor)
                found.append(line.view(torch.uint8)[start:stop])
            except _NO_MEMORY:
                continue
            if rest := -(stop - start) % _ALIGNMENT:
                found.append(torch.zeros(rest, dtype=torch.uint8, device=self._device))
        return found


class _Sums(NamedTuple):
    """On their way from the device. ``event`` None: they are there."""

    host: torch.Tensor
    event: Any

    def there(self, *, wait: bool) -> bool:
        if self.event is None or self.event.query():
            return True
        if wait:
            self.event.synchronize()
        return wait

    def digest(self, on_host: int) -> int:
        """``on_host``: of what was hashed there."""
        return xxh3_64_intdigest(struct.pack("<2qQ", *self.host.tolist(), on_host))


class DeviceSums:
    """Sums of 32-bit words by odd 64-bit weights, modulo 2^64: two words that differ in any way leave equal sums by chance only.
    Integer sums do not depend on their order."""

    def __init__(self, device: torch.device, most_words: int) -> None:
        numbers = random.Random(0).randbytes(
            2 * 8 * most_words
        )  # a generator of torch's may draw others in another version
        weights = (
            torch.frombuffer(bytearray(numbers), dtype=torch.int64) if most_words else torch.zeros(0, dtype=torch.int64)
        )
        self._weights = weights.bitwise_or(1).reshape(2, most_words).to(device)
        self._device = device

    def begin(self, pieces: list[torch.Tensor]) -> _Sums:
        """The sums of these bytes; a copy to the host is under way."""
        pinned = self._device.type == "cuda"
        host = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)
        if not pieces:
            return _Sums(host, None)
        words = torch.cat(pieces).view(torch.int32)
        sums = torch.mul(self._weights[:, : words.numel()], words).sum(1)
        host.copy_(sums, non_blocking=True)
        if not pinned:
            return _Sums(host, None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Sums(host, event)


class Generators:
    """Process-wide ones: torch on the CPU and on ``device``, numpy, ``random``. The last two are read where they lie: the ways
    to ask for their states make hundreds of numbers, which takes 25 us each behind a step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._torch_state = torch.default_generator.get_state
        self._torch_words = ctypes.c_char * self._torch_state().nbytes
        self._numpy_own: Any = np.random.mtrand._rand
        self._numpy: tuple[Any, Any] = (None, None)  # its bit generator, and where that has its words
        self._python_own: Any = random._inst
        self._python = _python_words()

    def digest(self) -> int:
        torch_state = self._torch_state()
        hasher = xxh3_64(self._torch_words.from_address(torch_state.data_ptr()))
        if self._cuda is not None:
            hasher.update(torch.cuda.get_rng_state(self._cuda).numpy().data)
        generator, words = self._numpy
        if self._numpy_own._bit_generator is not generator:
            words = self._numpy_words()
        # Without the half of a pair of normal numbers that may wait: it shows in the next draws.
        hasher.update(words)
        if self._python is None:
            hasher.update(repr(random.getstate()).encode())
        else:
            hasher.update(self._python)
            gauss = self._python_own.gauss_next
            if gauss is not None:  # the half of a pair that waits
                hasher.update(float(gauss).hex().encode())
        return hasher.intdigest()

    def _numpy_words(self) -> Any:
        generator = self._numpy_own._bit_generator
        if type(generator) is not np.random.MT19937:  # somebody gave numpy another one
            return repr(generator.state).encode()
        self._numpy = generator, memoryview(_MT19937.from_address(generator.ctypes.state_address)).cast("B")
        return self._numpy[1]


def _python_words() -> Any:
    """Python's own generator as it lies in memory; None where this Python keeps it otherwise."""
    inst, head = random._inst, object.__basicsize__
    if type(inst).__basicsize__ < head + ctypes.sizeof(_MT19937):
        return None
    view = _MT19937.from_address(id(inst) + head)
    place, *words = view
    return memoryview(view).cast("B") if (*words, place) == random.getstate()[1] else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements fill the memory from its address on without a gap, in whatever order? They are read in that order then."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _reaches(tensor: torch.Tensor, stop: int) -> bool:
    """Has it memory up to byte ``stop``? User code may have resized its storage, or given it another."""
    storage = tensor.untyped_storage()
    return storage.nbytes() >= tensor.storage_offset() * tensor.element_size() + stop
