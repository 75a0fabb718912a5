"""Schedulers and what they call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR, SequentialLR, StepLR
from training import Training


class Callable(Training):
    """LambdaLR with an object of the user's, of which torch saves ``__dict__``."""

    class Falling:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, step: int) -> float:
            self.calls += 1
            return 1 / self.calls

    def scheduler(self, optimizer: Optimizer) -> Any:
        return LambdaLR(optimizer, self.Falling())


class CallableWithGenerator(Training):
    class Shaking:
        def __init__(self) -> None:
            self.noise = torch.Generator().manual_seed(2)

        def __call__(self, step: int) -> float:
            return float(torch.rand(1, generator=self.noise))

    def scheduler(self, optimizer: Optimizer) -> Any:
        return LambdaLR(optimizer, self.Shaking())


class Closure(Training):
    """LambdaLR with a closure that counts, of which torch saves nothing."""

    def scheduler(self, optimizer: Optimizer) -> Any:
        calls = 0

        def falling(step: int) -> float:
            nonlocal calls
            calls += 1
            return 1 / calls

        return LambdaLR(optimizer, falling)


class BoundMethod(Training):
    """LambdaLR with a method of an object that counts."""

    class Curve:
        def __init__(self) -> None:
            self.level = 1.0

        def at(self, step: int) -> float:
            self.level *= 0.9
            return self.level

    def scheduler(self, optimizer: Optimizer) -> Any:
        return LambdaLR(optimizer, self.Curve().at)


class OwnWithout(Training):
    """A scheduler that is no torch's and has no ``state_dict`` of its own, in a registered holder."""

    class Warm:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer, self.calls = optimizer, 0

        def step(self) -> None:
            self.calls += 1
            self.optimizer.param_groups[0]["lr"] = 0.01 * self.calls

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def scheduler(self, optimizer: Optimizer) -> Any:
        return self.Warm(optimizer)


class OwnSubclass(Training):
    """A subclass of torch's that keeps its state apart from ``state_dict``."""

    class Bumpy(LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.bumps = [1.0]
            super().__init__(optimizer)

        def get_lr(self) -> list[float | torch.Tensor]:
            self.bumps.append(self.bumps[-1] * 0.9)
            return [base * self.bumps[-1] for base in self.base_lrs]

        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": self.last_epoch}

    def scheduler(self, optimizer: Optimizer) -> Any:
        return self.Bumpy(optimizer)


class Multi(Training):
    def scheduler(self, optimizer: Optimizer) -> Any:
        return SequentialLR(optimizer, [StepLR(optimizer, 2), MultiStepLR(optimizer, [2, 3, 7])], milestones=[5])


class Cycle(Training):
    """Changes the momentum as well."""

    def scheduler(self, optimizer: Optimizer) -> Any:
        return OneCycleLR(optimizer, 0.1, total_steps=20)


class InTask(Training):
    """A scheduler that the task steps itself and has not told anybody of."""

    def optimizer(self, net: nn.Module) -> Optimizer:
        optimizer = super().optimizer(net)
        self.falling = StepLR(optimizer, 3, 0.5)
        return optimizer

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        self.falling.step()


class InOptimizer(Training):
    """A scheduler that a subclass of the optimizer holds and steps."""

    class Scheduled(torch.optim.SGD):
        def __init__(self, parameters: Any, **named: Any) -> None:
            super().__init__(parameters, **named)
            self.falling = StepLR(self, 2, 0.7)

        def step(self, closure: Any = None) -> Any:
            out = super().step(closure)
            if hasattr(self, "falling"):
                self.falling.step()
            return out

    def optimizer(self, net: nn.Module) -> Optimizer:
        return self.Scheduled(net.parameters(), lr=0.1, momentum=0.9)
