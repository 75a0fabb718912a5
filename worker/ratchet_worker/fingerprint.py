"""Are the replicas still equal? Digests of the shared state in parts, told beside every save and compared by rank 0.

Each rank writes its own slice alone, so nobody sees a whole replica in a save. Therefore every rank also makes digests of the
others' parts, of its live tensors, as long as these stay as they are anyway: while the next step computes, or before a stop.
Where there is no time for all of it the parts take turns from save to save; a share of them is always compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import xxhash

from ratchet_store.slices import Slice, plan_slices
from ratchet_worker.snapshot import byte_view

_PARTS: Final = 64
_PART_BYTES: Final = 16 << 20
_LEAST: Final = 64
"""One part of so many is compared in every save, whatever time there is."""
_LEAST_BYTES: Final = 4 << 20

Sizes = Sequence[tuple[str, int, int]]


def number_of_parts(sizes: Sizes, world_size: int) -> int:
    """A multiple of ``world_size``, so that the cuts between ranks are cuts between parts, too."""
    total = sum(numel * itemsize for _, numel, itemsize in sizes)
    return world_size * -(-max(_PARTS, -(-total // _PART_BYTES)) // world_size)


def cut(sizes: Sizes, parts: int) -> list[list[Slice]]:
    """The slices of each part; one is cut out of the whole as a rank's slice is."""
    return plan_slices(sizes, parts)


def part_digest(slices: Sequence[Slice], tensors: Mapping[str, torch.Tensor]) -> str:
    """XXH3-128 in hex of a part's bytes, row-major, in the plan's order."""
    hasher = xxhash.xxh3_128()
    for name, start, stop in slices:
        flat = tensors[name].detach().contiguous().reshape(-1)[start:stop]
        hasher.update(byte_view(flat.cpu()))
    return hasher.hexdigest()


def copied_digest(slices: Sequence[Slice], copies: Mapping[str, tuple[int, torch.Tensor]]) -> str:
    """The same of copies: by name the first element that was copied, and the flat copy."""
    hasher = xxhash.xxh3_128()
    for name, start, stop in slices:
        first, copy = copies[name]
        hasher.update(byte_view(copy[start - first : stop - first]))
    return hasher.hexdigest()


def compared(
    plan: Sequence[Sequence[Slice]],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    number: int,
    enough: Callable[[], bool],
) -> dict[int, str]:
    """Digests of other ranks' parts, by the part's number: all of them, or from the time when ``enough`` says so no more than the
    least. ``number``: of the save; where to begin follows from it, the same on all ranks."""
    parts = len(plan)
    own = range(rank * parts // world_size, (rank + 1) * parts // world_size)
    others = [part for part in range(parts) if part not in own]
    total = sum((s.stop - s.start) * tensors[s.name].element_size() for part in plan for s in part)
    least = max(-(-parts // _LEAST), -(-_LEAST_BYTES * parts // max(total, 1)))
    out: dict[int, str] = {}
    for done in range(len(others)):
        if done >= least and enough():
            break
        part = others[(number * least + done) % len(others)]
        out[part] = part_digest(plan[part], tensors)
    return out


def differing(own: Sequence[str], seen: Sequence[Mapping[str, str]]) -> dict[int, list[int]]:
    """Ranks by part, where they do not have what the part's owner has. ``own``: the owners' digests of all parts; ``seen``: what
    each rank made of others' parts, by the part's number as JSON has it."""
    out: dict[int, list[int]] = {}
    for rank, found in enumerate(seen):
        for part, digest in found.items():
            if own[int(part)] != digest:
                out.setdefault(int(part), []).append(rank)
    return dict(sorted(out.items()))
