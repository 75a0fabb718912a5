"""What the rank of ``hook_memory`` does."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ratchet_hooks.manage.managed_ddp import managed_ddp
from tests.support.exact_matrix import START, hook_spec
from tests.support.server import wait_for


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
    held = _settled()
    torch.cuda.memory._record_memory_history(context=None)
    step()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][device.index]
    torch.cuda.memory._record_memory_history(enabled=None)
    most, held = held + peak(trace), max(held, _settled())
    torch._C._cuda_clearCublasWorkspaces()
    cublas = held - _settled()
    return Use(held - cublas, most - cublas, cublas)


def _settled() -> int:
    """Bytes that live tensors asked for, once they do not change any more. What a collective used is held until NCCL's watchdog
    sees its end, and what another stream used until the next allocation after that stream's end."""
    torch.cuda.synchronize()
    seen = list[int]()

    def unchanged() -> bool:
        torch.empty(1, device="cuda")
        seen.append(int(torch.cuda.memory_stats()["requested_bytes.all.current"]))
        return len(seen) >= 4 and len(set(seen[-4:])) == 1

    wait_for(unchanged, "the GPU's memory to stay the same for 0.3 s", 10.0, 0.1)
    return seen[-1]


def peak(trace: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of live tensors at most, beyond those at the start of a trace of torch's CUDA allocator. Memory that a stream still
    reads counts until its tensor is freed, as it would if the streams ran in one order."""
    now = most = 0
    for event in trace:
        now += {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event["size"]
        most = max(most, now)
    return most
