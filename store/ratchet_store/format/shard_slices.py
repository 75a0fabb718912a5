"""Which elements of the shared tensors each rank writes: about 1/N of all bytes, each element once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Slice(NamedTuple):
    """Elements ``start <= i < stop`` (row-major) of the tensor ``name``. Equal bounds only for a tensor without elements."""

    name: str
    start: int
    stop: int


def plan_slices(sizes: Sequence[tuple[str, int, int]], world_size: int) -> list[list[Slice]]:
    """Return, for each rank, the slices that it writes: about an equal part of all bytes, in the given order. ``sizes``: name,
    number of elements and bytes per element of each tensor. Raise ``ValueError`` for invalid arguments."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if len({name for name, _, _ in sizes}) != len(sizes):
        raise ValueError("tensor names must be distinct")
    if any(numel < 0 or itemsize < 1 for _, numel, itemsize in sizes):
        raise ValueError("a tensor has numel >= 0 and itemsize >= 1")
    # a pure function: ranks that hold the same tensors need not communicate
    total = sum(numel * itemsize for _, numel, itemsize in sizes)
    bounds = [total * rank // world_size for rank in range(world_size)]  # first byte of each rank
    plan: list[list[Slice]] = [[] for _ in range(world_size)]
    position = 0
    for name, numel, itemsize in sizes:
        first = max(bisect_right(bounds, position) - 1, 0) if total else 0
        if numel == 0:
            plan[first].append(Slice(name, 0, 0))
            continue
        end = position + numel * itemsize
        start = 0
        for rank in range(first, world_size):
            last = rank + 1 == world_size or bounds[rank + 1] >= end
            stop = numel if last else (bounds[rank + 1] - position) // itemsize
            if stop > start:
                plan[rank].append(Slice(name, start, stop))
                start = stop
            if last:
                break
        position = end
    return plan
