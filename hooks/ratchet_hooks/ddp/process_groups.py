"""Additional process groups, and a clean shutdown of all groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ratchet_hooks.torch_compat import timeout_of


def partition(group: dist.ProcessGroup, device: torch.device, size: int) -> dist.ProcessGroup:
    """This rank's part of ``group``, divided into parts of ``size`` neighbouring ranks. A collective: all ranks of the group call
    it.

    ``size`` divides the size of the group. The parts have the group's timeout; torch would give them its default of 10 or 30
    minutes. They exist until the main group is destroyed. For the size of the whole group, ``group`` itself is returned.
    """
    if group.size() % size:
        raise ValueError(f"{group.size()} ranks cannot be divided into groups of {size}")
    if size == group.size():
        return group
    ranks = dist.get_process_group_ranks(group)
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return new_groups(parts, len(ranks) == dist.get_world_size(), timeout_of(group, device))


def duplicate_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A second group of the same ranks, whose collectives cannot cross those of the first. A collective."""
    ranks = dist.get_process_group_ranks(group)
    return new_groups([ranks], len(ranks) == dist.get_world_size(), timeout_of(group, device))


def new_groups(parts: Sequence[Sequence[int]], all_ranks: bool, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group among ``parts`` (global ranks). ``all_ranks``: all ranks of the job call this, and make all parts in the
    same order, as torch requires; else only the ranks of the parts call it, each making its own."""
    mine, own = dist.get_rank(), None
    for part in parts:
        if all_ranks or mine in part:
            made = dist.new_group(list(part), timeout=timeout, use_local_synchronization=not all_ranks)
            own = made if mine in part else own
    if own is None:
        raise ValueError(f"rank {mine} is in none of the groups {[list(part) for part in parts]}")
    group: dist.ProcessGroup = own
    return group


def close_group() -> None:
    """Leave ``torch.distributed`` cleanly: wait for all ranks, then destroy all groups.

    Without the barrier a rank may tear down connections that another still reads, which aborts that process at its exit.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
