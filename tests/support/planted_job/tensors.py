"""Tensors that are no parameters and no buffers."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn
from training import WIDTH, Piece, Value


class Average(Piece):
    """Of the outputs, bound anew at every call."""

    def plant(self) -> None:
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        now = out.detach().mean(0)
        self.mean = now if self.mean is None else self.mean.lerp(now, 0.1)
        return out * (1 + self.mean)


class InPlace(Piece):
    def plant(self) -> None:
        self.level = torch.ones(WIDTH)

    def move(self) -> Value:
        return self.level.mul_(0.9).clone()


class ThroughData(Piece):
    """Changed behind torch's back."""

    def plant(self) -> None:
        self.level = torch.ones(WIDTH)

    def move(self) -> Value:
        self.level.data *= 0.9
        return self.level.clone()


class ThroughNumpy(Piece):
    def plant(self) -> None:
        self.level = torch.ones(WIDTH)

    def move(self) -> Value:
        self.level.numpy()[:] *= 0.9
        return self.level.clone()


class LargeThroughData(Piece):
    """1 MiB, whose changes torch does not count."""

    def plant(self) -> None:
        self.bank = torch.zeros(1 << 18)

    def move(self) -> Value:
        self.bank.data[77] += 0.1
        return float(self.bank[77])


class LargeThroughNumpy(Piece):
    def plant(self) -> None:
        self.bank = torch.zeros(1 << 18)
        self.view = self.bank.numpy()

    def move(self) -> Value:
        self.view[77] += 0.1
        return float(self.bank[77])


class Scalar(Piece):
    def plant(self) -> None:
        self.level = torch.tensor(0.5)

    def move(self) -> Value:
        return float(self.level.mul_(0.9))


class Half(Piece):
    def plant(self) -> None:
        self.level = torch.ones(WIDTH, dtype=torch.bfloat16)

    def move(self) -> Value:
        self.level.mul_(0.9)
        return self.level.float()


class Booleans(Piece):
    def plant(self) -> None:
        self.mask = torch.tensor([True, False, False, True])

    def move(self) -> Value:
        self.mask = self.mask.roll(1)
        self.mask[0] ^= True
        return self.mask.float()


class ComplexTensor(Piece):
    def plant(self) -> None:
        self.turn = torch.ones(WIDTH, dtype=torch.complex64)

    def move(self) -> Value:
        self.turn *= 0.8 + 0.6j
        return self.turn.real.clone()


class Conjugate(Piece):
    def plant(self) -> None:
        self.turn = torch.ones(WIDTH, dtype=torch.complex64)

    def move(self) -> Value:
        self.turn = (self.turn * (0.8 + 0.6j)).conj()
        return self.turn.imag.clone()


class Transposed(Piece):
    def plant(self) -> None:
        self.table = torch.zeros(WIDTH, 3).t()

    def move(self) -> Value:
        self.table[1] += 0.1
        return self.table.sum(0)


class Sparse(Piece):
    def plant(self) -> None:
        self.table = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (WIDTH,), check_invariants=True)

    def move(self) -> Value:
        self.table = (self.table * 0.9).coalesce()
        return self.table.to_dense()


class SparseRows(Piece):
    def plant(self) -> None:
        self.table = torch.eye(WIDTH).to_sparse_csr()

    def move(self) -> Value:
        self.table.values().mul_(0.9)
        return self.table.to_dense().sum(0)


class Quantized(Piece):
    def plant(self) -> None:
        self.level = torch.quantize_per_tensor(torch.ones(WIDTH), 0.05, 0, torch.qint8)

    def move(self) -> Value:
        now = self.level.dequantize() * 0.9
        self.level = torch.quantize_per_tensor(now, 0.05, 0, torch.qint8)
        return now


class Meter(torch.Tensor):
    """A subclass."""


class Subclass(Piece):
    def plant(self) -> None:
        self.level = torch.ones(WIDTH).as_subclass(Meter)

    def move(self) -> Value:
        self.level *= 0.9
        return self.level.as_subclass(torch.Tensor).clone()


class WithAttribute(Piece):
    """Python attributes of a tensor."""

    def plant(self) -> None:
        self.level = torch.ones(WIDTH)
        self.level.age = 0  # type: ignore[attr-defined]

    def move(self) -> Value:
        self.level.age += 1  # type: ignore[attr-defined]
        return self.level * (self.level.age / 10)  # type: ignore[attr-defined]


class OnParameter(Piece):
    """Python attributes of a parameter, as optimizers of the user's keep them."""

    def plant(self) -> None:
        self.layer.weight.calls = 0  # type: ignore[assignment]

    def move(self) -> Value:
        self.layer.weight.calls += 1  # type: ignore[operator, assignment]
        return self.layer.weight.calls / 10  # type: ignore[operator]


class OnBuffer(Piece):
    def plant(self) -> None:
        self.register_buffer("level", torch.ones(WIDTH))
        self.level.state = {"calls": 0}  # type: ignore[union-attr, assignment]

    def move(self) -> Value:
        self.level.state["calls"] += 1  # type: ignore[union-attr, index, operator]
        return self.level.state["calls"] / 10  # type: ignore[union-attr, index, operator]


class ViewOfParameter(Piece):
    """Of a row of the weight, which the forward reads."""

    def plant(self) -> None:
        self.row = self.layer.weight.detach()[1]

    def move(self) -> Value:
        return self.row.clone()


class ViewMadeInTraining(Piece):
    def plant(self) -> None:
        self.row: torch.Tensor | None = None

    def move(self) -> Value:
        if self.row is None:
            self.row = self.layer.weight.detach()[2]
        return self.row.clone()


class Snapshots(Piece):
    """Copies of a weight, taken now and then."""

    def plant(self) -> None:
        self.taken: list[torch.Tensor] = []

    def move(self) -> Value:
        self.taken.append(self.layer.weight.detach().mean(0).clone())
        return torch.stack(self.taken[-4:]).mean(0)


class SharedByModules(Piece):
    """One tensor in two layers."""

    class Reader(nn.Module):
        def __init__(self, level: torch.Tensor) -> None:
            super().__init__()
            self.level = level

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + self.level)

    def plant(self) -> None:
        self.level = torch.zeros(WIDTH)
        self.reader = self.Reader(self.level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level += 0.05
        return super().forward(self.reader(x))


class PartsOfOne(Piece):
    """Two views of one memory that is itself no attribute."""

    def plant(self) -> None:
        memory = torch.zeros(2 * WIDTH)
        self.left, self.right = memory[: WIDTH + 2], memory[2 : WIDTH + 2]

    def move(self) -> Value:
        self.left += 0.1
        return self.right.clone()


class LongListOfTensors(Piece):
    """The third of three hundred."""

    def plant(self) -> None:
        self.states = [torch.zeros(1) for _ in range(300)]

    def move(self) -> Value:
        self.states[2] += 0.1
        return float(self.states[2])


class SetOfTensors(Piece):
    def plant(self) -> None:
        self.level = torch.ones(WIDTH)
        self.watched = {self.level}

    def move(self) -> Value:
        (level,) = self.watched
        return level.mul_(0.9).clone()


class SetOfTensorsAlone(Piece):
    """Reached through the set only."""

    def plant(self) -> None:
        self.watched = {torch.ones(WIDTH)}

    def move(self) -> Value:
        (level,) = self.watched
        return level.mul_(0.9).clone()


class TensorAsKey(Piece):
    """A dictionary by tensor, as an optimizer keeps its state."""

    def plant(self) -> None:
        self.state: dict[torch.Tensor, dict[str, Any]] = {self.layer.weight: {"calls": 0}}

    def move(self) -> Value:
        self.state[self.layer.weight]["calls"] += 1
        return self.state[self.layer.weight]["calls"] / 10


class MemoryBank(Piece):
    """Keys of the last calls, as contrastive losses keep them."""

    def plant(self) -> None:
        self.keys, self.at = torch.zeros(8, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.keys[self.at % 8] = out.detach().mean(0)
        self.at += 1
        return out + self.keys.mean(0)


class Queue(Piece):
    """A queue of keys and an encoder of them, as MoCo has them, both plain attributes."""

    def plant(self) -> None:
        encoder = nn.Linear(WIDTH, WIDTH)
        object.__setattr__(self, "encoder", encoder.requires_grad_(False))
        self.queue = torch.zeros(0, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoder: nn.Linear = vars(self)["encoder"]
        with torch.no_grad():
            for old, new in zip(encoder.parameters(), self.layer.parameters(), strict=True):
                old.lerp_(new, 0.1)
            self.queue = torch.cat([encoder(x), self.queue])[:10]
        return super().forward(x) + self.queue.mean(0)


class Replay(Piece):
    """A buffer of past inputs, sampled from by position."""

    def plant(self) -> None:
        self.buffer: deque[torch.Tensor] = deque(maxlen=6)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.buffer.append(x.mean(0))
        return super().forward(x + self.buffer[self.calls * 7 % len(self.buffer)])


class WithGradient(Piece):
    """A tensor that is trained by hand, and is no parameter."""

    def plant(self) -> None:
        self.shift = torch.zeros(WIDTH, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift.grad is not None:
            with torch.no_grad():
                self.shift -= 0.1 * self.shift.grad
            self.shift.grad = None
        return super().forward(x + self.shift)


class KeptGradient(Piece):
    """A gradient that nobody sets to zero: the tensor's own."""

    def plant(self) -> None:
        self.shift = torch.zeros(WIDTH, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        felt = 0.0 if self.shift.grad is None else self.shift.grad.sign() / 10
        return super().forward(x + self.shift + felt)


class PackedSequence(Piece):
    """What an RNN left: its last state, across batches."""

    def plant(self) -> None:
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(x, None if self.state is None else self.state[: len(x)])
        self.state = state.detach()
        return super().forward(state)


class StorageAlone(Piece):
    """An untyped storage, which tensors are made over."""

    def plant(self) -> None:
        self.memory = torch.zeros(WIDTH).untyped_storage()

    def move(self) -> Value:
        level = torch.empty(0).set_(self.memory, 0, (WIDTH,))  # type: ignore[call-overload]
        level += 0.1
        return level.clone()
