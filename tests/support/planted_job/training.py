"""A small training whose next weights depend on one planted piece of state, and the faults that interrupt it.

``Training`` is a task: 14 steps in epochs of 8, evaluated behind every third step; a subclass changes one part of it. ``Piece``
is its usual model: a linear layer whose output is moved by what ``move`` gives. The planted state is made by ``plant``.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import Dataset, TensorDataset

from ratchet_contract.paths import JobPaths
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.ipc.progress_counter import CounterReader
from ratchet_worker.state import hidden_state
from ratchet_worker.task import Parts, TaskContext

Value: TypeAlias = float | torch.Tensor
STEPS, SAVED, KILLED = 14, 6, 9
WIDTH = 4


class Fault:
    """What happens in the first attempt. ``way``: ``epoch`` (SIGKILL within step 9), ``preempt`` (a stop within step 10),
    ``evaluation`` (SIGKILL in the evaluation behind step 9), ``stop`` (a stop in that evaluation), ``none``. With ``-blind``
    behind it, state outside ``state_dict`` is neither saved nor named, in any attempt."""

    def __init__(self, way: str) -> None:
        self._paths, self._rank = JobPaths(Path.cwd().parent), int(os.environ["RANK"])
        self._way, _, blind = way.partition("-")
        if self._paths.attempt(2).root.exists():
            self._way = "none"
        if blind:
            hidden_state.HiddenState.changes = lambda self: hidden_state.Changes({}, [])  # type: ignore[method-assign]

    def in_step(self) -> None:
        if self._way == "epoch" and self._begun() == KILLED:
            self._kill()
        if self._way == "preempt" and self._begun() == KILLED + 1:
            self._stop()

    def in_evaluation(self) -> None:
        if self._way == "evaluation" and self._begun() == KILLED:
            self._kill()
        if self._way == "stop" and self._begun() == KILLED:
            self._stop()

    def _begun(self) -> int:
        reading = CounterReader(self._paths.attempt(1).counter(self._rank)).read()
        assert reading is not None
        return reading.started

    def _kill(self) -> None:
        _wait((self._paths.checkpoint(SAVED, 1) / "MANIFEST.json").exists, "the save to be committed")
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        """Returns when the rank has heard of it."""
        os.kill(os.getpid(), signal.SIGTERM)
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        _wait(lambda: store.check([f"freeze/0/{self._rank}"]), "the stop to be heard of")


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.002)


class Piece(nn.Module):
    """A model that ``move`` moves, in training and in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.plant()

    def plant(self) -> None:
        """Make the state."""

    def move(self) -> Value:
        """Take the state one step on. A number, or (WIDTH,)."""
        return 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x) * (1 + self.move()))


class Training:
    """``piece``: the class of the model."""

    def __init__(self, way: str, piece: type[Piece] = Piece) -> None:
        self.fault, self.piece = Fault(way), piece

    def build(self, context: TaskContext) -> Parts:
        torch.manual_seed(1)
        net = self.net()
        optimizer = self.optimizer(net)
        loader = {"batch_size": 4, "seed": 3, "rank": context.rank, "world_size": context.world_size}
        data = TrainLoader(self.samples(), **{**loader, **self.loading()})
        scheduler = self.scheduler(optimizer)
        return Parts(net, optimizer, data, total_steps=STEPS, scheduler=scheduler, evaluate_every=3, **self.more())

    def net(self) -> nn.Module:
        return self.piece()

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def samples(self) -> Dataset[Any]:
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5))
        return TensorDataset(x, x.roll(1, 1))

    def loading(self) -> dict[str, Any]:
        """Further arguments of the loader."""
        return {}

    def more(self) -> dict[str, Any]:
        """Further parts."""
        return {}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.fault.in_step()
        return self.value(model, batch)

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def evaluation(self) -> Iterator[Any]:
        for number in range(3):
            if number == 1:
                self.fault.in_evaluation()
            x = torch.full((4, WIDTH), float(number + 1), dtype=torch.float32)
            yield x, x

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        x, y = batch
        return {"distance": (float((model(x) - y).abs().sum()), float(len(x)))}


def planted(case: str, way: str) -> Training:
    """The task of a case, ``module:Class``, which is a ``Piece`` or a ``Training``."""
    module, name = case.split(":")
    found: Any = getattr(importlib.import_module(module), name)
    return Training(way, found) if issubclass(found, Piece) else found(way)
