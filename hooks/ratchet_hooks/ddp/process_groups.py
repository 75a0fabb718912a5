"""Additional process groups, and a clean shutdown of all groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ratchet_hooks.torch_compat import timeout_of


def partition(group: dist.ProcessGroup, device: torch.device, size: int) -> dist.ProcessGroup:
    """Divide ``group`` into parts of ``size`` (at least 1) neighbouring ranks, and return this rank's part. A collective. Raises
    ``ValueError`` if ``size`` does not divide the number of ranks."""
    if group.size() % size:
        raise ValueError(f"{group.size()} ranks cannot be divided into groups of {size}")
    if size == group.size():
        return group
    ranks = dist.get_process_group_ranks(group)
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    # without a time limit, torch would give the parts its default of 10 or 30 minutes
    return new_groups(parts, len(ranks) == dist.get_world_size(), timeout_of(group, device))


def duplicate_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a new group of the same ranks, with the same time limit. A collective."""
    ranks = dist.get_process_group_ranks(group)
    return new_groups([ranks], len(ranks) == dist.get_world_size(), timeout_of(group, device))


def new_groups(parts: Sequence[Sequence[int]], all_ranks: bool, timeout: timedelta) -> dist.ProcessGroup:
    """Make process groups of ``parts`` (lists of global ranks), and return the group of this rank. ``all_ranks`` True: every rank
    of the job calls this function with the same parts. False: only the ranks in ``parts`` call it. Raises ``ValueError`` if this
    rank is in no part."""
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
    """Wait for all ranks, then destroy all process groups. Does nothing if ``torch.distributed`` is not initialised."""
    if dist.is_initialized():
        # otherwise a rank may close connections that another still reads, which aborts that process at its exit
        dist.barrier()
        dist.destroy_process_group()
