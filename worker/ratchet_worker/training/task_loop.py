"""The training loop for tasks. The step boundary is in ``runtime``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ratchet_contract.errors import UserError
from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_worker.coordination.reporter import metric_value
from ratchet_worker.state.snapshot import Until
from ratchet_worker.task import LossResult, Metrics, Parts, Task, TaskContext
from ratchet_worker.training.runtime import Runtime


def run_task(runtime: Runtime, task: Task) -> None:
    """Build the task's parts, restore the state, train and evaluate to the end. Raises ``Stopped``, ``UserError``,
    ``StateError``, ``CheckpointError``, and what the task raises."""
    parts = _build(runtime, task)
    total = _steps(parts)
    check_parts(parts, static_graph=runtime.launch.spec.ddp.static_graph)
    ddp = runtime.wrap(parts.model)
    for component, item in _components(parts).items():
        runtime.state.register(component, item)
    runtime.state.task = task
    digest = getattr(parts.train, "data_digest", None)
    runtime.data_digest = parts.digest or (digest() if callable(digest) else None)
    runtime.restore(total)
    trainer = Trainer(runtime, task, parts, ddp)
    runtime.trial.expects_evaluation = hasattr(task, "evaluation") and parts.evaluate_every is not None
    if runtime.step > 0 and trainer.evaluation_due():
        trainer.evaluate()
    while not runtime.done:
        runtime.begin_step()
        trainer.train_step()
        runtime.end_step()
        trainer.log()
        if trainer.evaluation_due():
            trainer.evaluate()
    runtime.finish()


def _build(runtime: Runtime, task: Task) -> Parts:
    """Call the task's ``build`` and return its parts. Raises ``UserError`` if the result is not ``Parts``."""
    context = TaskContext(
        rank=runtime.rank,
        world_size=runtime.world_size,
        local_rank=runtime.local_rank,
        device=runtime.device,
        seed=runtime.launch.spec.seed,
    )
    parts = task.build(context)
    if not isinstance(parts, Parts):
        raise UserError(f"{type(task).__name__}.build must return ratchet.Parts, not {type(parts).__name__}")
    return parts


def _steps(parts: Parts) -> int:
    """Return the number of steps that the parts determine. Raises ``UserError`` if they do not."""
    try:
        return parts.steps()
    except ValueError as error:
        raise UserError(str(error)) from error


def check_parts(parts: Parts, *, static_graph: bool) -> None:
    """Raise ``UserError`` for parts that would fail in every attempt's first step, such as an optimizer that needs a closure."""
    if static_graph and parts.accumulate > 1:
        raise UserError(
            "Parts.accumulate uses no_sync, and ddp.static_graph learns the graph in the first backward, which must not be "
            "under no_sync: drop one of the two",
            code="unsupported-model",
        )
    closure = inspect.signature(parts.optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{type(parts.optimizer).__name__} needs a closure in every step, which the loop for tasks does not pass; write a "
            "script with a Session, whose loop is your own",
            code="unsupported-model",
        )


def _components(parts: Parts) -> dict[str, Any]:
    """Return the parts with state, except the model, by the names under which they are registered, such as ``user:<name>``."""
    out: dict[str, Any] = {"optimizer": parts.optimizer, "data": parts.train}
    if parts.scheduler is not None:
        out["scheduler"] = parts.scheduler
    if parts.scaler is not None:
        out["scaler"] = parts.scaler
    return out | {f"user:{name}": item for name, item in parts.stateful.items()}


class Trainer:
    """Trains and evaluates one task on one rank."""

    def __init__(self, runtime: Runtime, task: Task, parts: Parts, ddp: ManagedDDP) -> None:
        self._runtime, self._task, self._parts, self._ddp = runtime, task, parts, ddp
        self._batches: Iterator[Any] = runtime.batches(parts.train)
        self._to_device: Callable[[Any, torch.device], Any] = getattr(task, "batch_to_device", to_device)
        self._before_step: Callable[[nn.Module, Any, int], None] | None = getattr(task, "before_step", None)
        self._losses: list[tuple[torch.Tensor, Metrics]] = []

    def train_step(self) -> None:
        """Do one step: forward and backward of ``accumulate`` batches, then the optimizer. Keeps the losses for ``log``."""
        parts, count = self._parts, self._parts.accumulate
        self._losses = []
        for number in range(count):
            batch = self._to_device(next(self._batches), self._runtime.device)
            with self._ddp.no_sync() if number < count - 1 else contextlib.nullcontext():
                loss, metrics = _split_loss(self._task.loss(self._ddp, batch))
                scaled = loss / count if count > 1 else loss
                (parts.scaler.scale(scaled) if parts.scaler is not None else scaled).backward()  # type: ignore[no-untyped-call]
            self._losses.append((loss.detach(), metrics))
        self._optimizer_step()

    def _optimizer_step(self) -> None:
        """Call the task's ``before_step``, step the optimizer, the scaler and the scheduler, and clear the gradients."""
        parts = self._parts
        self._runtime.checkpointer.wait_until_copied(Until.STEP)
        if self._before_step is not None:
            if parts.scaler is not None:
                parts.scaler.unscale_(parts.optimizer)
            self._before_step(self._ddp.module, parts.optimizer, self._runtime.step + 1)
        if parts.scaler is not None:
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        else:
            parts.optimizer.step()
        step: Any = getattr(parts.scheduler, "step", None)
        if step is not None:
            step()
        parts.optimizer.zero_grad()

    def log(self) -> None:
        """On rank 0, log the learning rates and the means of the last step's metrics, if they are due."""
        runtime = self._runtime
        due = runtime.reporter.metrics_due(runtime.step, runtime.total) or runtime.is_judged
        if runtime.rank != 0 or not due:
            return
        values: dict[str, list[float]] = {}
        for loss, metrics in self._losses:
            for name, value in {"loss": loss, **metrics}.items():
                values.setdefault(name, []).append(metric_value(name, value))
        rates = {
            f"lr/{i}" if i else "lr": float(g["lr"])
            for i, g in enumerate(self._parts.optimizer.param_groups)
            if "lr" in g
        }
        runtime.log({**{name: sum(v) / len(v) for name, v in values.items()}, **rates})

    def evaluation_due(self) -> bool:
        """True if the task must be evaluated now: after every ``evaluate_every`` steps, and after the job's last step."""
        if not hasattr(self._task, "evaluation"):
            return False
        every, step = self._parts.evaluate_every, self._runtime.step
        return self._runtime.done or (every is not None and step % every == 0)

    def evaluate(self) -> None:
        """Evaluate the task on all ranks, and log the averages. If a stop cuts that short, nothing is logged."""
        task: Any = self._task
        with self._runtime.evaluating() as evaluation:
            sums: dict[str, tuple[float, float]] = {}
            for batch in evaluation.batches(task.evaluation()):
                found = task.evaluate(self._ddp.module, self._to_device(batch, self._runtime.device))
                for name, (total, weight) in found.items():
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = (before[0] + metric_value(name, total), before[1] + float(weight))
            self._runtime.log({**evaluation.averages(sums)})


def _split_loss(result: LossResult) -> tuple[torch.Tensor, Metrics]:
    """Return loss and metrics from the result of ``loss()``. Raises ``UserError`` unless the loss is a tensor of one element."""
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UserError("loss() must return a scalar tensor, or a scalar tensor and a dict of metrics")
    return loss, metrics


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors, also those inside lists, tuples and dicts, moved to ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
