"""Additional process groups, and a clean shutdown of all groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ratchet_hooks.torch_compat import timeout_of


def partition(group: dist.ProcessGroup, device: torch.device, size: int) -> dist.ProcessGroup:
    """Divide ``group`` into parts of ``size`` neighbouring ranks, and return this rank's part. A collective: all ranks of the
    group call it. For the size of the whole group, ``group`` itself is returned.

    The parts have the time limit that ``group`` has for ``device``; torch would give them its default of 10 or 30 minutes. They
    exist until the default group is destroyed. Raises ``ValueError`` if ``size`` does not divide the size of the group.
    """
    if group.size() % size:
        raise ValueError(f"{group.size()} ranks cannot be divided into groups of {size}")
    if size == group.size():
        return group
    ranks = dist.get_process_group_ranks(group)
    parts = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return new_groups(parts, len(ranks) == dist.get_world_size(), timeout_of(group, device))


def duplicate_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a second group of the same ranks, whose collectives cannot be mixed up with those of ``group``. Its time limit is
    the one that ``group`` has for ``device``. A collective."""
    ranks = dist.get_process_group_ranks(group)
    return new_groups([ranks], len(ranks) == dist.get_world_size(), timeout_of(group, device))


def new_groups(parts: Sequence[Sequence[int]], all_ranks: bool, timeout: timedelta) -> dist.ProcessGroup:
    """Make groups of ``parts`` (global ranks), and return the one that this rank is in. Raises ``ValueError`` if this rank is in
    no part.

    ``all_ranks`` True: all ranks of the job call this and make all parts in the same order, as torch requires. False: only the
    ranks of the parts call it, and each makes its own part.
    """
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
    """Leave ``torch.distributed`` cleanly: wait for all ranks, then destroy all groups. A collective; does nothing if
    ``torch.distributed`` is not initialised.

    Without the barrier a rank may close connections that another still reads, which aborts that process at its exit.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
