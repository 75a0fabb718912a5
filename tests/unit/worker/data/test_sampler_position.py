"""A DataLoader's position: batches, and what is drawn around them, are a plain DataLoader's, wherever it was interrupted."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ratchet_worker.data import enumerate_position, sampler_position
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition
from ratchet_worker.state import rng
from tests.support.data_loaders import SAMPLERS, Drawn, Lines, Now
from tests.support.full_matrix import full

CPU = torch.device("cpu")
EPOCHS = 3
Position = SamplerPosition | StreamPosition
Make = Callable[[], DataLoader[Any]]


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    with rng.fork_rng(CPU):
        yield


def _step(batch: Any) -> Any:
    """What a training draws for itself, and at the end of an epoch (no batch)."""
    return None if batch is None else batch.tolist(), torch.rand(2).tolist(), random.random(), np.random.random()


def plain(make: Make) -> list[Any]:
    rng.seed_all(0, 0)
    loader, made = make(), list[Any]()
    for _ in range(EPOCHS):
        made += [*map(_step, loader), _step(None)]
    return made


class Run:
    def __init__(self, make: Make, kind: type[Position]) -> None:
        rng.seed_all(0, 0)
        self.data: Position = kind(make())
        self.made: list[Any] = []
        self.epoch, self.at_the_end = 0, False

    def go(self, count: int) -> None:
        """Until ``count`` things are made: batches, and ends of epochs."""
        data = self.data
        while len(self.made) < count:
            if data.epoch == self.epoch and not data.position:
                data.begin(self.epoch)
            if data.has_more():
                self.made.append(_step(data.take()))
                continue
            if data.epoch == self.epoch:
                data.end()
            self.epoch += 1
            self.made.append(_step(None))

    def saved(self) -> Any:
        """At the boundary before the next batch, which is there or not."""
        if self.data.position:
            self.data.has_more()
        state, own = self.data.state_dict(), self.data.own_generators.states()
        own |= {"passes": getattr(self.data.loader.batch_sampler, "passes", None)}  # a job's walk of attributes has it
        return copy.deepcopy((state, own)), rng.capture(CPU), self.epoch, list(self.made)

    def restore(self, saved: Any) -> None:
        (state, own), generators, self.epoch, self.made = saved
        if (passes := own.pop("passes")) is not None:
            self.data.loader.batch_sampler.passes = passes
        self.data.load_state_dict(state)
        if self.data.exact:
            self.data.own_generators.load(own)
        self.data.reach()
        rng.restore(generators, CPU)


def differing(make: Make, stops: list[int], kind: type[Position] = SamplerPosition) -> list[str]:
    """In words, what a run that is interrupted after each of ``stops`` makes otherwise than an undisturbed one."""
    whole = plain(make) if kind is SamplerPosition else None
    if whole is None:
        run = Run(make, kind)
        run.go(EPOCHS * 7)
        whole = run.made
    told: list[str] = []
    for stop in stops:
        run = Run(make, kind)
        run.go(stop)
        for count in (0, 1, len(whole) - stop - 1):  # interrupted again at once, and after another batch
            saved = run.saved()
            run = Run(make, kind)
            run.restore(saved)
            told += [f"after {stop}: {run.data.inexact_reason}"] if not run.data.exact else []
            assert isinstance(run.data, StreamPosition) or run.data.loader.dataset.loaded == 0  # type: ignore[attr-defined]
            run.go(len(run.made) + count)
        told += [f"{stop}: {n}" for n, (one, other) in enumerate(zip(run.made, whole, strict=True)) if one != other]
    return told


@pytest.mark.parametrize("kind", SAMPLERS)
def test_resumed_loader_matches_uninterrupted_one_without_reloading(kind: str) -> None:
    assert differing(SAMPLERS[kind], [1, 3, 5, 6, 7, 9]) == []


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        ("shuffle", False),
        ("passes", True),
        pytest.param("shuffle", True, marks=full),
        pytest.param("passes", False, marks=full),
    ],
)
def test_resumed_loader_restores_worker_generators(kind: str, persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        return SAMPLERS[kind](num_workers=2, persistent_workers=persistent)

    assert differing(make, [1, 4, 7, 9]) == []


def test_worker_without_restored_generators_draws_other_numbers() -> None:
    run = Run(lambda: SAMPLERS["shuffle"](num_workers=2), SamplerPosition)
    run.go(3)
    (state, own), *rest = run.saved()
    assert all(one is not None for one in state["workers"])
    run.go(4)
    again = Run(lambda: SAMPLERS["shuffle"](num_workers=2), SamplerPosition)
    again.restore(((state | {"workers": [None, None]}, own), *rest))
    again.go(4)
    assert again.made[-1] != run.made[-1]


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_with_unrepeatable_indices_is_named_inexact(workers: int) -> None:
    """Also where it has not been used yet what it drew: workers have it already."""
    run = Run(lambda: DataLoader(Drawn(), 4, sampler=Now(), num_workers=workers), SamplerPosition)
    run.go(3)
    again = Run(lambda: DataLoader(Drawn(), 4, sampler=Now(), num_workers=workers), SamplerPosition)
    again.restore(run.saved())
    assert not again.data.exact
    assert "yields other indices" in str(again.data.inexact_reason)


def test_abandoned_epoch_counts_as_ended() -> None:
    run = Run(SAMPLERS["shuffle"], SamplerPosition)
    run.go(3)
    run.data.begin(1)
    assert (run.data.epoch, run.data.position) == (1, 0)
    run.go(5)
    assert (run.data.epoch, run.data.position) == (1, 2)


def test_iterable_dataset_resume_skips_batches() -> None:
    assert not sampler_position.is_supported(DataLoader(Lines(), 4))
    assert differing(lambda: DataLoader(Lines(), 4), [1, 3, 6, 7, 9], StreamPosition) == []
    run = Run(lambda: DataLoader(Lines(), 4), StreamPosition)
    run.go(3)
    again = Run(lambda: DataLoader(Lines(), 4), StreamPosition)
    again.restore(run.saved())
    assert again.data.resume_note == "skipped 3 batches"


class Resumed:
    """Items 3, 4, 5, as if 0, 1 and 2 were used before."""

    def __init__(self) -> None:
        self.items, self.placeholders = iter(range(3, 6)), False
        self.asked, self.anew = False, ""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.placeholders:
            return None
        if not self.asked:
            frame = inspect.currentframe()
            assert frame is not None
            self.asked, self.anew = True, enumerate_position.find_restarted(self, frame.f_back) or ""
            self.placeholders = True
            for reader in enumerate_position.enumerate_readers(self):
                enumerate_position.advance(reader, 3)
            self.placeholders = False
        return next(self.items)


def bar(items: Any) -> Iterator[Any]:
    yield from items


def inner_loop(items: Any) -> Iterator[Any]:
    for item in items:
        yield int(item)


def counted(items: Any) -> Iterator[Any]:
    source = iter(items)
    for _ in range(3):
        yield next(source)


class Ahead:
    """Has one item more than it gave."""

    def __init__(self, items: Any) -> None:
        self.source = iter(items)
        self.ahead = next(self.source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item, self.ahead = self.ahead, next(self.source)
        return item


def until_its_end(items: Any) -> Iterator[Any]:
    source = iter(items)
    while True:
        try:
            yield next(source)
        except StopIteration:
            break


def looked_at(items: Any) -> list[Any]:
    return [next(iter(items))]


def test_enumerate_continues_count_after_resume() -> None:
    assert list(enumerate(Resumed())) == [(3, 3), (4, 4), (5, 5)]
    assert list(enumerate(Resumed(), start=1)) == [(4, 3), (5, 4), (6, 5)]
    assert list(bar(enumerate(Resumed()))) == [(3, 3), (4, 4), (5, 5)]
    again = Resumed()
    pairs = enumerate(again)
    assert [next(pairs), next(pairs)] == [(3, 3), (4, 4)] and "with next()" in again.anew


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda items: enumerate(bar(items)), "session.enumerate"),
        (lambda items: enumerate(inner_loop(bar(items))), "session.enumerate"),
        (lambda items: enumerate(map(str, items)), "session.enumerate"),
        (lambda items: bar(enumerate(items)), ""),
        (lambda items: map(str, filter(None, items)), ""),
        (lambda items: zip(range(3), bar(items), strict=False), "through zip"),
        (lambda items: enumerate(zip(items, range(3), strict=False)), "through zip"),
        (lambda items: map(max, items, range(3)), "through map"),
        (lambda items: islice(items, 3), "through islice"),
        (lambda items: bar(islice(bar(items), 3)), "through islice"),
        (lambda items: islice(enumerate(items), 3), "through islice"),
        (lambda items: bar(zip(enumerate(items), range(3), strict=False)), "through zip"),
        (lambda items: enumerate(enumerate(items)), "session.enumerate"),
        (counted, "with next()"),
        (Ahead, "with next()"),
        (until_its_end, ""),
        (looked_at, ""),
    ],
)
def test_wrapper_that_loses_position_is_named(make: Callable[[Any], Any], named: str) -> None:
    items = Resumed()
    list(make(items))
    assert named in items.anew and bool(named) == bool(items.anew)
