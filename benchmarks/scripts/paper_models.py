"""The two models of the PowerSGD paper (Vogels et al., arXiv 1905.13727), in the shapes of its appendix, on random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

VOCABULARY: Final = 28_869  # of WikiText-2 in lower case, as spaCy cuts it
HIDDEN: Final = 650
LAYERS: Final = 3
CLASSES: Final = 10


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a way around them; where the shape changes, that is a 1 x 1 convolution."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32: a first convolution of 3 x 3, and no pooling behind it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))


class LanguageModel(nn.Module):
    """Embedding, LSTM and a decoder that has the embedding's weight; its bias is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, HIDDEN)
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, LAYERS)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: length x batch. Logits, length * batch x vocabulary."""
        logits: torch.Tensor = self.decoder(self.rnn(self.encoder(tokens))[0].flatten(0, 1))
        return logits


@dataclass(frozen=True)
class Model:
    """``batch()``: inputs and classes. Small ones: how much is sent does not depend on them."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


MODELS: Final = {
    "resnet18": Model(resnet18, lambda: (torch.randn(2, 3, 32, 32), torch.randint(CLASSES, (2,)))),
    "lstm": Model(LanguageModel, lambda: (torch.randint(VOCABULARY, (2, 1)), torch.randint(VOCABULARY, (2,)))),
}
