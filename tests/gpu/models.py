"""ResNet-50, GPT-2 small and a U-Net: the usual operations of vision, language and segmentation. Only torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut (arXiv 1512.03385), the stride in the 3x3."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.one, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.two, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.three, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm1(self.one(x)))
        h = torch.relu(self.norm2(self.two(h)))
        return torch.relu(self.norm3(self.three(h)) + self.short(x))


class ResNet(nn.Module):
    """``blocks`` per stage; (3, 4, 6, 3) with ``width`` 64 is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, inside = list[nn.Module](), width
        for number, count in enumerate(blocks):
            for block in range(count):
                stages.append(Bottleneck(inside, width << number, 2 if block == 0 and number else 1))
                inside = 4 * (width << number)
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1)
        out: torch.Tensor = self.head(h)
        return out


class Block(nn.Module):
    """Causal attention and a feed-forward part, norms first, as GPT-2 has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.feed(self.norm2(x))
        return out


class GPT(nn.Module):
    """12 layers of width 768 with 12 heads and 50257 tokens are GPT-2 small; input and output share their embedding."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return functional.linear(self.norm(self.blocks(h)), self.tokens.weight)


class UNet(nn.Module):
    """``depth`` halvings and back (arXiv 1505.04597), bilinear upsampling, a class per pixel."""

    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(_double(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, part in enumerate(self.down):
            x = part(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for part, beside in zip(self.up, kept[-2::-1], strict=True):
            x = functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = part(torch.cat([beside, x], 1))
        out: torch.Tensor = self.head(x)
        return out


def _double(inside: int, outside: int) -> nn.Module:
    parts: list[nn.Module] = []
    for a in (inside, outside):
        parts += [nn.Conv2d(a, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*parts)


@dataclass(frozen=True)
class Subject:
    """A model and its batches: ``make()`` and ``batch(device)``, which gives input and target."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]


def subjects(full: bool) -> dict[str, Subject]:
    """By name; not ``full``: the same operations in small."""
    classes, side, images = (1000, 224, 64) if full else (10, 32, 4)
    tokens, context, texts = (50257, 1024, 8) if full else (256, 32, 2)
    area = (16, 256, 256) if full else (2, 32, 32)
    width = 64 if full else 8
    return {
        "ResNet-50": Subject(
            lambda: ResNet((3, 4, 6, 3) if full else (1, 1, 1, 1), width, classes),
            lambda device: (torch.randn(images, 3, side, side, device=device), _whole(classes, (images,), device)),
        ),
        "GPT-2 small": Subject(
            lambda: GPT(12, 768, 12, tokens, context) if full else GPT(2, 32, 2, tokens, context),
            lambda device: (_whole(tokens, (texts, context), device), _whole(tokens, (texts, context), device)),
        ),
        "U-Net": Subject(
            lambda: UNet(4 if full else 2, width, 21),
            lambda device: (torch.randn(area[0], 3, *area[1:], device=device), _whole(21, area, device)),
        ),
    }  # fmt: skip


def _whole(below: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(below, shape, device=device)


def loss_of(out: torch.Tensor, target: torch.Tensor, *, flat: bool) -> torch.Tensor:
    """Cross entropy with the classes where each model has them: of texts last, of images second. ``flat``: pixels as rows of a
    matrix, whose loss has a deterministic kernel on CUDA."""
    if out.dim() == 3:
        return functional.cross_entropy(out.flatten(0, 1), target.flatten())
    if out.dim() == 4 and flat:
        return functional.cross_entropy(out.movedim(1, -1).flatten(0, -2), target.flatten())
    return functional.cross_entropy(out, target)
