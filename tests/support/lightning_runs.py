"""Trainings by Lightning, to be run inside ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.utils.data import DataLoader, TensorDataset

from ratchet_hooks.integrations.lightning import RatchetDDPStrategy
from ratchet_hooks.state.files import pack_state, unpack_state

BATCHES = 6  # per epoch and rank


class Module(pl.LightningModule):
    """A small net; ``noise`` adds what draws from generators and differs between ranks."""

    def __init__(self, noise: bool, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        parts = [nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4)]
        if noise:
            parts[1:1] = [nn.BatchNorm1d(96), nn.Dropout(0.2)]
        self.net = nn.Sequential(*parts)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ResumableLoader:
    """Batches of one rank, with a position that Lightning saves and gives back."""

    def __init__(self, data: TensorDataset, rank: int) -> None:
        self._data, self._rank, self._next = data, rank, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        while self._next < BATCHES:
            start = 16 * (2 * self._next + self._rank)
            self._next += 1
            yield self._data[start : start + 16]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class PlainStrategy(DDPStrategy):
    """Lightning's own, with its hook on the CPU, where it would skip it: the control."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)  # type: ignore[arg-type]


def _state() -> power_sgd.PowerSGDState:
    return power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def _post_local(rank: int) -> dict[str, Any]:
    subgroup, _ = dist.new_subgroups(1)
    state = local_sgd.PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=3)
    return {"ddp_comm_state": state, "ddp_comm_hook": local_sgd.post_localSGD_hook, "model_averaging_period": 4}


def strategy(kind: str, rank: int) -> DDPStrategy:
    """A fresh one."""
    if kind == "plain":
        return PlainStrategy(ddp_comm_state=_state(), ddp_comm_hook=power_sgd.powerSGD_hook)
    if kind == "skipping":
        return DDPStrategy(ddp_comm_state=_state(), ddp_comm_hook=power_sgd.powerSGD_hook)
    if kind == "post_localSGD":
        return RatchetDDPStrategy(**_post_local(rank))
    if kind == "static_graph":
        return RatchetDDPStrategy(
            {"name": "powerSGD", "start_powerSGD_iter": 2}, static_graph=True, gradient_as_bucket_view=True
        )
    if kind == "redistribute":
        return RatchetDDPStrategy(hook=(_state(), power_sgd.powerSGD_hook), redistribute=True)
    if kind == "reset":
        return RatchetDDPStrategy(hook=(_state(), power_sgd.powerSGD_hook), reset_hook=True)
    assert kind == "ratchet"
    return RatchetDDPStrategy(ddp_comm_state=_state(), ddp_comm_hook=power_sgd.powerSGD_hook)


def fit(
    rank: int, directory: str, kind: str, *, epochs: int = 3, noise: bool = True, every_steps: int | None = None,
    resumable: bool = False, accumulate: int = 1, resume: str | None = None, seed: int = 1, more: Sequence[pl.Callback] = (),
) -> tuple[pl.Trainer, Module]:  # fmt: skip
    """A training; checkpoints, every epoch or every few steps, go to ``directory``."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.manual_seed(seed + rank), np.random.seed(seed + rank), random.seed(seed + rank)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * 32, 32, generator=generator)
    data = TensorDataset(x, x[:, :4].argmax(1))
    train: Any = ResumableLoader(data, rank) if resumable else DataLoader(data, batch_size=16, shuffle=True)
    when = {"every_n_epochs": 1} if every_steps is None else {"every_n_train_steps": every_steps}
    keep = ModelCheckpoint(dirpath=directory, filename="{epoch}-{step}", save_top_k=-1, **when)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "recorded on")
        trainer = pl.Trainer(
            strategy=strategy(kind, rank), accelerator="cpu", devices=2, max_epochs=epochs, callbacks=[keep, *more], logger=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate, num_sanity_val_steps=0,
        )  # fmt: skip
        module = Module(noise)
        trainer.fit(module, train, DataLoader(data, batch_size=64), ckpt_path=resume, weights_only=True)
    return trainer, module


def resume_difference(rank: int, directory: str, kind: str, step: int, options: dict[str, Any]) -> float:
    """Largest difference of a weight or buffer between a training and one resumed from its checkpoint of ``step``; the resumed
    one begins with other generators and initial weights."""
    trainer, whole = fit(rank, f"{directory}/whole", kind, **options)
    dist.barrier()
    (saved,) = Path(directory, "whole").glob(f"*step={step}.ckpt")
    again, resumed = fit(rank, f"{directory}/resumed", kind, resume=str(saved), seed=77, **options)
    assert again.global_step == trainer.global_step > step
    pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def hook_entry(rank: int, directory: str) -> dict[str, Any]:
    """What a checkpoint holds besides Lightning's own, read with ``weights_only=True``."""
    fit(rank, directory, "ratchet", epochs=1)
    dist.barrier()
    (file,) = Path(directory).glob("*.ckpt")
    saved = torch.load(file, weights_only=True)["ratchet_hooks"]
    return {"version": saved["version"], "dtypes": [str(part.dtype) for part in saved["ranks"]]}


class _Look(pl.Callback):
    """What DDP runs when training starts."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.hooks = [function.__qualname__ for function, _ in trainer.strategy.model._comm_hooks]  # type: ignore[union-attr]


def hooks_on_cpu(rank: int, directory: str, kind: str) -> tuple[list[str], str]:
    """The hooks that DDP has, and what was said of them."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log
    logger.addHandler(handler)
    look = _Look()
    fit(rank, directory, kind, epochs=1, more=[look])
    logger.removeHandler(handler)
    return look.hooks, "\n".join(said)


def refusal_message(rank: int, directory: str, what: str) -> str:
    """The message of the error, or of the warning, that ``what`` is answered with."""
    try:
        if what == "manual optimization":
            trainer = pl.Trainer(strategy=RatchetDDPStrategy(), accelerator="cpu", devices=2, logger=False)
            trainer.fit(Module(False, automatic=False), DataLoader(TensorDataset(torch.zeros(4, 32))))
        elif what == "float16":
            trainer = pl.Trainer(
                strategy=RatchetDDPStrategy("noop"), plugins=[MixedPrecision("16-mixed", "cpu")], accelerator="cpu", devices=2,
                max_steps=1, logger=False, enable_checkpointing=False,
            )  # fmt: skip
            trainer.fit(Module(False), DataLoader(TensorDataset(torch.zeros(4, 32), torch.zeros(4).long())))
        else:
            four = what in ("other ranks", "redistribute")
            fit(rank, f"{directory}/before", "ratchet" if four else "plain", epochs=1, noise=False)
            dist.barrier()
            (saved,) = Path(directory, "before").glob("*.ckpt")
            if four and rank == 0:
                _of_four_ranks(saved)
            dist.barrier()
            kind = "ratchet" if what == "other ranks" else what
            with warnings.catch_warnings(record=True) as told:
                fit(rank, f"{directory}/ours", kind, epochs=2, noise=False, resume=str(saved))
            return " ".join(str(one.message) for one in told) or "nothing was refused"
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def resume_stopped_trainer(rank: int, directory: str, recorded_by: str, batches: int = 22) -> bool | str:
    """Does a Trainer of job ``mine``, with ``batches`` in an epoch, stop that begins with what one of ``recorded_by``, with 22,
    saved when a callback had stopped it? Or the message of the error."""
    from ratchet_worker.integrations.lightning import _Progress

    chosen = SimpleNamespace(manifest=SimpleNamespace(job_id=recorded_by, world_size=2))
    state = SimpleNamespace(data=SimpleNamespace(steps_per_epoch=22))
    launch = SimpleNamespace(job_id="mine", workdir=directory, job_root=f"{directory}/jobs/mine")
    runtime = SimpleNamespace(chosen=chosen, launch=launch, state=state)
    session: Any = SimpleNamespace(_runtime=runtime, world_size=2)
    before, after = (
        pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=directory) for _ in range(2)
    )
    for trainer in (before, after):
        trainer.strategy.connect(Module(False))
    before.should_stop = True
    recorded = _Progress(session, before).state_dict()
    state.data.steps_per_epoch = batches
    try:
        _Progress(session, after).load_state_dict(recorded)
    except ValueError as error:
        return str(error)
    return after.should_stop


def _of_four_ranks(file: Path) -> None:
    """Make it a checkpoint of four ranks: two have what rank 0 had, two what rank 1 had."""
    saved = torch.load(file, weights_only=True)
    states = [unpack_state(packed) for packed in saved["ratchet_hooks"]["ranks"] * 2]
    states = [{**state, "rank": rank, "world_size": 4} for rank, state in enumerate(states)]
    saved["ratchet_hooks"]["ranks"] = [pack_state(state) for state in states]
    torch.save(saved, file)
