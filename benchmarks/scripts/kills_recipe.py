"""``torchrun --nproc-per-node 2 kills_recipe.py KIND``: torch's own hook. KIND ``undisturbed``, or ``documented``: rank 1 kills
itself after certain steps, once after each. A start in the same directory loads, on every rank, what PyTorch's page on hooks
saves: rank 0's model, optimizer and hook state. Writes ``losses.txt``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kills_loop import (
    EVERY,
    RANK,
    STEPS,
    WARM_UP,
    kill_once,
    load,
    make_net,
    make_optimizer,
    train_step,
    write_loss,
)
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

SAVED = Path("checkpoint.pt")

dist.init_process_group("gloo")
rank, data, net = dist.get_rank(), load(), make_net()
optimizer, step = make_optimizer(net), 0
state = power_sgd.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=WARM_UP)
if SAVED.exists():
    saved = torch.load(SAVED, weights_only=False)  # a control: PyTorch's recipe pickles the hook's state
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state, step = saved["comm_hook_state"], saved["step"]
model = DistributedDataParallel(net)
model.register_comm_hook(state, power_sgd.powerSGD_hook)
while step < STEPS:
    if step % EVERY == 0 and rank == 0:
        content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**content, "comm_hook_state": state}, SAVED)
    if sys.argv[1] == "documented":
        kill_once(step, rank)
    loss = train_step(model, optimizer, data, step, rank)
    step += 1
    write_loss(step, loss, rank)
dist.barrier()
dist.destroy_process_group()
