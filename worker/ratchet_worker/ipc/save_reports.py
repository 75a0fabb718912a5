"""What is computed from all ranks' reports on a save, by rank 0 or, for copies in memory, by the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from ratchet_contract.checkpoint.manifest import HOOK_SUMMARY, FileEntry, Manifest, TensorEntry


def complete(draft: Manifest, reports: Sequence[Mapping[str, Any]], tensors: list[TensorEntry]) -> Manifest:
    """Return the manifest ``draft`` with what all ranks have reported. ``tensors``: the entries of all ranks' files."""
    return draft.model_copy(
        update={
            "shared_digests": [part_digest(slices) for report in reports for slices in report["parts"]],
            "hook_summaries": [HOOK_SUMMARY.validate_json(r["summary"]) for r in reports],
            "environment": draft.environment | next((r["not_exact"] for r in reports if r["not_exact"]), {}),
            "files": [FileEntry.model_validate(r["file"]) for r in reports],
            "tensors": tensors,
        }
    )


def part_digest(slices: Sequence[str]) -> str:
    """Return the digest of a part. ``slices``: the digests of its slices."""
    return xxhash.xxh3_128_hexdigest("".join(slices).encode())


class Difference(NamedTuple):
    """The first slice in which some ranks differ from the rank that writes its part. ``ranks``: those that differ."""

    part: int
    slice: int
    ranks: list[int]


def first_difference(
    writer_digests: Sequence[Sequence[str]], other_digests: Sequence[Mapping[str, Sequence[str]]]
) -> Difference | None:
    """Return the difference with the lowest part and slice; None if there is none. ``other_digests``: by rank, then by part
    number as text."""
    odd: dict[tuple[int, int], list[int]] = {}
    for rank, found in enumerate(other_digests):
        for part, digests in found.items():
            for number, (digest, right) in enumerate(zip(digests, writer_digests[int(part)], strict=True)):
                if digest != right:
                    odd.setdefault((int(part), number), []).append(rank)
    return min((Difference(part, number, ranks) for (part, number), ranks in odd.items()), default=None)
