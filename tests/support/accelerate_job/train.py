"""A training with Accelerate: ``python train.py KIND OUT PLACE ...``.

Under torch alone (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun gives them) with Accelerate's own Accelerator, in a
job with that of ``ratchet.accelerate``. Attempt n of a job dies at the n-th PLACE: ``EPOCH.BATCH`` in the body of that batch's
step, or ``EPOCH.end`` between this epoch and the next.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

JOB = "RATCHET_JOB_ID" in os.environ
if JOB:
    from ratchet.accelerate import Accelerator
else:
    from accelerate import Accelerator

RANK = int(os.environ["RANK"])
EPOCHS = 4
LOADERS: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "workers": {"use_seedable_sampler": True},
    "left early": {"split_batches": True},
}


class Samples(Dataset[Any]):
    """``noise``: drawn from all of the process-wide generators, and from one of its own."""

    def __init__(self, count: int, *, noise: bool) -> None:
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
        self.noise, self.own = noise, np.random.default_rng(RANK)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        label = (x.sum() > 0).long()
        if self.noise:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * np.random.random() + 0.1 * self.own.random()
        return x.float(), label


class Seen:
    """Registered for checkpoints: how many samples this rank has seen."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def die(place: str, accelerator: Any) -> None:
    """Once, when the checkpoint of the step before this one is there, if one was due."""
    if not JOB:
        return
    runtime, places = accelerator.session._runtime, sys.argv[3:]
    number = runtime.launch.epoch
    if RANK != 1 or number > len(places) or places[number - 1] != place:
        return
    due = runtime.step - runtime.step % runtime.launch.spec.checkpoint.every_steps
    end = time.monotonic() + 60
    while due and not list(Path(runtime.launch.job_root, "checkpoints").glob(f"step-{due:012d}.*/MANIFEST.json")):
        assert time.monotonic() < end, f"step {due} was not saved"
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    early, workers = kind == "left early", 2 if kind == "workers" else 0
    set_seed(7)
    if not JOB:
        torch.set_num_threads(1)
        shutil.rmtree(out / "states", ignore_errors=True)  # of a run that torch broke at its end
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=not early),
        dataloader_config=DataLoaderConfiguration(**LOADERS[kind]),
        project_config=ProjectConfiguration(str(out / "states"), automatic_checkpoint_naming=True, total_limit=2),
        mixed_precision="bf16" if early else None,
    )
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    set_seed(RANK)
    loader: Any = DataLoader(Samples(45, noise=True), 4, shuffle=True, num_workers=workers)
    test: Any = DataLoader(Samples(13, noise=False), 4)
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    model, optimizer, loader, test, scheduler = accelerator.prepare(net, optimizer, loader, test, scheduler)
    for epoch in accelerator.epochs(EPOCHS) if JOB else range(EPOCHS):
        model.train()
        for n, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                seen.count += len(x)
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            die(f"{epoch}.{n}", accelerator)
            if early and n == 4 + epoch:
                break
        model.eval()
        right = total = 0
        for x, y in loader if early and epoch == 1 else test:
            with torch.no_grad():
                found = accelerator.gather_for_metrics(model(x).argmax(1) == y)
            right, total = right + int(found.sum()), total + len(found)
        accelerator.log({"accuracy": right / total})
        if kind == "workers":
            accelerator.project_configuration.automatic_checkpoint_naming = False
            accelerator.save_state(str(out / "states" / f"epoch_{epoch}"))
        else:
            accelerator.save_state()
        die(f"{epoch}.end", accelerator)
    drawn = torch.tensor([*torch.rand(2), random.random(), np.random.random(), seen.count])
    save_file({**accelerator.unwrap_model(model).state_dict(), "drawn": drawn}, out / f"{RANK}.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
