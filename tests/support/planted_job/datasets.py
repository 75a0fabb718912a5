"""Data sets, samplers and collation with state of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from training import WIDTH, Training

from ratchet_worker.data.streams import TrainStream
from ratchet_worker.task import Parts, TaskContext

Sample = tuple[torch.Tensor, torch.Tensor]


def sample(number: int, shift: float) -> Sample:
    x = torch.full((WIDTH,), number / 32)
    return x + shift, x.roll(1)


class Counting(Training):
    class Samples(Dataset[Sample]):
        def __init__(self) -> None:
            self.given = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            self.given += 1
            return sample(number, self.given / 50)

    def samples(self) -> Dataset[Any]:
        return self.Samples()


class Caching(Training):
    class Samples(Dataset[Sample]):
        def __init__(self) -> None:
            self.kept: dict[int, Sample] = {}

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            if number not in self.kept:
                self.kept[number] = sample(number, len(self.kept) / 30)
            return self.kept[number]

    def samples(self) -> Dataset[Any]:
        return self.Samples()


class CachingInList(Training):
    class Samples(Dataset[Sample]):
        def __init__(self) -> None:
            self.kept: list[torch.Tensor | None] = [None] * 32
            self.order: list[int] = []

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            self.order.append(number)
            if self.kept[number] is None:
                self.kept[number] = torch.full((WIDTH,), len(self.order) / 30)
            x = self.kept[number]
            assert x is not None
            return x, x.roll(1)

    def samples(self) -> Dataset[Any]:
        return self.Samples()


class OwnGenerator(Training):
    class Samples(Dataset[Sample]):
        def __init__(self) -> None:
            self.noise, self.python = np.random.default_rng(1), random.Random(2)

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            return sample(number, float(self.noise.normal()) + self.python.random())

    def samples(self) -> Dataset[Any]:
        return self.Samples()


class Curriculum(Training):
    """Harder with every epoch that the data set believes in."""

    class Samples(Dataset[Sample]):
        def __init__(self) -> None:
            self.level, self.given = 0.0, 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            self.given += 1
            if self.given % 16 == 0:
                self.level += 0.3
            return sample(number, self.level)

    def samples(self) -> Dataset[Any]:
        return ConcatDataset([Subset(self.Samples(), range(16)), Subset(self.Samples(), range(16, 32))])


class SetByLoop(Training):
    """The loop tells the data set how far it is."""

    class Samples(Dataset[Sample]):
        def __init__(self) -> None:
            self.level = 0.0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            return sample(number, self.level)

    def samples(self) -> Dataset[Any]:
        self.made = self.Samples()
        return self.made

    def value(self, model: Any, batch: Any) -> torch.Tensor:
        self.made.level += 0.1
        return super().value(model, batch)


class MemoryOfClass(Training):
    """A count on the class of the data set."""

    class Samples(Dataset[Sample]):
        given = 0

        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Sample:
            type(self).given += 1
            return sample(number, self.given / 50)

    def samples(self) -> Dataset[Any]:
        return self.Samples()


class Collate(Training):
    """A function that collates and counts."""

    class Joining:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, rows: list[Sample]) -> Any:
            self.calls += 1
            x, y = zip(*rows, strict=True)
            return torch.stack(x) + self.calls / 20, torch.stack(y)

    def loading(self) -> dict[str, Any]:
        return {"collate_fn": self.Joining()}


class CollateClosure(Training):
    def loading(self) -> dict[str, Any]:
        calls = [0]

        def joined(rows: list[Sample]) -> Any:
            calls[0] += 1
            x, y = zip(*rows, strict=True)
            return torch.stack(x) + calls[0] / 20, torch.stack(y)

        return {"collate_fn": joined}


class Augmentation(Training):
    class Shaking:
        def __init__(self) -> None:
            self.strength, self.noise = 0.0, torch.Generator().manual_seed(3)

        def __call__(self, row: Sample, sample_generator: torch.Generator) -> Sample:
            self.strength += 0.01
            return row[0] + self.strength * torch.randn(WIDTH, generator=self.noise), row[1]

    def loading(self) -> dict[str, Any]:
        return {"augment": self.Shaking()}


class InWorkers(Training):
    """A data set that counts in the workers of its loader."""

    def samples(self) -> Dataset[Any]:
        return Counting.Samples()

    def loading(self) -> dict[str, Any]:
        return {"num_workers": 1}


class _Stream(Training):
    def stream(self) -> TrainStream:
        raise NotImplementedError

    def build(self, context: TaskContext) -> Parts:
        parts = super().build(context)
        parts.train = self.stream()
        return parts


class StreamWithState(_Stream):
    """Its ``state_dict`` tells the position and not the noise."""

    class Numbers(IterableDataset[Sample]):
        def __init__(self) -> None:
            self.at, self.noise = 0, np.random.default_rng(3)

        def __iter__(self) -> Iterator[Any]:
            while self.at < 8:
                self.at += 1
                x = torch.full((4, WIDTH), self.at / 8 + float(self.noise.normal()))
                yield x, x.roll(1, 1)
            self.at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def stream(self) -> TrainStream:
        return TrainStream(self.Numbers())


class RepeatableStream(_Stream):
    """Said to be repeatable, and counts its epochs."""

    class Numbers(IterableDataset[Sample]):
        def __init__(self) -> None:
            self.epochs = 0

        def __iter__(self) -> Iterator[Any]:
            self.epochs += 1
            for number in range(8):
                x = torch.full((4, WIDTH), number / 8 + self.epochs / 3)
                yield x, x.roll(1, 1)

    def stream(self) -> TrainStream:
        return TrainStream(self.Numbers(), repeatable=True)


class RepeatableCounting(_Stream):
    """Said to be repeatable, and is not."""

    class Numbers(IterableDataset[Sample]):
        def __init__(self) -> None:
            self.given = 0

        def __iter__(self) -> Iterator[Any]:
            for number in range(8):
                self.given += 1
                x = torch.full((4, WIDTH), number / 8 + self.given / 30)
                yield x, x.roll(1, 1)

    def stream(self) -> TrainStream:
        return TrainStream(self.Numbers(), repeatable=True)


class BufferedShuffle(_Stream):
    """A buffer that is shuffled from a generator of its own, said to be repeatable."""

    class Numbers(IterableDataset[Sample]):
        def __init__(self) -> None:
            self.noise = random.Random(7)

        def __iter__(self) -> Iterator[Any]:
            waiting = [n / 8 for n in range(4)]
            for number in range(8):
                waiting.append(number / 8 + 0.5)
                x = torch.full((4, WIDTH), waiting.pop(self.noise.randrange(len(waiting))))
                yield x, x.roll(1, 1)

    def stream(self) -> TrainStream:
        return TrainStream(self.Numbers(), repeatable=True)
