"""A training with Accelerate: ``python accelerated.py KIND OUT PLACE ...``.

Under torch alone (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun gives them) with Accelerate's own Accelerator, in a
job with that of ``ratchet.accelerate``. Attempt n of a job dies at the n-th PLACE: ``EPOCH.BATCH`` in the body of that batch's
step, or ``EPOCH.end`` between this epoch and the next. BEGIN_WITH: a directory of ``save_state``.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import DataLoaderConfiguration, PartialState
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from train import EPOCHS, RANK, Samples, die

JOB = "RATCHET_JOB_ID" in os.environ
if JOB:
    from ratchet.accelerate import Accelerator
else:
    from accelerate import Accelerator

LOADERS: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "workers": {"use_seedable_sampler": True},
    "left early": {"split_batches": True},
}


class Seen:
    """Registered for checkpoints: how many samples this rank has seen."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def main() -> None:
    kind, out = sys.argv[1], Path(sys.argv[2])
    early, workers = kind == "left early", 2 if kind == "workers" else 0
    set_seed(7)
    if not JOB:
        torch.set_num_threads(1)
        shutil.rmtree(out / "states", ignore_errors=True)  # of a run that torch broke at its end
    if kind == "accumulated":
        PartialState(cpu=True)  # a script that asks for its rank first
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
    if begin_with := os.environ.get("BEGIN_WITH"):
        accelerator.load_state(begin_with)
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
            if JOB:
                die(f"{epoch}.{n}", accelerator.session)
            if early and n == 4 + epoch:
                break
        model.eval()
        right = total = 0
        for x, y in loader if early and epoch == 1 else test:
            with torch.no_grad():
                found = accelerator.gather_for_metrics(model(x).argmax(1) == y)
            right, total = right + int(found.sum()), total + len(found)
        accelerator.log({"accuracy": np.float32(right / total)})
        if kind == "workers":
            accelerator.project_configuration.automatic_checkpoint_naming = False
            accelerator.save_state(str(out / "states" / f"epoch_{epoch}"))
        else:
            accelerator.save_state()
        if JOB:
            die(f"{epoch}.end", accelerator.session)
    drawn = torch.tensor([*torch.rand(2), random.random(), np.random.random(), seen.count])
    save_file({**accelerator.unwrap_model(model).state_dict(), "drawn": drawn}, out / f"{RANK}.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
