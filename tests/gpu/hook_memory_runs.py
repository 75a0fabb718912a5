"""What the rank of ``hook_memory`` does."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from torch import nn

from ratchet_hooks.build import managed_ddp
from tests.support.exact_matrix import START, hook_spec


@dataclass
class Use:
    """Bytes as they were asked for, without what cuBLAS keeps. ``held``: between two steps; ``most``: within a step. ``cublas``:
    its workspaces, one for each stream; the hook may have a stream of its own. On the CPU ``held`` alone, of the hook's state."""

    held: int
    most: int = 0
    cublas: int = 0


def use(rank: int, label: str, width: int, depth: int, device: str) -> Use:
    """What a training holds under the hook of ``label`` once it compresses; on the CPU the hook's state alone."""
    found = _use(label, width, depth, torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    gc.collect()  # for the next hook, which begins with nothing
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def _use(label: str, width: int, depth: int, device: torch.device) -> Use:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).to(device)
    one_bucket = {"bucket_cap_mb": 1 << 20} if label.startswith("batched") else {}  # as its promise has it
    model, hook = managed_ddp(net, hook_spec(label, 1), ddp=one_bucket, device=device)
    batch = torch.randn(8, width, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        hook.average_parameters()
        net.zero_grad(set_to_none=False)

    for _ in range(START + 2):
        step()
    if device.type == "cpu":
        return Use(hook.summary(rank=0, step=START + 2).memory_bytes)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    asked = torch.cuda.memory_stats()
    held, most = asked["requested_bytes.all.current"], asked["requested_bytes.all.peak"]
    torch._C._cuda_clearCublasWorkspaces()
    cublas = held - torch.cuda.memory_stats()["requested_bytes.all.current"]
    return Use(held - cublas, most - cublas, cublas)
