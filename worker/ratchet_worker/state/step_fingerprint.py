"""A rank's fingerprint after a step: digests of a sample of its parameters, of process-wide generators and of its data position.
Step s reads chunk s of the parameters' bytes, modulo the number of chunks."""

from __future__ import annotations

import ctypes
import random
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from xxhash import xxh3_64, xxh3_64_hexdigest, xxh3_64_intdigest

from ratchet_contract.checkpoint.step_ring import RING_VERSION, StepFingerprint
from ratchet_worker.state.generator_memory import GeneratorMemory
from ratchet_worker.state.live_memory import address, live_bytes
from ratchet_worker.state.snapshot import flat

_MIN_CHUNK_BYTES: Final = 32 << 10
_MAX_CHUNK_BYTES: Final = 512 << 10
_CHUNKS: Final = 1024
"""A chunk is this share (1/1024) of the parameters, within the two bounds: larger models have longer steps."""
_MAX_PIECES: Final = 4
"""Largest number of pieces, of different tensors, in a chunk: after a step, nothing that is read of a tensor is in a cache."""
_MAX_PENDING: Final = 64
"""From this many steps on whose sums are in transit from the device, the oldest is waited for."""
_ALIGNMENT: Final = 4
_EPOCH: Final = 1 << 40
"""More than the positions of an epoch."""
_WORD: Final = (1 << 64) - 1
_UNKNOWN: Final = -1
_NO_MEMORY: Final = (RuntimeError, BufferError)
"""Raised if user code has freed or resized a storage, or given a parameter another kind of tensor: the fingerprint records
that."""


class Piece(NamedTuple):
    """A part of a chunk: bytes ``start`` to ``stop`` of parameter ``number``. ``buffer``: the ctypes array type of that size."""

    number: int
    start: int
    stop: int
    buffer: Any


class SamplePlan:
    """Which bytes of the parameters are read: step ``s`` reads chunk ``s`` modulo their number. ``unreadable``: numbers of
    parameters with elements but no memory of their own. ``sizes``: bytes by parameter, 0 if it is not read."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        readable = [n for n, p in enumerate(parameters) if p.numel() and address(p) and p.layout is torch.strided]
        self.unreadable = sorted({n for n, p in enumerate(parameters) if p.numel()} - {*readable})
        self.sizes = [p.nbytes if n in readable else 0 for n, p in enumerate(parameters)]
        total = sum(self.sizes)
        self.chunk_bytes = min(max(total // _CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES) // _ALIGNMENT * _ALIGNMENT
        self.chunks: list[list[Piece]] = []
        room = pieces = 0
        for number in readable:
            size, start = self.sizes[number], 0
            while start < size:
                if room == 0 or pieces == 0:
                    self.chunks.append([])
                    room, pieces = self.chunk_bytes, _MAX_PIECES
                stop = min(size, start + room)
                self.chunks[-1].append(Piece(number, start, stop, ctypes.c_char * (stop - start)))
                # The next piece begins at a multiple of the alignment, so that all words of a chunk are whole.
                room, pieces = (room - (stop - start)) // _ALIGNMENT * _ALIGNMENT, pieces - 1
                start = stop
        sizes = ([-(-(p.stop - p.start) // _ALIGNMENT) for p in chunk] for chunk in self.chunks)
        self.max_words = max(map(sum, sizes), default=0)
        forms = [(str(p.dtype), [*p.shape], [*p.stride()] if n in readable else None) for n, p in enumerate(parameters)]
        self.digest = xxh3_64_hexdigest(repr((RING_VERSION, forms, self.chunk_bytes, _MAX_PIECES)).encode())


class _Place(NamedTuple):
    """The last known place of a piece. ``begin``: its tensor's address. ``memory``: its bytes, None if the place is unknown."""

    tensor: torch.Tensor
    begin: int
    storage_bytes: int
    memory: Any


class StepFingerprints:
    """Makes one rank's fingerprints, one after each step. ``parameters``: the model's, each once, in the same order in every
    attempt."""

    def __init__(self, parameters: Sequence[torch.Tensor], device: torch.device, *, on_device: bool = False) -> None:
        """``on_device``: sum up the sampled parameters on the device also if it is not CUDA."""
        self.plan = SamplePlan(parameters)
        self._parameters, self._device = parameters, device
        self._dense = [_is_dense(p) for p in parameters]
        self._generators = Generators(device)
        on_device = on_device or device.type == "cuda"
        self._sums = DeviceSums(device, self.plan.max_words) if on_device else None
        here = {n for n, p in enumerate(parameters) if on_device and p.device.type == device.type}
        chunks = self.plan.chunks or [[]]
        self._on_device = [[piece for piece in chunk if piece.number in here] for chunk in chunks]
        self._on_host = [[piece for piece in chunk if piece.number not in here] for chunk in chunks]
        self._places = [[_Place(parameters[p.number], _UNKNOWN, 0, None) for p in chunk] for chunk in self._on_host]
        self._pending: deque[tuple[int, int, int, int, _Sums]] = deque()
        self._generators_digest: int | None = None  # digest of the generators after the newest step

    @property
    def has_drawn(self) -> bool:
        """True if the digest of the process-wide generators differs from that after the newest recorded step; False before the
        first. Taking the normal number that numpy has cached does not change the digest."""
        return self._generators_digest is not None and self._generators.digest() != self._generators_digest

    def record_step(self, step: int, position: tuple[int, int]) -> list[StepFingerprint]:
        """Begin the fingerprint after ``step``; return those that are complete now, perhaps of earlier steps. ``position``:
        (epoch, place in it)."""
        epoch, place = position
        data, generators = (epoch * _EPOCH + place) & _WORD, self._generators.digest()
        on_host, self._generators_digest = self._host_digest(step % len(self._places)), generators
        if self._sums is None:
            return [StepFingerprint(step, on_host, generators, data)]
        on_device = self._device_bytes(self._on_device[step % len(self._on_device)])
        self._pending.append((step, on_host, generators, data, self._sums.begin(on_device)))
        return self._collect_arrived(wait=len(self._pending) >= _MAX_PENDING)

    def drain(self) -> list[StepFingerprint]:
        """Wait for the fingerprints that are still in transit from the device, and return them, oldest first."""
        found: list[StepFingerprint] = []
        while self._pending:
            found += self._collect_arrived(wait=True)
        return found

    def _collect_arrived(self, *, wait: bool) -> list[StepFingerprint]:
        """Return the pending fingerprints that have arrived, oldest first. ``wait``: wait for the oldest of them."""
        found: list[StepFingerprint] = []
        while self._pending:
            step, on_host, generators, data, sums = self._pending[0]
            if not sums.has_arrived(wait=wait and not found):
                break
            self._pending.popleft()
            found.append(StepFingerprint(step, sums.digest(on_host), generators, data))
        return found

    def _host_digest(self, chunk: int) -> int:
        """Return the digest of those pieces of a chunk that are read on the host."""
        hasher = xxh3_64()
        for number, (tensor, begin, storage_bytes, memory) in enumerate(self._places[chunk]):
            try:
                # A storage that was freed and allocated again, in another size, may have the same address.
                if tensor.data_ptr() == begin and tensor.untyped_storage().nbytes() == storage_bytes:
                    hasher.update(memory)
                else:
                    hasher.update(self._locate(chunk, number))
            except _NO_MEMORY:
                hasher.update(b"no memory")
        return hasher.intdigest()

    def _locate(self, chunk: int, number: int) -> Any:
        """Return the bytes of a piece, and remember their place in memory if possible. Raises one of ``_NO_MEMORY``."""
        tensor, *_ = self._places[chunk][number]
        parameter, start, stop, buffer = self._on_host[chunk][number]
        begin, storage_bytes, memory = tensor.data_ptr(), tensor.untyped_storage().nbytes(), None
        if begin and self._dense[parameter] and tensor.is_cpu and _has_memory_to(tensor, self.plan.sizes[parameter]):
            memory = memoryview(buffer.from_address(begin + start)).cast("B")
        self._places[chunk][number] = _Place(tensor, _UNKNOWN if memory is None else begin, storage_bytes, memory)
        return live_bytes(_flat(tensor).cpu())[start:stop].data if memory is None else memory

    def _device_bytes(self, pieces: list[Piece]) -> list[torch.Tensor]:
        """Return the bytes of ``pieces`` on the device, padded with zeros, without parameters that have no memory."""
        found: list[torch.Tensor] = []
        for number, start, stop, _ in pieces:
            tensor = self._parameters[number].detach()
            try:
                dense = self._dense[number] and _has_memory_to(tensor, stop)
                line = tensor.as_strided((tensor.numel(),), (1,)) if dense else _flat(tensor)
                found.append(line.view(torch.uint8)[start:stop])
            except _NO_MEMORY:
                continue
            if rest := -(stop - start) % _ALIGNMENT:
                found.append(torch.zeros(rest, dtype=torch.uint8, device=self._device))
        return found


class _Sums(NamedTuple):
    """Two sums in transit from the device to ``host``. ``event``: CUDA's event after their copy; None: they have arrived."""

    host: torch.Tensor
    event: Any

    def has_arrived(self, *, wait: bool) -> bool:
        """True if the sums have arrived. ``wait``: wait for them, and return True."""
        if self.event is None or self.event.query():
            return True
        if wait:
            self.event.synchronize()
        return wait

    def digest(self, on_host: int) -> int:
        """Return the digest of the sums and ``on_host``, the digest of what was hashed on the host."""
        return xxh3_64_intdigest(struct.pack("<2qQ", *self.host.tolist(), on_host))


class DeviceSums:
    """Computes two sums of 32-bit words with odd 64-bit weights, modulo 2^64, which are the same in any order of addition."""

    def __init__(self, device: torch.device, max_words: int) -> None:
        numbers = random.Random(0).randbytes(
            2 * 8 * max_words
        )  # torch's generator may return other numbers in another version
        weights = (
            torch.frombuffer(bytearray(numbers), dtype=torch.int64) if max_words else torch.zeros(0, dtype=torch.int64)
        )
        self._weights = weights.bitwise_or(1).reshape(2, max_words).to(device)
        self._device = device

    def begin(self, pieces: list[torch.Tensor]) -> _Sums:
        """Compute the sums of the bytes in ``pieces`` (uint8, in all a multiple of 4), and begin to copy them to the host."""
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
    """Digests the process-wide generators: torch on the CPU and on ``device``, numpy, ``random``."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._torch_state = torch.default_generator.get_state
        self._torch_words = ctypes.c_char * self._torch_state().nbytes
        self._memory = GeneratorMemory()

    def digest(self) -> int:
        """Return a 64-bit digest of the generators' current states, without the normal number that numpy may have cached."""
        torch_state, memory = self._torch_state(), self._memory
        hasher = xxh3_64(self._torch_words.from_address(torch_state.data_ptr()))
        if self._cuda is not None:
            hasher.update(torch.cuda.get_rng_state(self._cuda).numpy().data)
        # Without numpy's cached second half of a pair of normal numbers: it shows in the next draws.
        hasher.update(memory.numpy_words())
        if memory.python_words is None:
            hasher.update(repr(random.getstate()).encode())
        else:
            hasher.update(memory.python_words)
            if (half := memory.python_half) is not None:
                hasher.update(float(half).hex().encode())
        return hasher.intdigest()


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor's elements fill the memory from its address on without a gap, in any order."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return what ``flat`` returns. Raises ``BufferError`` if the storage is too small: torch would read beyond it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and not _has_memory_to(tensor, extent * tensor.element_size()):
        raise BufferError("the storage is too small for the tensor")
    return flat(tensor)


def _has_memory_to(tensor: torch.Tensor, stop: int) -> bool:
    """True if the tensor has memory up to its byte ``stop``: user code may have resized its storage."""
    storage = tensor.untyped_storage()
    return storage.nbytes() >= tensor.storage_offset() * tensor.element_size() + stop
