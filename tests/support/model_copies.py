"""Copies of a wrapped model, in the ranks of a group."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import HookSpec


def train_copies(rank: int, spec: HookSpec) -> list[str]:
    """What is wrong, in words: a copy of the model has to train as torch's DDP without a hook does, an average to average."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 4))
    ddp, hook = managed_ddp(net, spec, ddp={}, device=torch.device("cpu"), recorded_layout=None)
    mine = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))

    def step(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        model(mine).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    average = AveragedModel(ddp)
    step(ddp)
    before = hook.iteration
    other = copy.deepcopy(ddp)
    average.update_parameters(ddp)
    plain = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    told = [f"gradient {n}" for n, (a, b) in enumerate(zip(step(other), step(plain), strict=True)) if not a.equal(b)]
    told += [] if hook.iteration == before else ["the copy has run the model's hook"]
    told += [] if all(a.equal(b) for a, b in zip(average.parameters(), ddp.parameters(), strict=True)) else ["average"]
    step(ddp)
    return told + ([] if hook.iteration == before + 1 else ["the model's hook has not run"])
