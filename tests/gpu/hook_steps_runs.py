"""What the ranks of ``hook_steps`` do: blocks of steps under Ratchet's hook and under torch's own, by turns in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.hooks import SPECS, cap, loop, measure
from benchmarks.scripts.loops import net
from benchmarks.scripts.stock import mend_batched_powersgd, register
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.registry import HOOKS


def blocks(rank: int, hook: str, device: str, width: int, depth: int, block: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of each block under ``managed`` (Ratchet's), ``stock`` (torch's) and ``control`` (torch's once more), in order."""
    mend_batched_powersgd()
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    batch = torch.randn(32, width, device=place)
    name = hook.partition(" + ")[0]
    spec: Any = HOOKS[name].spec(**SPECS[hook])
    model, managed = managed_ddp(net(width, depth).to(place), spec, ddp={"bucket_cap_mb": cap(hook)}, device=place)
    loops = {"managed": loop(model, managed.average_parameters, batch)}
    for kind in ("stock", "control"):
        torchs = DistributedDataParallel(net(width, depth).to(place), bucket_cap_mb=cap(hook))
        loops[kind] = loop(torchs, register(torchs, name, **SPECS[hook]), batch)
    return {kind: [wall for wall, _ in found] for kind, found in measure(loops, block, pairs).items()}
