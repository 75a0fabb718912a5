"""What a task gives to Ratchet: model, optimizer, data and a loss. ``ratchet_worker`` runs the loop.

A complete task, in a file ``mine.py`` of the directory named by ``code.path``; the spec says
``task: {entrypoint: "mine:Mine", args: {width: 64}}``::

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from ratchet import Parts, TaskContext, TrainLoader

    def numbers(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
        return x, (x.sum(1) > 0).long()

    class Mine:
        def __init__(self, width: int = 32, steps: int = 1000) -> None:
            self.width, self.steps = width, steps

        def build(self, ctx: TaskContext) -> Parts:
            model = nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 2)).to(ctx.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
            data = TrainLoader(
                TensorDataset(*numbers(1000, 1)), batch_size=32, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size
            )
            self.share = slice(ctx.rank, None, ctx.world_size)
            return Parts(model, optimizer, data, total_steps=self.steps, scheduler=scheduler, evaluate_every=100)

        def loss(self, model, batch):
            x, y = batch
            out = model(x)
            return nn.functional.cross_entropy(out, y), {"accuracy": (out.argmax(1) == y).float().mean()}

        def evaluation(self):                       # optional: this rank's share of the evaluation data
            x, y = numbers(200, 2)
            yield x[self.share], y[self.share]

        def evaluate(self, model, batch):           # needed with evaluation(): per metric (sum, weight)
            x, y = batch
            return {"test_accuracy": (float((model(x).argmax(1) == y).sum()), float(len(y)))}

What Ratchet does with it, in this order, at every step ``n`` (counted from 1):

1. ``accumulate`` times: take a batch, move it to the device, ``loss(model, batch)``, backward (all but the last without
   synchronisation); the loss of each is divided by ``accumulate``.
2. ``before_step`` if the task has it, ``optimizer.step()`` (through the scaler), ``scheduler.step()``, ``zero_grad()``.
3. The step boundary: the only place where state is captured. Checkpoint if one is due, then evaluation if one is due.

The model is built on every rank and rank 0's weights are broadcast, so all ranks begin equal. Generators of torch, CUDA,
numpy and ``random`` are seeded per rank before ``build``. Whatever has state and is not in ``Parts`` cannot be restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

Metrics: TypeAlias = dict[str, float | torch.Tensor]
LossResult: TypeAlias = torch.Tensor | tuple[torch.Tensor, Metrics]
Sums: TypeAlias = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class TaskContext:
    """What a task may know when it builds. ``rank`` of ``world_size`` processes, ``local_rank`` among those of its node;
    ``device``: where the model belongs. ``seed`` is the job's; derive streams from it with rank, epoch and sample."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    seed: int


@runtime_checkable
class Stateful(Protocol):
    """Anything with state. ``state_dict`` is made of tensors, numbers, strings, bools, None, lists, tuples and dicts."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class TrainData(Protocol):
    """This rank's training data, which can give its position and take it back.

    ``iter(data)`` yields this rank's batches from the current position to the end of the current epoch. A batch counts as
    consumed when it is yielded, not when it was prefetched. At the end of the epoch ``epoch`` has grown by one and the
    position is 0, so that ``iter(data)`` again gives the next epoch. A second ``iter`` ends the first.

    ``steps_per_epoch`` is the number of batches of this rank in one epoch, equal on all ranks; None if it is not known.
    ``exact`` False (a stream that cannot seek): the resume report says that the data are not exact, and why is asked of
    ``inexact_reason`` if there is one. ``state_dict`` is what ``ratchet_hooks.codec`` takes: it holds the epoch,
    the position, and what identifies the order (seed, world size, batch size, number of samples); ``load_state_dict`` raises
    ``ValueError`` when it cannot continue that order, with a sentence that says what differs.

    When the number of ranks changed, ``load_resized(states)`` is called with the old ranks' states, in rank order, if the
    object has it, and must continue without giving a sample twice or leaving one out; otherwise the resume is refused,
    or the data begin anew under ``policy.on_hook_mismatch: reset`` and are reported as reset.
    """

    # Properties, so that a plain attribute fits as well as a computed one.
    @property
    def epoch(self) -> int: ...

    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def exact(self) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass
class Parts:
    """What a task builds. Everything with state is named here, and comes back bit for bit after a kill.

    ``model``: a module on ``ctx.device``, without DDP; ``optimizer`` over its parameters; ``train``: this rank's data, a
    ``TrainLoader``, a ``TrainStream`` or what fits ``TrainData``; ``scaler``: for automatic mixed precision in 16 bits.
    ``accumulate``: batches whose gradients make one step.

    Exactly one of ``total_steps`` (optimizer steps) and ``epochs`` is given; epochs need ``train.steps_per_epoch`` and make
    ``epochs * steps_per_epoch // accumulate`` steps. ``evaluate_every`` is in steps (None: only at the end).
    ``scheduler.step()`` runs once per optimizer step. ``stateful`` holds further objects by name, each with ``state_dict``
    and ``load_state_dict`` (an exponential moving average, a tokenizer's counters ...); their state is saved per rank.
    ``digest`` names the data (for instance a digest of the files); it is recorded and compared at a resume.
    """

    model: nn.Module
    optimizer: Optimizer
    train: TrainData
    total_steps: int | None = None
    epochs: int | None = None
    scheduler: Stateful | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    evaluate_every: int | None = None
    stateful: dict[str, Stateful] = field(default_factory=dict)
    digest: str | None = None

    def steps(self) -> int:
        """The number of optimizer steps of the whole job. Raises ``ValueError`` when the parts do not say it."""
        if (self.total_steps is None) == (self.epochs is None):
            raise ValueError("Parts needs exactly one of total_steps and epochs")
        if self.accumulate < 1:
            raise ValueError(f"Parts.accumulate must be >= 1, not {self.accumulate}")
        if self.total_steps is not None:
            total = self.total_steps
        else:
            assert self.epochs is not None
            if self.train.steps_per_epoch is None:
                raise ValueError("Parts.epochs needs train.steps_per_epoch; give total_steps instead")
            total = self.epochs * self.train.steps_per_epoch // self.accumulate
        if total < 1:
            raise ValueError(f"the task has {total} steps to do; there must be at least one")
        return total


class Task(Protocol):
    """Constructed as ``TaskClass(**spec.task.args)``. Optional methods, found by name:

    - ``evaluation() -> Iterable[batch]``: this rank's share; called anew for each evaluation.
    - ``evaluate(model, batch) -> dict[str, (sum, weight)]``: what the batch adds; over all batches and ranks the metric is
      ``sum of sums / sum of weights``. Runs without gradients, in eval mode, with rank 0's buffers when DDP broadcasts
      buffers, on the module beneath DDP; afterwards mode, buffers and generators are as before.
    - ``batch_to_device(batch, device) -> batch``: default: tensors inside lists, tuples and dicts are moved.
    - ``before_step(model, optimizer, step) -> None``: after the gradients are averaged (and unscaled), before
      ``optimizer.step()``: gradient clipping belongs here.
    - ``parameter_shapes() -> list[tuple[int, ...]]``: of the trained parameters, without building the model (``with
      torch.device("meta")`` makes one that has no memory). With it, a dry run tells what the hook's state will hold.
    """

    def build(self, ctx: TaskContext) -> Parts:
        """Model, optimizer and data for the rank that ``ctx`` describes; once per attempt, on every rank."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        """Of one ``batch``, as the data gave it, on the device; ``model`` is the DDP-wrapped one. Returns the loss (a scalar
        tensor), or it and metrics to log, by name."""
        ...


class EvaluatingTask(Task, Protocol):
    """A task that can be evaluated."""

    def evaluation(self) -> Iterable[Any]: ...

    def evaluate(self, model: nn.Module, batch: Any) -> Sums: ...
