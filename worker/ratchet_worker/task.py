"""The interface of a task: it provides model, optimizer, data and a loss. ``ratchet_worker`` runs the loop.

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

What Ratchet does at every step ``n`` (counted from 1), in this order:

1. ``accumulate`` times: take a batch, move it to the device, call ``loss(model, batch)``, divide the loss by ``accumulate``, and
   run the backward pass. Only the last backward pass synchronises the gradients.
2. ``before_step`` if the task has it, ``optimizer.step()`` (through the scaler), ``scheduler.step()``, ``zero_grad()``.
3. The step boundary, the only place where state is captured: a checkpoint if one is due, then an evaluation if one is due.

The model is built on every rank and rank 0's weights are broadcast, so all ranks begin equal. Generators of torch, CUDA, numpy
and ``random`` are seeded per rank before ``build``. Everything with state belongs into ``Parts``. Of other state, a resume
restores only attributes of the task and of its parts. Variables of modules, classes and functions are not restored; the
resume report names changes of them that were found.
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
    """What a task receives in ``build``. ``rank``: number of this process among all ``world_size`` processes of the job;
    ``local_rank``: its number on its node; ``device``: for the model; ``seed``: the job's, from which random streams are
    derived."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    seed: int


@runtime_checkable
class Stateful(Protocol):
    """An object with state that can be saved and restored. ``state_dict`` returns what ``ratchet_hooks.state.encode`` accepts,
    such as tensors, numbers, strings, and containers of these."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class TrainData(Protocol):
    """This rank's training data, whose position can be saved and restored.

    ``iter(data)`` yields this rank's batches from the current position to the end of the current epoch. A batch counts as
    consumed when it is yielded, not when it was prefetched. At the end of an epoch ``epoch`` grows by one and the position
    becomes 0, so that ``iter(data)`` again gives the next epoch. A second ``iter`` ends the first.

    ``steps_per_epoch``: number of batches of this rank in one epoch, equal on all ranks; None if it is not known. ``exact``:
    False for data that cannot continue exactly; the resume report then has the reason from ``inexact_reason``, if that attribute
    exists. ``state_dict`` returns what ``ratchet_hooks.state.encode`` accepts: the epoch, the position, and what identifies the
    order. ``load_state_dict`` raises ``ValueError``, with a sentence for the user, if it cannot continue that order.

    When the number of ranks has changed, ``load_resized(states)`` is called, if the object has it, with the old ranks' states in
    rank order; it must continue without repeating or leaving out a sample. Without that method the data start over, or the resume
    is refused (``policy.on_hook_mismatch``).
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
    """What a task builds. Everything with state is named here, and is restored after a kill.

    ``model``: a module on ``ctx.device``, without DDP; ``optimizer``: over the model's parameters; ``train``: this rank's data, a
    ``TrainLoader``, a ``TrainStream`` or an object that implements ``TrainData``; ``scaler``: the gradient scaler for automatic
    mixed precision in 16 bits. ``accumulate``: number of batches in one step, whose gradients are averaged.

    Exactly one of ``total_steps`` (optimizer steps) and ``epochs`` must be set; ``epochs`` needs ``train.steps_per_epoch``.
    ``evaluate_every`` is in steps (None: only at the end). ``scheduler.step()`` runs once per step. ``stateful`` holds further
    objects by name, each with ``state_dict`` and ``load_state_dict``; their state is saved per rank. ``digest`` identifies the
    data; it is recorded and compared at a resume.
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
        """The number of optimizer steps of the whole job. Raises ``ValueError`` if the parts do not determine a positive
        number."""
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
    """A training task, constructed as ``TaskClass(**spec.task.args)``. Optional methods, found by name:

    - ``evaluation() -> Iterable[batch]``: this rank's share of the evaluation data; called again for each evaluation.
    - ``evaluate(model, batch) -> dict[str, (sum, weight)]``: the batch's contribution to each metric. The metric is
      ``sum of sums / sum of weights`` over all batches and ranks. ``model`` is the module inside DDP, in eval mode and without
      gradients.
    - ``batch_to_device(batch, device) -> batch``: the default moves a tensor, or tensors inside lists, tuples and dicts.
    - ``before_step(model, optimizer, step) -> None``: called after the gradients are averaged (and unscaled), before
      ``optimizer.step()``; for gradient clipping.
    - ``parameter_shapes() -> list[tuple[int, ...]]``: shapes of the trained parameters, without building the model (a model built
      under ``torch.device("meta")`` takes no memory), for a dry run.
    """

    def build(self, ctx: TaskContext) -> Parts:
        """Build model, optimizer and data for the rank that ``ctx`` describes; called once per attempt, on every rank."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        """Return the loss of ``batch``, which is on the device already: a scalar tensor, or a pair of the loss and the metrics to
        log, by name. ``model`` is wrapped in DDP."""
        ...


class EvaluatingTask(Task, Protocol):
    """A task that can be evaluated: it has the optional methods ``evaluation`` and ``evaluate`` described at ``Task``."""

    def evaluation(self) -> Iterable[Any]: ...

    def evaluate(self, model: nn.Module, batch: Any) -> Sums: ...
