"""Process groups beside the main one, and leaving them all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ratchet_hooks.torch_compat import timeout_of


def partition(group: dist.ProcessGroup, device: torch.device, size: int) -> dist.ProcessGroup:
    """This rank's part of ``group``, cut into parts of ``size`` neighbouring ranks. A collective: all ranks of the group call it.

    ``size`` divides the size of the group. The parts have the group's timeout; torch would give them its default of 10 or 30
    minutes. They live until the main group is destroyed. The whole is no part of its own.
    """
    if group.size() % size:
        raise ValueError(f"{group.size()} ranks cannot be cut into parts of {size}")
    if size == group.size():
        return group
    ranks = dist.get_process_group_ranks(group)
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return new_groups(parts, len(ranks) == dist.get_world_size(), timeout_of(group, device))


def copy_of(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A second group of the same ranks, whose collectives cannot cross those of the first. A collective."""
    ranks = dist.get_process_group_ranks(group)
    return new_groups([ranks], len(ranks) == dist.get_world_size(), timeout_of(group, device))


def new_groups(parts: Sequence[Sequence[int]], everyone: bool, timeout: timedelta) -> dist.ProcessGroup:
    """The one of ``parts`` (global ranks) that this rank is in. ``everyone``: all ranks of the job call this, and make all parts
    in the same order, as torch wants it; else only those of the parts, each its own."""
    mine, own = dist.get_rank(), None
    for part in parts:
        if everyone or mine in part:
            made = dist.new_group(list(part), timeout=timeout, use_local_synchronization=not everyone)
            own = made if mine in part else own
    if own is None:
        raise ValueError(f"rank {mine} is in none of the groups {[list(part) for part in parts]}")
    group: dist.ProcessGroup = own
    return group


def close_group() -> None:
    """Leave ``torch.distributed`` cleanly: wait for all ranks, then destroy the group and all groups beside it.

    Without the barrier a rank may tear down connections that another still reads, which aborts that process at its exit.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
