"""Averages, over the ranks of a checkpoint, state that differs between them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.algorithms.state_version import same_bits
from ratchet_worker.state.snapshot import Snapshot, Tensors

_ITEM = re.compile(r"(.*)\[(\d+)\]")
_KEY = re.compile(r"(?:\['([^']*)'\]|[./](\w+))$")
"""Patterns for the names that ``ratchet_hooks.state.encode`` makes (``user:average/shadow['0.weight']``): an item of a list, and
the last key."""


@dataclass
class Mean:
    """The mean of several replicas. ``differing_names``: names of the tensors that differed between ranks. ``from_rank_0``: names
    of tensors and components that differed but cannot be averaged, so rank 0's value is used."""

    tensors: Tensors
    state: dict[str, Any]
    differing_names: set[str] = field(default_factory=set)
    from_rank_0: list[str] = field(default_factory=list)

    @property
    def differing_components(self) -> set[str]:
        """The components that the tensors in ``differing_names`` belong to."""
        return {name.partition("/")[0] for name in self.differing_names}


def mean(replicas: Iterable[Snapshot], components: Collection[str]) -> Mean:
    """Return the mean of ``components`` over all ranks' snapshots, in rank order. Raises ``StateError`` if names, shapes or
    dtypes differ, or without snapshots."""
    out: Mean | None = None
    sums: Tensors = {}
    count = 0
    for rank, replica in enumerate(replicas):
        count += 1
        tensors = {n: t for n, t in replica.private.items() if n.partition("/")[0] in components}
        state = {c: replica.state[c] for c in components if c in replica.state}
        if out is None:
            out = Mean(tensors, state)
            # In float64 and in rank order: every rank that computes the mean gets the same bits.
            sums = {n: _wide(t) for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
            continue
        _check(out.tensors, tensors, rank)
        for name, tensor in tensors.items():
            _add(out, sums, name, tensor)
        out.from_rank_0 += [c for c in state if state[c] != out.state.get(c) and c not in out.from_rank_0]
    if out is None:
        raise StateError("there is no replica to average")
    for name in [n for n in sums if n in out.differing_names]:
        out.tensors[name] = (sums[name] / count).to(out.tensors[name].dtype)
    return out


def follows_model(mean: Mean, module: nn.Module) -> bool:
    """True if everything that differed in one object's state corresponds to tensors of the model, by name and shape or as a list
    of the same shapes. ``mean``: the mean of this object's state alone."""
    if mean.from_rank_0:
        return False
    shapes = [tuple(p.shape) for p in module.parameters()]
    named = [(f".{name}", tuple(t.shape)) for name, t in (*module.named_parameters(), *module.named_buffers())]
    lists: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, tensor in mean.tensors.items():  # in file order: wide dtypes first
        if (item := _ITEM.fullmatch(name)) is not None:
            lists.setdefault(item[1], {})[int(item[2])] = tuple(tensor.shape)
    for name in mean.differing_names:
        shape = tuple(mean.tensors[name].shape)
        if (item := _ITEM.fullmatch(name)) is not None:
            if [shape for _, shape in sorted(lists[item[1]].items())] != shapes:
                return False
            continue
        key = _KEY.search(name)
        last = key[1] or key[2] if key is not None else ""
        if not any(f".{last}".endswith(name) and form == shape for name, form in named):
            return False
    return True


def _add(out: Mean, sums: Tensors, name: str, tensor: torch.Tensor) -> None:
    """Add one rank's ``tensor`` to the sum of that name, and record in ``out`` if it differs from rank 0's."""
    if not same_bits(tensor, out.tensors[name]):
        out.differing_names.add(name)
        if name not in sums and name not in out.from_rank_0:
            out.from_rank_0.append(name)
    if name in sums:
        sums[name] += _wide(tensor)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float64, or in complex128 for a complex tensor."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _check(first: Tensors, other: Tensors, rank: int) -> None:
    """Raise ``StateError`` if the names, shapes or dtypes of ``other``, the tensors of ``rank``, differ from rank 0's in
    ``first``."""
    if odd := sorted(set(first) ^ set(other)):
        who = (0, rank) if odd[0] in first else (rank, 0)
        raise StateError(
            f"{odd[0]}: rank {who[0]} has it and rank {who[1]} has not, so the replicas have no mean; resume with the number of "
            "ranks and the hook that made the checkpoint"
        )
    for name, tensor in other.items():
        if tensor.shape != first[name].shape or tensor.dtype is not first[name].dtype:
            raise StateError(
                f"{name}: rank {rank} has {tensor.dtype} {list(tensor.shape)}, rank 0 another shape or dtype"
            )
