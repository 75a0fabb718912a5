"""What training changes in the network itself: parts, modes, parametrizations, masks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import WIDTH, Piece, Training, Value


class DropoutRate(Piece):
    """Raised by a schedule."""

    def plant(self) -> None:
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.p = min(0.5, self.drop.p + 0.03)
        return super().forward(self.drop(x))


class BatchNormMomentum(Piece):
    def plant(self) -> None:
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.batch.momentum is not None:
            self.batch.momentum *= 0.8
        return super().forward(self.batch(x)) + self.batch.running_mean


class TeacherInList(Piece):
    def plant(self) -> None:
        self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, now in zip(self.teacher[0].parameters(), self.layer.parameters(), strict=True):
                old.lerp_(now, 0.1)
        return super().forward(x) - self.teacher[0](x)


class TeacherInObject(Piece):
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.updates = copy.deepcopy(model).requires_grad_(False), 0

        @torch.no_grad()
        def update(self, model: nn.Module) -> None:
            self.updates += 1
            decay = min(0.9, self.updates / (self.updates + 5))
            for old, now in zip(self.model.parameters(), model.parameters(), strict=True):
                old.mul_(decay).add_(now, alpha=1 - decay)

    def plant(self) -> None:
        self.average = self.Average(self.layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.update(self.layer)
        return super().forward(x) - self.average.model(x)


class AveragedInList(Piece):
    """torch's own average, hidden from ``modules()``."""

    def plant(self) -> None:
        self.averaged = [AveragedModel(self.layer, multi_avg_fn=get_ema_multi_avg_fn(0.8))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.averaged[0].update_parameters(self.layer)
        return super().forward(x) - self.averaged[0](x).detach()


class TeacherWithBatchNorm(Piece):
    """A hidden net with buffers, whose mode is switched too."""

    def plant(self) -> None:
        self.hidden = (nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).requires_grad_(False),)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            self.hidden[0].eval()
        return super().forward(x) + self.hidden[0](x)


class SwappedLayer(Piece):
    """One of two layers is in use; which one changes."""

    def plant(self) -> None:
        self.both = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.calls, self.used = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 5 == 0:
            self.used = 1 - self.used
        return super().forward(x) + self.both[self.used](x) + 0 * self.both[1 - self.used](x)


class OrderOfLayers(Piece):
    """The order of the parts of a module changes."""

    def plant(self) -> None:
        self.chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            parts = self.chain._modules
            parts["1"], parts["2"] = parts["2"], parts["1"]
        return super().forward(x) + self.chain(x)


class ActivationReplaced(Piece):
    def plant(self) -> None:
        self.activation: nn.Module = nn.Tanh()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            self.activation = nn.Sigmoid()
        return super().forward(self.activation(x))


class PartAdded(Piece):
    """A part without parameters is added in training."""

    def plant(self) -> None:
        self.extra = nn.Sequential()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            self.extra.append(nn.Tanh())
        return super().forward(self.extra(x))


class PartRemoved(Piece):
    def plant(self) -> None:
        self.extra: nn.Module | None = nn.Tanh()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            del self.extra
            self.extra = None
        return super().forward(x if self.extra is None else self.extra(x))


class Mode(Piece):
    """A part is put into eval mode in training."""

    def plant(self) -> None:
        self.batch = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.batch.train(self.calls < 5)
        return super().forward(self.batch(x))


class ModeAtOnce(Piece):
    """A part is put into eval mode once."""

    def plant(self) -> None:
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 4 and self.training:
            self.drop.eval()
        return super().forward(self.drop(x))


class Frozen(Piece):
    """A layer is frozen in training, and its gradient is none from then on."""

    def plant(self) -> None:
        self.extra, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        weight, bias = self.extra.weight, self.extra.bias
        if self.calls >= 5:
            weight, bias = weight.detach(), bias.detach()
        return (
            super().forward(x)
            + nn.functional.linear(x, weight, bias)
            + 0 * (self.extra.weight.sum() + self.extra.bias.sum())
        )


class ShapeOfBuffer(Piece):
    def plant(self) -> None:
        self.register_buffer("window", torch.zeros(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.window = torch.cat([self.window, out.detach().mean(0, keepdim=True)])[-6:]
        return out + self.window.mean(0)


class NotPersistent(Piece):
    def plant(self) -> None:
        self.register_buffer("level", torch.ones(WIDTH), persistent=False)

    def move(self) -> Value:
        self.level *= 0.9
        return self.level.clone()


class BufferAdded(Piece):
    """In training."""

    def plant(self) -> None:
        self.calls = 0

    def move(self) -> Value:
        self.calls += 1
        if self.calls == 3:
            self.register_buffer("level", torch.ones(WIDTH))
        return self.level.mul_(0.9).clone() if self.calls >= 3 else 0.0  # type: ignore[operator]


class SpectralNorm(Piece):
    """The old form: u and v are buffers, the weight an attribute."""

    def plant(self) -> None:
        self.extra = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra(x)


class SpectralNormNew(Piece):
    def plant(self) -> None:
        self.extra = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra(x)


class WeightNorm(Piece):
    def plant(self) -> None:
        self.extra = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra(x)


class OrthogonalWeight(Piece):
    def plant(self) -> None:
        self.extra = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra(x)


class OwnParametrization(Piece):
    """With a number of its own."""

    class Cooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.temperature *= 0.97
            return weight * self.temperature

    def plant(self) -> None:
        self.extra = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.extra, "weight", self.Cooling())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra(x)


class Pruned(Piece):
    """Pruned further in training: the mask is a buffer, the weight an attribute."""

    def plant(self) -> None:
        self.extra, self.calls = nn.Linear(WIDTH, WIDTH), 0
        prune.random_unstructured(self.extra, "weight", 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls % 4 == 0 and self.training:
            kept = self.extra.weight_mask.view(-1)  # type: ignore[operator]
            kept[self.calls % len(kept)] = 0
        return super().forward(x) + self.extra(x)


class PruneCalled(Piece):
    """``prune`` is called again in training, which makes a container of methods."""

    def plant(self) -> None:
        self.extra, self.calls = nn.Linear(WIDTH, WIDTH), 0
        prune.identity(self.extra, "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls % 4 == 0 and self.training:
            prune.l1_unstructured(self.extra, "weight", amount=2)
        return super().forward(x) + self.extra(x)


class OwnMask(Piece):
    def plant(self) -> None:
        self.mask, self.calls = torch.ones(WIDTH, WIDTH, dtype=torch.bool), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.mask.view(-1)[self.calls % 16] = False
        return super().forward(x) + nn.functional.linear(x, self.layer.weight * self.mask)


class Recurrent(Piece):
    """A state of an RNN over batches, in an attribute that it had from the start."""

    def plant(self) -> None:
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.state: Any = (torch.zeros(1, 1, WIDTH), torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, state = self.rnn(x.unsqueeze(0), self.state)
        self.state = tuple(part.detach() for part in state)
        return super().forward(out.squeeze(0))


class Lazy(Piece):
    """Weights are made with the first batch, before the model is wrapped; a count is not."""

    def plant(self) -> None:
        self.lazy = nn.LazyLinear(WIDTH)
        self.lazy(torch.zeros(1, WIDTH))
        self.lazy.seen = 0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lazy.seen += 1  # type: ignore[operator, assignment]
        return super().forward(self.lazy(x) * (1 + self.lazy.seen / 10))  # type: ignore[operator]


class Scripted(Piece):
    """A module of TorchScript with a number."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * (1 + self.calls / 10)

    def plant(self) -> None:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner = torch.jit.script(self.Inner())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(x))


class RequiresGrad(Training):
    """A layer is frozen from the fifth step on; DDP looks for unused parameters."""

    def value(self, model: nn.Module, batch: Any) -> torch.Tensor:
        net: Any = model.module
        net.calls = getattr(net, "calls", 0) + 1
        if net.calls == 5:
            net.norm.requires_grad_(False)
        return super().value(model, batch)


class Progressive(Piece):
    """Depth grows: how many of the layers are used."""

    def plant(self) -> None:
        self.chain = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.depth = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.depth += 0.1
        out = x
        for number, layer in enumerate(self.chain):
            out = out + layer(out) * min(1.0, max(0.0, self.depth - number))
        return super().forward(out)
