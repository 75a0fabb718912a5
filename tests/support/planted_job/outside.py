"""State of the process: globals, functions, the environment, switches."""

from __future__ import annotations

import os
import random
import sys
import warnings
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from training import WIDTH, Piece, Training, Value

calls = 0
table: dict[str, float] = {"level": 0.0}
noise = torch.Generator().manual_seed(5)
level: ContextVar[float] = ContextVar("planted_level", default=1.0)
teacher: list[nn.Module] = []


class GlobalNumber(Piece):
    def move(self) -> Value:
        global calls
        calls += 1
        return calls / 10


class GlobalDictionary(Piece):
    def move(self) -> Value:
        table["level"] += 0.1
        return table["level"]


class GlobalGenerator(Piece):
    def move(self) -> Value:
        return torch.randn(WIDTH, generator=noise)


class GlobalContextVariable(Piece):
    def move(self) -> Value:
        level.set(level.get() * 0.9)
        return level.get()


class GlobalTeacher(Piece):
    """An average of the model in a list of the script."""

    def plant(self) -> None:
        teacher[:] = [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, now in zip(teacher[0].parameters(), self.layer.parameters(), strict=True):
                old.lerp_(now, 0.1)
            target = teacher[0](x)
        return super().forward(x) - target


def counted() -> float:
    counted.calls += 1  # type: ignore[attr-defined]
    return counted.calls / 10  # type: ignore[attr-defined, no-any-return]


counted.calls = 0  # type: ignore[attr-defined]


class FunctionAttribute(Piece):
    def move(self) -> Value:
        return counted()


def remembered(value: float, seen: list[float] = []) -> float:  # noqa: B006
    seen.append(value)
    return sum(seen)


class MutableDefault(Piece):
    def move(self) -> Value:
        return remembered(0.1)


class Lambda(Piece):
    """A default argument of an attribute's lambda."""

    def plant(self) -> None:
        self.level = lambda seen=[0.0]: seen.append(seen[-1] + 0.1) or seen[-1]

    def move(self) -> Value:
        return float(self.level())


class GlobalOfAnotherModule(Piece):
    """A variable that is put into a module of Python's."""

    def move(self) -> Value:
        sys.planted = getattr(sys, "planted", 0) + 1  # type: ignore[attr-defined]
        return float(sys.planted) / 10  # type: ignore[attr-defined]


class Environment(Piece):
    def plant(self) -> None:
        os.environ["PLANTED"] = "0"

    def move(self) -> Value:
        os.environ["PLANTED"] = str(int(os.environ["PLANTED"]) + 1)
        return int(os.environ["PLANTED"]) / 10


class Directory(Piece):
    """Changed in training."""

    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            Path("inner").mkdir(exist_ok=True)
            os.chdir("inner")
        return len(Path.cwd().name) / 10


class Warnings(Piece):
    """What is warned of once only."""

    def move(self) -> Value:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            warnings.warn("once", stacklevel=1)
            return len(seen) + 0.1


class ProcessGenerators(Piece):
    """torch's, numpy's and Python's own, which are saved anyway."""

    def move(self) -> Value:
        return torch.rand(WIDTH) + random.random() + float(np.random.rand())


class SeededInTraining(Piece):
    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls % 5 == 0:
            random.seed(self.calls)
            np.random.seed(self.calls)
            torch.manual_seed(self.calls)
        return torch.rand(WIDTH) + random.random() + float(np.random.randn())


class DefaultDtype(Piece):
    """Switched in training; the masks are made in it."""

    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            torch.set_default_dtype(torch.float64)
        return torch.rand(WIDTH).float()


class MatmulPrecision(Piece):
    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            torch.set_float32_matmul_precision("medium")
        return {"highest": 0.1, "high": 0.5, "medium": 0.9}[torch.get_float32_matmul_precision()]


class Denormals(Piece):
    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            torch.set_flush_denormal(True)
        return 1.0 if float(torch.tensor(1e-40) * 1.0) == 0.0 else 0.0


class Mkldnn(Piece):
    """A switch of a back end, which the code reads."""

    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            torch.backends.mkldnn.enabled = False
        return 1.0 if torch.backends.mkldnn.enabled else 0.0


class NumpyErrors(Piece):
    """How numpy handles errors, which the code reads."""

    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 4:
            np.seterr(divide="ignore")
        return 1.0 if np.geterr()["divide"] == "ignore" else 0.0


class TaskAttribute(Training):
    """A number of the task itself."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.calls = 0

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return super().value(model, batch) * (1 + self.calls / 10)


class TaskTeacher(Training):
    """An averaged net that only the task holds."""

    def net(self) -> nn.Module:
        torch.manual_seed(4)
        self.teacher = Piece().requires_grad_(False)
        return super().net()

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, _ = batch
        with torch.no_grad():
            for old, now in zip(self.teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(now, 0.1)
        return super().value(model, batch) + (model(x) - self.teacher(x)).square().mean()


class TaskGenerator(Training):
    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.noise = torch.Generator().manual_seed(1)

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().value(model, (x + torch.randn(x.shape, generator=self.noise), y))


class BeforeStep(Training):
    """Clips by a running norm, which ``before_step`` keeps in the task."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.norms: list[float] = []

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        nn.utils.clip_grad_norm_(model.parameters(), sum(self.norms) / len(self.norms))


class TaskCriterion(Training):
    """A loss that is a module of its own, with a temperature that falls."""

    class Cooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            self.temperature *= 0.9
            self.mean.lerp_(found.detach().mean(0), 0.1)  # type: ignore[operator]
            return ((found - wanted + self.mean) / self.temperature).square().mean()

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.criterion = self.Cooling()

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        found: torch.Tensor = self.criterion(model(x), y)
        return found
