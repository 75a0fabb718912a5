"""``torchrun --nproc-per-node 2 kills_recipe.py KIND``: torch's own hook. KIND ``undisturbed``, or ``documented``: after certain
steps all is lost, and comes back as PyTorch's page on hooks saves it: rank 0's model, optimizer and hook state, on every rank.
Rank 0 prints a line for each step: its number, and the loss after it."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from kills_loop import EVERY, KILLS, RANK, STEPS, WARM_UP, load, make_net, make_optimizer, train_step
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, data = dist.get_rank(), load()
kills = list(KILLS) if sys.argv[1] == "documented" else []
step = 0
saved: dict[str, Any] = {}


def begin() -> tuple[Any, torch.optim.Optimizer, Any]:
    """Model, optimizer and hook state, of rank 0's file where there is one."""
    net = make_net()
    optimizer = make_optimizer(net)
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=WARM_UP)
    if saved:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(deepcopy(saved["optimizer"]))
        state = saved["comm_hook_state"]
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    return model, optimizer, state


model, optimizer, state = begin()
while step < STEPS:
    if kills and step == kills[0]:
        kills.pop(0)
        model, optimizer, state = begin()
        step = saved["step"]
    if step % EVERY == 0:
        # Copied as torch.save and torch.load would copy it, by __getstate__; every rank loads rank 0's file.
        content: list[Any] = [{"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}]
        content[0]["comm_hook_state"] = state
        dist.broadcast_object_list(content)
        saved = deepcopy(content[0])
    loss = train_step(model, optimizer, data, step, rank)
    step += 1
    if rank == 0:
        print(step, repr(loss), flush=True)
dist.barrier()
dist.destroy_process_group()
