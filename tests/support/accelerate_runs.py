"""Trainings by Accelerate and by Hugging Face's Trainer, to be run inside ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ratchet_hooks import capture, register
from ratchet_hooks.integrations import accelerate as ours
from ratchet_hooks.integrations.rank_state import RankFile
from ratchet_hooks.state.files import load_state, save_state

BATCHES = 6  # per epoch and rank


def set_torchrun_environment(rank: int) -> None:
    """As torchrun sets it; the group is there already."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip


def seed(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


class AccelerateRun:
    """A user's script. ``kind``: ``plain`` as Accelerate has it, ``taken over`` with one line more, ``own`` with the hook named
    there, ``post_localSGD``."""

    def __init__(self, rank: int, kind: str, noise: bool, begin: int) -> None:
        set_torchrun_environment(rank)
        seed(begin + rank)
        handler = DistributedDataParallelKwargs(bucket_cap_mb=25)
        if kind in ("plain", "taken over"):
            options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
            handler = DistributedDataParallelKwargs(
                comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option=options
            )
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        parts: list[nn.Module] = [nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4)]
        if noise:
            parts[1:1] = [nn.BatchNorm1d(96), nn.Dropout(0.2)]
        net = nn.Sequential(*parts)
        x = torch.randn(BATCHES * 32, 32, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(net, optimizer, loader)
        if kind == "taken over":
            ours.manage(self.accelerator, self.model)
        elif kind == "own":
            ours.manage(self.accelerator, self.model, "powerSGD", start_powerSGD_iter=2, wrapper="bf16")
        elif kind == "post_localSGD":
            ours.manage(
                self.accelerator,
                self.model,
                "post_localSGD",
                subgroup_size=1,
                start_localSGD_iter=3,
                model_averaging_period=4,
            )

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.accelerator.unwrap_model(self.model).state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def accelerate_difference(rank: int, directory: str, kind: str, noise: bool) -> float:
    """Largest difference of a weight or buffer between three epochs, and three of which the last two were done after
    ``load_state`` in a new model, with other generators and initial weights."""
    whole = AccelerateRun(rank, kind, noise, 1)
    whole.train(1)
    whole.accelerator.save_state(directory)
    whole.train(2)
    resumed = AccelerateRun(rank, kind, noise, 77)
    resumed.accelerator.load_state(directory)
    resumed.train(2)
    return largest_difference(whole.state(), resumed.state())


def accelerate_refusal(rank: int, directory: str, what: str) -> str:
    """The message of the error that ``what`` is answered with."""
    try:
        run = AccelerateRun(rank, "own", False, 1)
        if what == "twice":
            ours.manage(run.accelerator, run.model, "allreduce")
        elif what == "not prepared":
            ours.manage(run.accelerator, nn.Linear(2, 2), "allreduce")
        elif what == "file is gone":
            run.train(1)
            run.accelerator.save_state(directory)
            Path(directory, f"ratchet_hook_{rank}.safetensors").unlink()
            AccelerateRun(rank, "own", False, 2).accelerator.load_state(directory)
        elif what in ("no rank's state", "half a rank's state"):
            found: Any = {"version": 1, "rank": rank} if "half" in what else [rank]
            save_state(f"{directory}/{rank}/ratchet_hook_0.safetensors", found)
            _Bare(dist.group.WORLD, 7, True, "powerSGD").file.load(f"{directory}/{rank}")
        elif what == "another hook":
            run.train(1)
            run.accelerator.save_state(directory)
            AccelerateRun(rank, "taken over", False, 2).accelerator.load_state(directory)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals_with_scaler(rank: int) -> tuple[list[str], str]:
    """What each of two attempts to train post_localSGD with a gradient scaler is answered with, and the hook that is accepted
    after that."""
    run = AccelerateRun(rank, "none", False, 1)
    run.accelerator.scaler = torch.amp.GradScaler("cpu")  # Accelerate itself makes one on a GPU only
    said = []
    for _ in range(2):
        try:
            ours.manage(run.accelerator, run.model, "post_localSGD", subgroup_size=1)
        except ValueError as error:
            said.append(str(error))
    return said, ours.manage(run.accelerator, run.model, "allreduce").spec.name


def load_on_one_rank(rank: int, directory: str, redistribute: bool, hook: str = "powerSGD") -> dict[str, Any]:
    """What two ranks saved, loaded by this rank as the only one of a group of its own; or the error's message."""
    whole = _Bare(None, rank, False, hook)
    for _ in range(4):
        whole.step()
    whole.file.save(directory)
    dist.barrier()  # each reads the other's file
    groups = [dist.new_group([member]) for member in range(2)]
    alone = _Bare(groups[rank], 7, redistribute, hook)
    saved = [load_state(f"{directory}/ratchet_hook_{member}.safetensors")["hook"] for member in range(2)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            alone.file.load(directory)
        except ValueError as error:
            return {"refused": str(error)}
    tensors, data = capture(alone.ddp)
    alone.step()
    means = {n: torch.stack([p[0][n].double() for p in saved]).mean(0).float() for n in tensors if "residual" in n}
    return {
        "said": [str(one.message) for one in said],
        "apart": min(float((saved[0][0][n] - saved[1][0][n]).abs().max()) for n in means),
        "means": [torch.equal(tensors[name], mean) for name, mean in means.items()],
        "rest": [torch.equal(tensors[name], saved[0][0][name]) for name in tensors.keys() - means],
        "iteration": data["iteration"] == saved[0][1]["iteration"],  # type: ignore[index,call-overload]
    }


class _Bare:
    """What Accelerate or the Trainer train, on a group of any size."""

    def __init__(self, group: dist.ProcessGroup | None, seed_: int, redistribute: bool, hook: str) -> None:
        seed(seed_)
        self.ddp = nn.parallel.DistributedDataParallel(nn.Linear(32, 16), process_group=group)
        register(self.ddp, hook, **({"start_powerSGD_iter": 2} if hook == "powerSGD" else {"subgroup_size": 1}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.file = RankFile(self.ddp, [self.optimizer], redistribute=redistribute)

    def step(self) -> None:
        self.ddp(torch.randn(8, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def trainer_difference(rank: int, directory: str, kind: str, step: int) -> float:
    """The same for the Trainer: three epochs, and a new model that goes on from its checkpoint of ``step``."""
    whole = _train(rank, f"{directory}/whole", kind, None, 1)
    dist.barrier()
    resumed = _train(rank, f"{directory}/resumed", kind, f"{directory}/whole/checkpoint-{step}", 77)
    return largest_difference(whole, resumed)


def trainer_refusal(rank: int, directory: str) -> str:
    """What is said of a checkpoint without hook state."""
    _train(rank, f"{directory}/whole", "none", None, 1)
    dist.barrier()
    try:
        _train(rank, f"{directory}/resumed", "powerSGD", f"{directory}/whole/checkpoint-6", 2)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def resume_trainer_in_session(
    rank: int, directory: str, recorded_by: str, ended: bool
) -> tuple[bool, int, list[float]]:
    """A Trainer of job ``mine`` begins with what a Trainer of ``recorded_by`` saved, whose training had ``ended`` or not. Before
    its first step ``eval_on_start`` finds what the last evaluation had found, which patience 1 takes for the end. Is it the end,
    how often has the patience been tried, and what has a callback of its own collected?"""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from ratchet_worker.integrations.transformers import _Progress

    class Collects(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.scores = [4.0]

        def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
            self.scores.append(metrics["eval_score"])

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"scores": self.scores}}

    patience, collects = EarlyStoppingCallback(1), Collects()
    args = TrainingArguments(
        directory, use_cpu=True, report_to="none", metric_for_best_model="score", greater_is_better=True
    )
    trainer: Any = Trainer(nn.Linear(1, 1), args, callbacks=[patience, collects])
    chosen = SimpleNamespace(manifest=SimpleNamespace(job_id=recorded_by))
    runtime = SimpleNamespace(chosen=chosen, launch=SimpleNamespace(job_id="mine"), is_extended=False)
    trainer.session, trainer._runtime = SimpleNamespace(_runtime=runtime), runtime
    trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
    trainer.state.best_metric, trainer.control.should_training_stop = 5.0, ended
    recorded, progress = _Progress(trainer).state_dict(), _Progress(trainer)
    progress.load_state_dict(recorded)
    trainer.control.should_training_stop = False  # as train() begins
    trainer.callback_handler.on_evaluate(args, trainer.state, trainer.control, {"eval_score": 5.0})
    assert trainer.control.should_training_stop
    progress.undo_trainer_changes()
    assert progress.ended == trainer.control.should_training_stop
    return progress.ended, patience.early_stopping_patience_counter, collects.scores


def trainer_refusals_with_scaler(rank: int, directory: str) -> list[str]:
    """What the Trainer says of post_localSGD with a gradient scaler: in ``train``, where the callback's hook is read, and in
    another ``train``."""
    trainer = _make_trainer(rank, directory, 1)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # Accelerate itself makes one on a GPU only
    from ratchet_hooks.integrations.transformers import manage

    callback = manage(trainer, "post_localSGD", subgroup_size=1)
    said = []
    for attempt in (trainer.train, lambda: callback.hook, trainer.train):
        try:
            attempt()
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return said


def _train(rank: int, directory: str, kind: str, resume: str | None, begin: int) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = _make_trainer(rank, directory, begin)
        from ratchet_hooks.integrations.transformers import manage

        if kind == "powerSGD":
            manage(trainer, "powerSGD", start_powerSGD_iter=2)
        elif kind == "post_localSGD":
            manage(trainer, "post_localSGD", subgroup_size=1, start_localSGD_iter=3, model_averaging_period=4)
        elif kind == "plain":
            trainer.add_callback(_stock_hook_callback(trainer))
        trainer.train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def _make_trainer(rank: int, directory: str, begin: int) -> Any:
    set_torchrun_environment(rank)
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    seed(begin + rank)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(50, (12,), generator=generator), "labels": int(i % 3)} for i in range(BATCHES * 16)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = TrainingArguments(
            output_dir=directory, use_cpu=True, num_train_epochs=3, per_device_train_batch_size=8, save_strategy="steps",
            save_steps=3, report_to=[], disable_tqdm=True, learning_rate=1e-2, logging_strategy="no", seed=begin,
            data_seed=5, ddp_backend="gloo", ddp_find_unused_parameters=False,
        )  # fmt: skip
        return Trainer(model=model, args=args, train_dataset=data)


def _stock_hook_callback(trainer: Any) -> Any:
    """What a user would write to have a hook in the Trainer: torch's, registered when training begins."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
    from transformers import TrainerCallback

    class Stock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            made = power_sgd.PowerSGDState(None, start_powerSGD_iter=2)
            trainer.model_wrapped.register_comm_hook(made, power_sgd.powerSGD_hook)

    return Stock()
