"""Checks that replicas are still equal. Each rank writes only its own slice in a save, so every rank also computes digests of
parts that other ranks write, for a comparison on rank 0. If time is short, the parts take turns from save to save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import xxhash

from ratchet_store.format.shard_slices import Slice, plan_slices
from ratchet_worker.state.live_memory import LiveTensors, SafeReader, is_row_major, live_bytes, resized_error
from ratchet_worker.state.snapshot import Sizes, flat

_PARTS: Final = 64
_SMALL_PART: Final = 256 << 10  # bytes; with smaller parts the digests cost more than the hashed data
_PART_BYTES: Final = 16 << 20
_MIN_SHARE: Final = 64
"""At least one part in 64 is compared in every save, however little time there is."""
_MIN_COMPARED_BYTES: Final = 4 << 20


def number_of_parts(sizes: Sizes, world_size: int) -> int:
    """Return in how many parts shared tensors are compared: a multiple of ``world_size``, so that a rank writes whole parts."""
    total = total_bytes(sizes)
    parts = max(min(_PARTS, -(-total // _SMALL_PART)), -(-total // _PART_BYTES), 1)
    return world_size * -(-parts // world_size)


def total_bytes(sizes: Sizes) -> int:
    """Return the number of bytes of all tensors."""
    return sum(numel * itemsize for _, numel, itemsize in sizes)


def plan_parts(sizes: Sizes, parts: int) -> list[list[Slice]]:
    """Return, for each of ``parts`` parts of about the same size, the slices of tensors in it."""
    return plan_slices(sizes, parts)


class Cuts:
    """Caches the results of ``plan_parts`` for the last sizes, which mostly stay the same from save to save."""

    def __init__(self) -> None:
        self._sizes: Sizes | None = None
        self._plans: dict[int, list[list[Slice]]] = {}

    def plan(self, sizes: Sizes, parts: int) -> list[list[Slice]]:
        """Return ``plan_parts(sizes, parts)``; the same object as before if both arguments are equal to those before."""
        if sizes is not self._sizes and sizes != self._sizes:
            self._sizes, self._plans = sizes, {}
        if parts not in self._plans:
            self._plans[parts] = plan_parts(sizes, parts)
        return self._plans[parts]


def slice_digests(
    slices: Sequence[Slice], tensors: Mapping[str, torch.Tensor], reader: SafeReader | None = None
) -> list[str]:
    """Return the hex XXH3-128 of each slice of a part. ``reader``: for memory that user code may free meanwhile. Raises
    ``StateError`` for a live tensor changed since the boundary, or for freed memory."""
    out: list[str] = []
    for name, start, stop in slices:
        live = tensors if isinstance(tensors, LiveTensors) else None
        if live is not None:
            live.require_intact(name)
        try:
            out.append(_digest(tensors[name], start, stop, reader))
        except BufferError as error:
            raise resized_error(name) from error
        if live is not None:
            live.require_intact(name)
    return out


def _digest(tensor: torch.Tensor, start: int, stop: int, reader: SafeReader | None) -> str:
    """Return the hex XXH3-128 of elements ``start`` to ``stop`` of a tensor, row-major. Raises ``BufferError`` if the memory was
    freed."""
    hasher, size = xxhash.xxh3_128(), tensor.element_size()
    if not is_row_major(tensor):
        tensor = flat(tensor if reader is None or not tensor.is_cpu else reader.private_copy(tensor))[start:stop].cpu()
        start, stop, reader = 0, stop - start, None
    memory = live_bytes(tensor)[start * size : stop * size]
    for block in (memory,) if reader is None else reader.blocks(memory):
        hasher.update(block.data)
    return hasher.hexdigest()


def compare_parts(
    plan: Sequence[Sequence[Slice]],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    number: int,
    total: int,
    is_enough: Callable[[], bool],
    reader: SafeReader | None = None,
) -> dict[int, list[str]]:
    """Return, by part number, digests of parts that other ranks write. After a minimum number of parts, stop as soon as
    ``is_enough`` returns True. ``number``: the number of the save, which decides the first part. ``total``: bytes of all parts.
    Raises the errors of ``slice_digests``."""
    parts = len(plan)
    own = range(rank * parts // world_size, (rank + 1) * parts // world_size)
    others = [part for part in range(parts) if part not in own]
    least = max(-(-parts // _MIN_SHARE), -(-_MIN_COMPARED_BYTES * parts // max(total, 1)))
    out: dict[int, list[str]] = {}
    for done in range(len(others)):
        if done >= least and is_enough():
            break
        part = others[(number * least + done) % len(others)]
        out[part] = slice_digests(plan[part], tensors, reader)
    return out
