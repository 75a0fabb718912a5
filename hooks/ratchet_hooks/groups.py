"""Leaving a process group."""

from __future__ import annotations

import torch.distributed as dist


def close_group() -> None:
    """Leave ``torch.distributed`` cleanly: wait for all ranks, then destroy the group.

    Without the barrier a rank may tear down connections that another still reads, which aborts that process at its exit.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
