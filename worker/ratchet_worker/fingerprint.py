"""Are the replicas still equal? Digests of the shared state in parts, told beside every save and compared by rank 0.

Each rank writes its own slice alone, so nobody sees a whole replica in a save. Therefore every rank also makes digests of the
others' parts, of its live tensors, as long as these stay as they are anyway: while the next step computes, or before a stop.
Where there is no time for all of it the parts take turns from save to save; a share of them is always compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
import xxhash

from ratchet_store.slices import Slice, plan_slices
from ratchet_worker.live_memory import LiveTensors, SafeReader, is_row_major, live_bytes, resized
from ratchet_worker.snapshot import Sizes, flat

_PARTS: Final = 64
_SMALL_PART: Final = 256 << 10  # bytes; in smaller parts the digests cost more than what they are made of
_PART_BYTES: Final = 16 << 20
_LEAST: Final = 64
"""One part of so many is compared in every save, whatever time there is."""
_LEAST_BYTES: Final = 4 << 20


def number_of_parts(sizes: Sizes, world_size: int) -> int:
    """A multiple of ``world_size``, so that the cuts between ranks are cuts between parts, too."""
    total = nbytes_of(sizes)
    parts = max(min(_PARTS, -(-total // _SMALL_PART)), -(-total // _PART_BYTES), 1)
    return world_size * -(-parts // world_size)


def nbytes_of(sizes: Sizes) -> int:
    return sum(numel * itemsize for _, numel, itemsize in sizes)


def cut(sizes: Sizes, parts: int) -> list[list[Slice]]:
    """The slices of each part; one is cut out of the whole as a rank's slice is."""
    return plan_slices(sizes, parts)


class Cuts:
    """The plans of the sizes that were asked for last: from save to save they are the same."""

    def __init__(self) -> None:
        self._sizes: Sizes | None = None
        self._plans: dict[int, list[list[Slice]]] = {}

    def of(self, sizes: Sizes, parts: int) -> list[list[Slice]]:
        """As ``cut`` gives it."""
        if sizes is not self._sizes and sizes != self._sizes:
            self._sizes, self._plans = sizes, {}
        if parts not in self._plans:
            self._plans[parts] = cut(sizes, parts)
        return self._plans[parts]


def slice_digests(
    slices: Sequence[Slice], tensors: Mapping[str, torch.Tensor], reader: SafeReader | None = None
) -> list[str]:
    """XXH3-128 in hex of the bytes of each slice of a part, row-major. ``tensors``: of a snapshot. ``reader``: user code runs
    meanwhile, which may free their memory. Raises ``StateError`` for a tensor that was changed in place since the boundary, and
    for one whose storage was resized."""
    out: list[str] = []
    for name, start, stop in slices:
        live = tensors if isinstance(tensors, LiveTensors) else None
        if live is not None:
            live.require_intact(name)
        try:
            out.append(_digest(tensors[name], start, stop, reader))
        except BufferError as error:
            raise resized(name) from error
        if live is not None:
            live.require_intact(name)
    return out


def _digest(tensor: torch.Tensor, start: int, stop: int, reader: SafeReader | None) -> str:
    hasher, size = xxhash.xxh3_128(), tensor.element_size()
    if not is_row_major(tensor):
        tensor = flat(tensor if reader is None or not tensor.is_cpu else reader.private(tensor))[start:stop].cpu()
        start, stop, reader = 0, stop - start, None
    memory = live_bytes(tensor)[start * size : stop * size]
    for block in (memory,) if reader is None else reader.blocks(memory):
        hasher.update(block.data)
    return hasher.hexdigest()


def part_digest(slices: Sequence[str]) -> str:
    """Of a part, from those of its slices."""
    return xxhash.xxh3_128_hexdigest("".join(slices).encode())


def compared(
    plan: Sequence[Sequence[Slice]],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    world_size: int,
    number: int,
    total: int,
    enough: Callable[[], bool],
    reader: SafeReader | None = None,
) -> dict[int, list[str]]:
    """Slices' digests of other ranks' parts, by the part's number: all of them, or from the time when ``enough`` says so no more
    than the least. ``number``: of the save; where to begin follows from it. ``total``: bytes of all parts. ``reader``: as
    ``slice_digests`` has it."""
    parts = len(plan)
    own = range(rank * parts // world_size, (rank + 1) * parts // world_size)
    others = [part for part in range(parts) if part not in own]
    least = max(-(-parts // _LEAST), -(-_LEAST_BYTES * parts // max(total, 1)))
    out: dict[int, list[str]] = {}
    for done in range(len(others)):
        if done >= least and enough():
            break
        part = others[(number * least + done) % len(others)]
        out[part] = slice_digests(plan[part], tensors, reader)
    return out


class Difference(NamedTuple):
    """The first slice of a part that some ranks have otherwise than the rank that writes it."""

    part: int
    slice: int
    ranks: list[int]


def first_difference(own: Sequence[Sequence[str]], seen: Sequence[Mapping[str, Sequence[str]]]) -> Difference | None:
    """``own``: of all parts, by those who write them; ``seen``: what each rank made of others' parts, by the part's number as
    JSON has it."""
    odd: dict[tuple[int, int], list[int]] = {}
    for rank, found in enumerate(seen):
        for part, digests in found.items():
            for number, (digest, right) in enumerate(zip(digests, own[int(part)], strict=True)):
                if digest != right:
                    odd.setdefault((int(part), number), []).append(rank)
    return min((Difference(part, number, ranks) for (part, number), ranks in odd.items()), default=None)
