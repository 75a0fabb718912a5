"""The example of PyTorch's page as a script, saved and reloaded as the page does and with Ratchet's three lines."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.manage.register import capture, register, restore
from tests.support.hook_cases import Net


def resume_difference(rank: int, recipe: str, total: int, kill: int) -> float:
    """Largest difference of a weight between a run and one resumed at ``kill`` as PyTorch's page does (``resume_difference``:
    rank 0's model and hook state, everywhere), or with Ratchet's three lines (``ratchet``). One bucket, which the stock hook can
    do."""
    whole = _Script(rank, recipe)
    whole.train(kill)
    saved = whole.save()
    whole.train(total)
    resumed = _Script(rank, recipe)
    resumed.load(saved)
    resumed.train(total)
    pairs = zip(whole.net.parameters(), resumed.net.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class _Script:
    """A script after the example of PyTorch's page, with optimizer and generator saved as well."""

    def __init__(self, rank: int, recipe: str) -> None:
        self.rank, self.recipe, self.step = rank, recipe, 0
        torch.manual_seed(rank)
        self.net = Net()
        self.ddp: Any = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        if recipe == "ratchet":
            register(self.ddp, (self.state, power_sgd.powerSGD_hook))
        elif recipe == "documented":
            self.registered = False

    def save(self) -> Any:
        state = {
            "model": {k: v.clone() for k, v in self.net.state_dict().items()}, "rng": torch.get_rng_state(), "step": self.step,
            "optimizer": _copied(self.optimizer.state_dict()),
        }  # fmt: skip
        if self.recipe == "ratchet":
            return {**state, "hook": capture(self.ddp)}
        # rank 0's file is what all ranks load; the copies are made as torch.save and torch.load make them, by __getstate__
        content = [{**state, "comm_hook": power_sgd.powerSGD_hook, "comm_hook_state": self.state}]
        dist.broadcast_object_list(content)
        return deepcopy(content[0])

    def load(self, saved: Any) -> None:
        if self.recipe == "documented":
            self.state = saved["comm_hook_state"]
        else:
            restore(self.ddp, saved["hook"])
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        self.step = saved["step"]

    def train(self, until: int) -> None:
        if self.recipe == "documented" and not self.registered:
            self.ddp.register_comm_hook(self.state, power_sgd.powerSGD_hook)
            self.registered = True
        while self.step < until:
            generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
            x = torch.randn(16, 64, generator=generator)
            nn.functional.cross_entropy(self.ddp(x, self.step), x[:, :10].abs().argmax(1)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _copied(v) for k, v in state.items()}
    return [_copied(v) for v in state] if isinstance(state, list) else state
