"""Optimizers, scalers and gradients with more state than their ``state_dict`` tells."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from training import Piece, Training


class Counting(SGD):
    """Warms up by a counter of its own."""

    def __init__(self, parameters: Any, **named: Any) -> None:
        super().__init__(parameters, **named)
        self.t, self.rates = 0, [0.0]

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        self.rates.append(min(1.0, self.t / 10) * 0.05)
        for group in self.param_groups:
            group["lr"] = self.rates[-1]
        return super().step(closure)


class Counter(Training):
    def optimizer(self, net: nn.Module) -> Optimizer:
        return Counting(net.parameters(), lr=0.1, momentum=0.9)


class Multiplied(SGD):
    """A multiplier of the rate in an attribute, and slow weights in a list."""

    def __init__(self, parameters: Any, **named: Any) -> None:
        super().__init__(parameters, **named)
        self.multiplier = 1.0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.multiplier *= 0.9
        for group in self.param_groups:
            group["lr"] = 0.05 * self.multiplier
        out = super().step(closure)
        now = [p for group in self.param_groups for p in group["params"]]
        for old, p in zip(self.slow, now, strict=True):
            old.lerp_(p, 0.5)
            p.lerp_(old, 0.1)
        return out


class SlowWeights(Training):
    def optimizer(self, net: nn.Module) -> Optimizer:
        return Multiplied(net.parameters(), lr=0.1, momentum=0.9)


class Noisy(SGD):
    """Langevin dynamics with a generator of its own."""

    def __init__(self, parameters: Any, **named: Any) -> None:
        super().__init__(parameters, **named)
        self.generator = torch.Generator().manual_seed(9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.generator), alpha=0.01)
        return out


class Langevin(Training):
    def optimizer(self, net: nn.Module) -> Optimizer:
        return Noisy(net.parameters(), lr=0.05)


class Wrapper(Optimizer):
    """Lookahead, as it is often written: an optimizer around another one, which tells the inner one's state alone."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.steps = inner, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        out = self.inner.step(closure)  # type: ignore[arg-type]
        self.steps += 1
        if self.steps % 4 == 0:
            for group, slow in zip(self.inner.param_groups, self.slow, strict=True):
                for p, old in zip(group["params"], slow, strict=True):
                    old.lerp_(p, 0.5)
                    p.copy_(old)
        return out


class Lookahead(Training):
    def optimizer(self, net: nn.Module) -> Optimizer:
        return Wrapper(SGD(net.parameters(), lr=0.1, momentum=0.9))


class LookaheadState(Optimizer):
    """The same with slow weights in a ``state`` of its own, a defaultdict of the parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.cache: dict[torch.Tensor, torch.Tensor] = {}
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                old = self.cache.setdefault(p, p.detach().clone())
                if self.steps % 3 == 0:
                    p.copy_(old.lerp_(p, 0.5))


class LookaheadInner(Training):
    """An inner optimizer with momentum as an attribute."""

    def optimizer(self, net: nn.Module) -> Optimizer:
        return LookaheadState(net.parameters(), lr=0.1)


class Lazy(SGD):
    """State that appears in the fourth step."""

    t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        out = super().step(closure)
        if self.t >= 4:
            for group in self.param_groups:
                for p in group["params"]:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p, 0.2)
                    p.lerp_(average, 0.05)
        return out


class LazyState(Training):
    def optimizer(self, net: nn.Module) -> Optimizer:
        return Lazy(net.parameters(), lr=0.1, momentum=0.9)


class Listed(SGD):
    """Python lists and numbers in ``state``."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                norms = self.state[p].setdefault("norms", [])
                norms.append(float(p.grad.norm()))
                p.grad /= 1 + max(norms[-5:])
        return super().step(closure)


class ListState(Training):
    def optimizer(self, net: nn.Module) -> Optimizer:
        return Listed(net.parameters(), lr=0.1)


class GroupAttribute(Training):
    """A number that the loop keeps in a parameter group."""

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        group = optimizer.param_groups[0]
        group["seen"] = group.get("seen", 0) + 1
        group["lr"] = 0.05 / group["seen"]


class Defaults(Training):
    """``optimizer.defaults`` is changed, and read."""

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.defaults["lr"] *= 0.9
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"]


class OnOptimizer(Training):
    """A number that the loop hangs on an optimizer of torch's class."""

    def before_step(self, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.seen = getattr(optimizer, "seen", 0) + 1
        optimizer.param_groups[0]["lr"] = 0.1 / optimizer.seen


class Swapped(Training):
    """Momentum is switched on in training, and the order of the groups' parameters stays."""

    def optimizer(self, net: nn.Module) -> Optimizer:
        self.seen = [0]
        return Adam(net.parameters(), lr=0.05, amsgrad=False)

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.param_groups[0]["betas"] = (0.9 if step < 5 else 0.5, 0.999)


class Accumulated(Training):
    """Gradients of the step before are kept: a momentum by hand in the parameters' attributes."""

    def before_step(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        for p in model.parameters():
            before = getattr(p, "kept", None)
            assert p.grad is not None
            p.kept = p.grad.clone() if before is None else 0.5 * before + p.grad  # type: ignore[attr-defined]
            p.grad.copy_(p.kept)  # type: ignore[attr-defined]


class KeptInGrad(Training):
    """``zero_grad`` of the optimizer halves in place of clearing: gradients are state."""

    class Halving(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.detach_().mul_(0.5)

    def optimizer(self, net: nn.Module) -> Optimizer:
        return self.Halving(net.parameters(), lr=0.05)


class Sharpness(Training):
    """Two steps in one: climbs by the last step's gradients first, which the task keeps in the optimizer."""

    class Climbing(SGD):
        def __init__(self, parameters: Any, **named: Any) -> None:
            super().__init__(parameters, **named)
            self.old: dict[int, torch.Tensor] = {}

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            every = [p for group in self.param_groups for p in group["params"]]
            for number, p in enumerate(every):
                if number in self.old:
                    p.add_(self.old[number], alpha=-0.01)
                self.old[number] = p.grad.clone()
            return super().step(closure)

    def optimizer(self, net: nn.Module) -> Optimizer:
        return self.Climbing(net.parameters(), lr=0.05, momentum=0.5)


class Scaling(torch.amp.GradScaler):  # type: ignore[misc]
    """A scaler with a number of its own."""

    seen = 0

    def step(self, optimizer: Optimizer, *args: Any, **named: Any) -> Any:
        self.seen += 1
        optimizer.param_groups[0]["lr"] = 0.1 / self.seen
        return super().step(optimizer, *args, **named)


class Scaler(Training):
    def more(self) -> dict[str, Any]:
        self.scaler = Scaling("cpu", init_scale=16.0, growth_interval=3)
        return {"scaler": self.scaler}


class Registered(Training):
    """A registered object that tells half of its state."""

    class Meter:
        def __init__(self) -> None:
            self.calls, self.level = 0, 1.0

        def next(self) -> float:
            self.calls += 1
            self.level *= 0.9
            return self.level + self.calls / 10

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    def more(self) -> dict[str, Any]:
        self.meter = self.Meter()
        return {"stateful": {"meter": self.meter}}

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().value(model, batch) * self.meter.next()


class TensorRate(Training):
    """torch's own with all options, to be sure."""

    def optimizer(self, net: nn.Module) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.05), amsgrad=True, foreach=False)


class TwoOptimizers(Training):
    """An optimizer of two optimizers, as GANs and Muon have it."""

    class Both(Optimizer):
        def __init__(self, net: Piece) -> None:
            super().__init__([{"params": [*net.parameters()]}], {"lr": 0.05})
            self.members = [SGD(net.layer.parameters(), 0.05, 0.9), Adam(net.norm.parameters(), 0.05)]

        def step(self, closure: Any = None) -> Any:
            for member in self.members:
                member.step()

    def optimizer(self, net: nn.Module) -> Optimizer:
        assert isinstance(net, Piece)
        return self.Both(net)
