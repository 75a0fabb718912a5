"""A Trainer in a Session, in the way that ``argv[1]`` (JSON) asks for; killed where it asks for it.

``kills``: for attempt n the n-th entry, a hook and how often it has been called in all of the training; rank 1 ends there by
SIGKILL, once a checkpoint of ``saved`` steps (None: whatever there is) is complete, or gets the signal that the entry names.
Rank 0 leaves ``log.jsonl`` (what was logged) and ``end.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from ratchet.lightning import SessionLogger, SessionStrategy

CASE: dict[str, Any] = json.loads(sys.argv[1])
LAUNCH = json.loads(Path(os.environ["RATCHET_LAUNCH_FILE"]).read_bytes())


class Kills(Callback):
    """The last one in the list: what other callbacks do in the hook is done."""

    def __init__(self) -> None:
        kills = CASE.get("kills", [])
        self.kill = kills[LAUNCH["attempt"] - 1] if LAUNCH["attempt"] <= len(kills) else None

    def _at(self, hook: str, number: int) -> None:
        if self.kill is None or self.kill[:2] != [hook, number] or os.environ["RANK"] != "1":
            return
        wanted, deadline = self.kill[2], time.monotonic() + 60
        checkpoints = Path(LAUNCH["job_root"], "checkpoints")
        while wanted is not None and all(
            json.loads(m.read_bytes())["step"] < wanted for m in checkpoints.glob("*/MANIFEST.json")
        ):
            assert time.monotonic() < deadline, "no checkpoint to resume from"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.Signals[self.kill[3] if len(self.kill) > 3 else "SIGKILL"])

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._at("epoch", trainer.current_epoch)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._at("batch", trainer.fit_loop.total_batch_idx)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._at("sanity" if trainer.sanity_checking else "validation", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._at("epoch end", trainer.current_epoch)


class Lines(Logger):
    """What is logged, a line each; a resumed attempt goes on in the same file."""

    name, version = "lines", 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if os.environ["RANK"] == "0":
            with Path("log.jsonl").open("a") as log:
                log.write(json.dumps([step, {k: float(v).hex() for k, v in metrics.items()}]) + "\n")


class Curriculum(Callback):
    """State without ``state_dict``: set once, counted, drawn on."""

    def __init__(self) -> None:
        self.seen, self.stage = 0, "easy"

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.scale = 1.0 + 0.1 * trainer.current_epoch
        if trainer.current_epoch == 1:
            self.stage = "hard"
            trainer.gradient_clip_val = 0.5

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen += 1
        pl_module.shift = 0.01 * self.seen * (2 if self.stage == "hard" else 1)


class Keeps(Callback):
    """The documented places for state."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.given: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name] = value.clone() if name not in self.average else self.average[name] * 0.9 + value * 0.1

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average and not trainer.sanity_checking:
            with torch.no_grad():
                for name, value in pl_module.named_parameters():
                    value += 0.01 * (self.average[name] - value)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert {"state_dict", "callbacks", "loops", "optimizer_states", "lr_schedulers"} <= checkpoint.keys()
        checkpoint["loops"]["given"] = {"names": [*self.average]}  # in place
        checkpoint["loops"]["type"] = torch.float32  # cannot be stored
        checkpoint["usual"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = dict(self.average)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.average = {k: v.clone() for k, v in checkpoint["state_dict"].items()}
        assert checkpoint["loops"]["given"] == {"names": [*self.average]}
        pl_module.load_state_dict(checkpoint["usual"])


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.lr = 1.0, 0.0, CASE.get("lr", 0.1)
        norm = [nn.BatchNorm1d(32)] if CASE.get("norm", True) else []
        self.net = nn.Sequential(nn.Linear(12, 32), *norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
        self.right, self.factor = MulticlassAccuracy(3), torch.ones(3)
        self.by_epoch = MulticlassAccuracy(3, sync_on_compute=False)  # a progress bar of rank 0 computes what is logged

    @property
    def backbone(self) -> nn.Module:
        return self.net[0]

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x) * self.factor * self.scale + self.shift
        loss = cross_entropy(out, y)
        self.factor = self.factor * 0.99 + 0.01 * out.detach().abs().mean(0)
        self.right(out, y)
        self.by_epoch.update(out, y)
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        if number < 2:
            self.log("early", loss, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("by_epoch", self.by_epoch.compute())
        self.by_epoch.reset()

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)
        self.log("out", self.net(x).mean(), on_step=True, on_epoch=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["factor"] = self.factor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.factor = checkpoint["factor"].clone()

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if "groups" in CASE:  # as is said in place of BaseFinetuning
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[1:].parameters()}]
            optimizer = torch.optim.SGD(groups, lr=self.lr)
            return [optimizer], [lr_scheduler.LambdaLR(optimizer, [lambda epoch: float(epoch >= 1), lambda epoch: 1.0])]
        if "scheduler" not in CASE:
            return optimizer
        kind, interval, monitor = CASE["scheduler"]
        made = {
            "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.7, patience=0),
            "exponential": lambda: lr_scheduler.ExponentialLR(optimizer, 0.9),
            "cosine": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        }[kind]()
        config = {"scheduler": made, "interval": interval, "frequency": CASE.get("frequency", 1), "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config | ({"monitor": monitor} if monitor else {})}


class Kept:
    """What a script keeps beside its module; the lock cannot be stored."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.lock = epoch, threading.Lock()


class Touching(Module):
    """Hooks that run before an attempt's first batch change attributes, in place and by putting others there, by the epoch; they
    are as the script has built them again by the second batch, or later."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.seen, self.steps = -1, list[int](), torch.zeros(3)
        self.table: dict[str, Any] = {"of": None}
        self.array, self.draws = np.zeros(2), np.random.default_rng(3)
        self.calls, self.level = {0}, 0.0

    def setup(self, stage: str) -> None:
        self.data = Leveled(*points())

    def train_dataloader(self) -> DataLoader[Any]:
        if CASE.get("reload"):
            self.data = Leveled(*points())
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def on_fit_start(self) -> None:
        self.kept = Kept(self.trainer.current_epoch)
        self.table["of"] = self.trainer.current_epoch
        self.array += self.trainer.current_epoch

    def on_train_start(self) -> None:
        self.calls.add(self.trainer.current_epoch)
        self.table["more"] = [self.trainer.current_epoch]

    def on_train_epoch_start(self) -> None:
        self.phase = self.trainer.current_epoch
        self.seen.append(self.phase)
        self.steps += self.phase
        self.level = self.draws.random()
        self.net[0].weight.note = [self.phase]  # type: ignore[union-attr]
        self.trainer.train_dataloader.dataset.level = 1.0 + self.phase

    def on_train_batch_start(self, batch: Any, number: int) -> None:
        if number == 1:
            self.phase = -1
            self.table["of"] = None
            self.table.pop("more", None)
            self.steps.zero_()
        if number == 2:
            self.array[:] = 0.0
            self.seen.clear()
            self.calls.intersection_update({0})

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.shift = 0.01 * (self.phase + len(self.seen) + float(self.array.sum()) + len(self.table) + len(self.calls))
        self.scale = 1.0 + 0.1 * float(self.steps.sum()) + 0.1 * self.level
        return super().training_step(batch, number)

    def configure_optimizers(self) -> Any:
        """The number of steps is asked for: the data are there before the optimizers."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        cycle = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Manual(Module):
    """Optimizes by itself: two optimizers, one of them after every other batch, and a plateau scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        first, second = self.optimizers()
        for optimizer, due in ((first, True), (second, number % 2 == 1)):
            self.toggle_optimizer(optimizer)
            out = self.net(x)
            loss = cross_entropy(out, y) if optimizer is first else (out**2).mean()
            self.manual_backward(loss)
            if due:
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.factor = self.factor * 0.99 + 0.01 * out.detach().abs().mean(0)
        self.right(out, y)
        self.by_epoch.update(out, y)
        self.log("right", self.right, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.lr_schedulers().step(self.trainer.callback_metrics["loss_epoch"])

    def configure_optimizers(self) -> Any:
        first, second = (
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.net[0], self.net[1:])
        )
        return [first, second], [lr_scheduler.ReduceLROnPlateau(first, factor=0.7, patience=0)]


class Leveled(TensorDataset):
    """Whose samples depend on an attribute, and which counts them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.level, self.taken = 0.0, 0

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        x, y = super().__getitem__(index)
        return x + 0.01 * self.level + 0.001 * self.taken, y


class Mine(callbacks.BaseFinetuning):  # type: ignore[misc]
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def made(name: str) -> Callback:
    monitor = CASE.get("monitor", "loss_epoch")
    kinds: dict[str, Any] = {
        "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(1),
        "BaseFinetuning": Mine,
        "BasePredictionWriter": lambda: callbacks.BasePredictionWriter("batch"),
        "Callback": Callback,
        "Checkpoint": callbacks.Checkpoint,
        "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(decay=0.9),
        "EarlyStopping": lambda: callbacks.EarlyStopping(
            monitor, mode=CASE.get("mode", "max"), patience=3, check_on_train_epoch_end=True
        ),
        "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 2, 2: 1}),
        "LambdaCallback": lambda: callbacks.LambdaCallback(on_train_batch_end=lambda *_: None),
        "LearningRateFinder": lambda: callbacks.LearningRateFinder(num_training_steps=6, early_stop_threshold=None),
        "ModelCheckpoint": lambda: callbacks.ModelCheckpoint(
            "files", save_top_k=2, monitor=monitor, mode="min", save_last=True, save_on_train_epoch_end=True
        ),
        "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.1),
        "OnExceptionCheckpoint": lambda: callbacks.OnExceptionCheckpoint("."),
        "ProgressBar": lambda: type(
            "Bar", (callbacks.ProgressBar,), {"disable": lambda _: None, "enable": lambda _: None}
        )(),
        "SpikeDetection": lambda: callbacks.SpikeDetection(warmup=1, atol=100.0, rtol=None),
        "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.05, 1, annealing_epochs=2),
        "ThroughputMonitor": lambda: callbacks.ThroughputMonitor(lambda batch: len(batch[0])),
        "Timer": lambda: callbacks.Timer(timedelta(hours=1)),
        "Curriculum": Curriculum,
        "Keeps": Keeps,
    }
    return kinds.get(name, getattr(callbacks, name, None))()


def end(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Facts that must be the same, whatever disturbed the job."""
    values = [v.flatten().view(torch.uint8) for v in module.state_dict().values()]
    weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()
    out: dict[str, Any] = {"weights": weights, "step": trainer.global_step, "epoch": trainer.current_epoch}
    out["metrics"] = {k: float(v).hex() for k, v in trainer.callback_metrics.items()}
    out["lr"] = [group["lr"] for group in trainer.optimizers[0].param_groups]
    out["factor"] = module.factor.tolist()
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.EarlyStopping):
            out["stopping"] = [callback.wait_count, callback.stopped_epoch, float(callback.best_score)]
        if isinstance(callback, callbacks.ModelCheckpoint):
            out["best"] = [
                callback.best_model_path[len(str(Path.cwd())) :],
                callback.last_model_path[len(str(Path.cwd())) :],
            ]
            out["scores"] = sorted(map(float, callback.best_k_models.values()))
        if isinstance(callback, Curriculum):
            out["curriculum"] = [callback.seen, callback.stage, trainer.gradient_clip_val]
        if isinstance(callback, callbacks.SpikeDetection):
            out["spike"] = float(callback.running_mean.compute())
        if isinstance(callback, callbacks.Timer):
            out["elapsed"] = callback.time_elapsed() > 0.0
    return out


def points() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8 * 2 * CASE.get("batches", 6), 12, generator=draw)
    return x, x[:, :3].argmax(1)


def main() -> None:
    x, y = points()
    data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    bar = any("ProgressBar" in name for name in CASE.get("callbacks", []))
    trainer = Trainer(
        strategy=SessionStrategy(),
        devices=2,
        max_epochs=CASE.get("epochs", 4),
        callbacks=[*map(made, CASE.get("callbacks", [])), Kills()],
        enable_progress_bar=bar,
        **{
            "logger": [Lines(), SessionLogger(), *([CSVLogger("logs")] if CASE.get("csv") else [])],
            "log_every_n_steps": 2,
        }
        | CASE.get("trainer", {}),
    )
    module = Manual() if CASE.get("manual") else Touching() if CASE.get("touching") else Module()
    trainer.fit(
        module, None if CASE.get("touching") else data, DataLoader(TensorDataset(x[:32], y[:32]), batch_size=16)
    )
    if trainer.is_global_zero:
        Path("end.json").write_text(json.dumps(end(trainer, module)))


if __name__ == "__main__":
    main()
