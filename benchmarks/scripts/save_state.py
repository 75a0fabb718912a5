"""What is saved when checkpoints are compared: 132 parameters with AdamW's state, and plain copies of their bytes. Only torch."""

from __future__ import annotations

import math
import mmap
from typing import Any, Final

import torch
from torch import nn

BLOCKS: Final = 44
CHUNK: Final = 4 << 20  # bytes of one system call


class Block(nn.Module):
    """Three parameters: a matrix, its bias and the gain of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def width_of(megabytes: int) -> int:
    """Of the net whose parameters, with both averages of AdamW, are at least so many million bytes."""
    per_block = megabytes * 1e6 / (3 * 4 * BLOCKS)  # elements
    return math.ceil(math.sqrt(per_block + 1) - 1)  # w * w + 2 w


def net(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)))


def live_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of both states under a name of its own, not copied: 132 parameters, 264 averages, 132 counters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    out = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        out |= {f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()}
    return out


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As people hand it to ``torch.save``."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class Copy:
    """A plain copy of the tensors, or of the ``rank``-th of ``ranks`` equal shares, into one buffer whose pages are there."""

    def __init__(self, tensors: list[torch.Tensor], buffer: torch.Tensor, rank: int = 0, ranks: int = 1) -> None:
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        total = sum(part.numel() for part in flat)
        begin, end = total * rank // ranks, total * (rank + 1) // ranks
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        position = filled = 0
        for part in flat:
            piece = part[max(begin - position, 0) : max(end - position, 0)]
            self.pairs.append((buffer[filled : filled + piece.numel()], piece))
            position, filled = position + part.numel(), filled + piece.numel()
        self.nbytes = filled
        self.bytes = memoryview(buffer.numpy())[:filled]

    def __call__(self) -> None:
        for target, source in self.pairs:
            target.copy_(source)


def buffer_for(nbytes: int) -> torch.Tensor:
    """So many bytes, touched; they begin on a page."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)
