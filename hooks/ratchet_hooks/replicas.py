"""One replica out of many that differ, as they do under post_localSGD between two averagings, or under noop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ratchet_hooks.codec import Tensors
from ratchet_hooks.errors import HookStateError


def mean_of_replicas(replicas: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """The mean of every tensor over the replicas, in rank order: added up in float64 (complex128), divided, cast back.

    For parameters, and for an optimizer's tensors as well. Tensors that are equal on all ranks are taken as they are, whatever
    their dtype. The results are copies. Raises ``HookStateError`` naming a tensor that is not in all replicas, has other
    shapes or dtypes, or differs without having a mean (integers, bools).
    """
    if not replicas:
        raise HookStateError("replicas", "at least one is needed")
    first = replicas[0]
    for rank, replica in enumerate(replicas):
        if odd := set(replica) ^ set(first):
            raise HookStateError(min(odd), f"not in the replicas of both rank 0 and rank {rank}")
    return {name: mean_of([replica[name] for replica in replicas], name) for name in first}


def mean_of(parts: Sequence[torch.Tensor], name: str = "tensor") -> torch.Tensor:
    """The same for one tensor; ``name`` is for the error."""
    first = parts[0]
    for rank, part in enumerate(parts):
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            was, now = (f"{t.dtype} {list(t.shape)}" for t in (first, part))
            raise HookStateError(name, f"{was} on rank 0, {now} on rank {rank}")
    if all(torch.equal(part, first) for part in parts):
        return first.clone()
    if not (first.is_floating_point() or first.is_complex()):
        raise HookStateError(name, f"differs between ranks, and {first.dtype} has no mean")
    total = first.to(torch.promote_types(first.dtype, torch.float64))
    for part in parts[1:]:
        total = total + part
    return (total / len(parts)).to(first.dtype)
