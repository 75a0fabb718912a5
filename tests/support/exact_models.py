"""Models and optimizers of ``tests.support.exact_runs``: small, with every peculiarity that a resume can trip over.

All take ``(x, spare, swap)``: x of shape (8, 36), whether this rank uses the layer ``spare`` in this step, and whether the two
middle layers run in the other order, so that gradients become ready in another order than in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

FEATURES, CLASSES = 36, 6


class Net(nn.Module):
    """Batch norm and dropout; ``head`` is registered first and used last, so that ready order is not registration order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(40, CLASSES)
        self.first = nn.Linear(FEATURES, 40)
        self.norm = nn.BatchNorm1d(40)
        self.drop = nn.Dropout(0.1)
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)
        self.spare = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, spare: bool, swap: bool) -> torch.Tensor:
        h = self.middle(self.stem(x), swap)
        if spare:
            h = h + self.spare(h)
        return self.tail(h)

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.norm(torch.relu(self.first(x))))
        return out

    def middle(self, h: torch.Tensor, swap: bool) -> torch.Tensor:
        one, other = (self.right, self.left) if swap else (self.left, self.right)
        return torch.tanh(other(torch.tanh(one(h))))

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(h).float()
        return out


class ChannelsLast(Net):
    """Convolutions whose weights, gradients and momenta lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.first = nn.Linear(64, 40)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 1, 6, 6).to(memory_format=torch.channels_last)
        return super().stem(torch.relu(self.two(torch.relu(self.one(images)))).flatten(1))


class Shared(Net):
    """Two layers with one weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(40, 40)
        self.frozen.requires_grad_(False)
        self.again = nn.Linear(40, 40)
        self.again.weight = self.left.weight

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        return super().tail(self.again(h) + self.frozen(h))


class Dtypes(Net):
    """float32, float64 and bfloat16 parameters: each rebuild ends with unfilled buckets of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(40, 40).double()
        self.narrow = nn.Linear(40, 40).bfloat16()

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast(h.device.type, enabled=False):
            h = self.wide(h.double()).float() + self.narrow(h.bfloat16()).float()
        return super().tail(h)


class Recompute(Net):
    """A part with dropout runs twice: torch's activation checkpointing repeats the forward in the backward."""

    def middle(self, h: torch.Tensor, swap: bool) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self._middle, h, swap, use_reentrant=False)
        return out

    def _middle(self, h: torch.Tensor, swap: bool) -> torch.Tensor:
        out: torch.Tensor = self.drop(super().middle(h, swap))
        return out


class Buffers(Net):
    """A buffer that no state_dict holds, one that is a new tensor after every step, and one that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(40), persistent=False)
        self.register_buffer("mean", torch.zeros(40))
        self.register_buffer("late", None)

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.late is None:
                self.late = h.mean(0).detach()
            self.shift.add_(h.mean(0).detach(), alpha=0.01)
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
            offset = self.late + self.shift + self.mean
        return super().tail(h + offset)


MODELS: dict[str, Callable[[], Net]] = {
    "plain": Net,
    "channels-last": ChannelsLast,
    "shared": Shared,
    "dtypes": Dtypes,
    "recompute": Recompute,
    "buffers": Buffers,
}


def _two(parameters: list[nn.Parameter]) -> list[Optimizer]:
    half = len(parameters) // 2
    return [
        torch.optim.SGD(parameters[:half], lr=0.05, momentum=0.9, nesterov=True),
        torch.optim.RMSprop(parameters[half:], lr=1e-3, centered=True, momentum=0.5),
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[Optimizer]]] = {
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.05, momentum=0.9)],
    "adam-foreach": lambda p: [torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True)],
    "adamw-fused": lambda p: [torch.optim.AdamW(p, lr=1e-3, fused=True)],
    "tensor-lr": lambda p: [torch.optim.Adam(p, lr=torch.tensor(1e-3))],
    "two": _two,
    # Two evaluations of the closure in each step; no limits, since they compare a rank's own loss.
    "lbfgs": lambda p: [
        torch.optim.LBFGS(p, lr=0.01, max_iter=2, history_size=3, tolerance_grad=0.0, tolerance_change=0.0)
    ],
}


def make_optimizers(kind: str, parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    return OPTIMIZERS[kind]([p for p in parameters if p.requires_grad])
