"""A small net under Accelerate, as a job, with the options that the command line names; the first attempt dies in step ``kill``,
behind the checkpoint before it. With ``evaluation`` in that batch of the evaluation of that step; then the second one gets a
SIGTERM in that of step ``stop``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ratchet.accelerate import Accelerator
from ratchet_worker.session.session import Session

case = json.loads(sys.argv[1])
STEPS = 36


def die(session: Session, step: int, batch: int | None = None) -> None:
    launch = session._runtime.launch
    if session.rank != 1 or batch != case.get("evaluation"):
        return
    if launch.attempt == 2 and step == case["stop"] and batch is not None:
        os.kill(os.getpid(), signal.SIGTERM)
        session._runtime.agreement.wait_for_decision()  # the other rank waits for this one's next batch
    if launch.attempt == 1 and step == case["kill"]:
        name = f"step-{(step - 1) // case['every'] * case['every']:012d}.a0001"
        end = time.monotonic() + 60
        while not (Path(launch.job_root) / "checkpoints" / name / "MANIFEST.json").exists() and time.monotonic() < end:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)


class Centred(nn.Module):
    """What is trained depends on a buffer, which ranks make of their own samples, and DDP of rank 0's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.mean


draw = torch.Generator().manual_seed(1)
inputs = torch.randn(71, 12, generator=draw)
samples = TensorDataset(inputs, (inputs.sum(1) > 0).long())
options = dict(case.get("accelerator", {}))
accumulated = case.get("accumulated", 1)
if "plugin" in case:
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=accumulated, **case["plugin"])
elif accumulated > 1:
    options["gradient_accumulation_steps"] = accumulated
if "loader" in case:
    options["dataloader_config"] = DataLoaderConfiguration(**case["loader"])
if "autocast" in case:
    options["kwargs_handlers"] = [AutocastKwargs(**case["autocast"])]
accelerator = Accelerator(**options)
session = accelerator.session
torch.manual_seed(session.seed)
loader = DataLoader(samples, batch_size=6 if accelerator.split_batches else 3, shuffle=True)
net = nn.Sequential(
    nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), Centred(24), nn.Dropout(0.3), nn.Linear(24, 2)
)  # fmt: skip
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedulers = {
    "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    "cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8 * STEPS),
    "warm restarts": lambda: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}
kind = case.get("scheduler", "exponential")
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, schedulers[kind]())
held_back = accelerator.prepare(DataLoader(samples, batch_size=6)) if "evaluation" in case else ()
if "log_with" in options:
    accelerator.init_trackers("walk")
for _ in accelerator.epochs(STEPS // len(loader)):
    for x, y in loader:
        step = session.step
        die(session, step + 1)
        with accelerator.accumulate(model), accelerator.autocast():
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients and case.get("clip") == "norm":
                accelerator.clip_grad_norm_(net.parameters(), 0.1)
            if accelerator.sync_gradients and case.get("clip") == "value":
                accelerator.clip_grad_value_(net.parameters(), 0.01)
            optimizer.step()
            if kind == "plateau":
                scheduler.step(float(accelerator.gather(loss.detach()).mean()))
            else:
                scheduler.step()
            optimizer.zero_grad()
        if (step + 1) % 4 == 0 and held_back:
            model.eval()
            right = 0
            for n, (x, y) in enumerate(held_back, 1):
                with torch.no_grad():
                    right += int(accelerator.gather_for_metrics(model(x).argmax(1) == y).sum())
                die(session, step + 1, n)
            model.train()
            optimizer.param_groups[0]["weight_decay"] = right / len(samples)
        accelerator.log({"loss": loss.item()}, step=step)
