"""State behind hooks of torch: what their functions hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from training import WIDTH, Piece, Training


class InForwardHook(Piece):
    """The number of calls, in the closure of the hook."""

    def plant(self) -> None:
        calls = 0

        def scale(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return output * (1 + calls / 10)

        self.layer.register_forward_hook(scale)


class InForwardPreHook(Piece):
    def plant(self) -> None:
        noise = torch.Generator().manual_seed(1)

        def shake(module: nn.Module, args: Any) -> torch.Tensor:
            x: torch.Tensor = args[0]
            return x + torch.randn(x.shape, generator=noise)

        self.layer.register_forward_pre_hook(shake)


class InBackwardHook(Piece):
    def plant(self) -> None:
        calls = 0

        def fade(module: nn.Module, into: Any, out: Any) -> Any:
            nonlocal calls
            calls += 1
            return tuple(g if g is None else g / calls for g in into)

        self.layer.register_full_backward_hook(fade)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.requires_grad_()) + self.layer(self.layer(x))


class InTensorHook(Piece):
    def plant(self) -> None:
        calls = 0

        def fade(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return gradient / calls

        self.layer.weight.register_hook(fade)


class ByObject(Piece):
    """A hook that is an object with state."""

    class Fade:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return output / (1 + self.calls / 10)

    def plant(self) -> None:
        self.layer.register_forward_hook(self.Fade())


class ByBoundMethod(Piece):
    class Fade:
        def __init__(self) -> None:
            self.mean = torch.zeros(WIDTH)

        def apply(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            self.mean = self.mean.lerp(output.detach().mean(0), 0.1)
            return output - self.mean

    def plant(self) -> None:
        self.layer.register_forward_hook(self.Fade().apply)


class ObjectInClosure(Piece):
    def plant(self) -> None:
        state = {"calls": 0}

        def scale(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            state["calls"] += 1
            return output * (1 + state["calls"] / 10)

        self.layer.register_forward_hook(scale)


class TensorHookByObject(Piece):
    """Clips by a running norm of the gradients."""

    class Clip:
        def __init__(self) -> None:
            self.norm = 1.0

        def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
            self.norm = 0.9 * self.norm + 0.1 * float(gradient.norm())
            return gradient / self.norm

    def plant(self) -> None:
        self.layer.weight.register_hook(self.Clip())


class AddedInTraining(Piece):
    """A hook from the fourth call on."""

    def plant(self) -> None:
        self.calls = 0

    @staticmethod
    def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4:
            self.layer.register_forward_hook(self.double)
        return super().forward(x) + self.layer(x)


class RemovedInTraining(Piece):
    def plant(self) -> None:
        self.calls = 0
        self.handle = self.layer.register_forward_hook(AddedInTraining.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4:
            self.handle.remove()
        return super().forward(x) + self.layer(x)


class AccumulatedGradient(Training):
    """``register_post_accumulate_grad_hook`` with a count."""

    def net(self) -> nn.Module:
        net, calls = Piece(), [0]

        def fade(parameter: torch.Tensor) -> None:
            calls[0] += 1
            assert parameter.grad is not None
            parameter.grad /= 1 + calls[0] / 10

        net.layer.weight.register_post_accumulate_grad_hook(fade)
        return net


class OfOptimizer(Training):
    """A hook before the optimizer's step."""

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        optimizer, calls = super().optimizer(net), 0

        def warm(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
            nonlocal calls
            calls += 1
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, calls / 10) * 0.05

        optimizer.register_step_pre_hook(warm)
        return optimizer


class BehindOptimizer(Training):
    """A hook behind the optimizer's step, with slow weights in its closure."""

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(net)
        slow = [p.detach().clone() for p in net.parameters()]

        def pull(optimizer: torch.optim.Optimizer, args: Any, named: Any) -> None:
            with torch.no_grad():
                for old, now in zip(slow, net.parameters(), strict=True):
                    old.lerp_(now, 0.2)
                    now.lerp_(old, 0.1)

        optimizer.register_step_post_hook(pull)
        return optimizer


class OfStateDict(Piece):
    """A hook of ``state_dict`` is called by saves alone, and must not matter; a number beside it does."""

    def plant(self) -> None:
        self.calls = 0
        self.register_state_dict_post_hook(lambda module, state, prefix, local: None)

    def move(self) -> float:
        self.calls += 1
        return self.calls / 10


class Functional(Training):
    """A loss function that is a closure with a count."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        calls = 0

        def scaled(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return (found - wanted).square().mean() * (1 + calls / 10)

        self.criterion = scaled

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return self.criterion(model(x), y)


class OfAutograd(Piece):
    """A function of autograd that keeps a count on its class."""

    class Scale(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            OfAutograd.Scale.calls += 1
            return x * (1 + OfAutograd.Scale.calls / 10)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.Scale.apply(self.layer(x))  # type: ignore[no-untyped-call]


class Saved(Piece):
    """Hooks that pack saved tensors, with a count."""

    def plant(self) -> None:
        self.calls = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor * (1 + self.calls / 1000) if tensor.is_floating_point() else tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return super().forward(x)
