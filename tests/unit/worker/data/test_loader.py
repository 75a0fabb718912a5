"""TrainLoader: the same samples, bit for bit, whatever the workers, wherever it was interrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ratchet_contract.errors import UserError
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session.session import Session
from ratchet_worker.state.snapshot import Snapshot
from tests.support.data_sets import Noisy, jitter

LENGTH, BATCH = 46, 4


def make(rank: int = 0, world: int = 2, *, dataset: Any = None, **options: Any) -> TrainLoader:
    arguments: dict[str, Any] = {"batch_size": BATCH, "seed": 11, "augment": jitter, **options}
    return TrainLoader(dataset or Noisy(LENGTH), rank=rank, world_size=world, **arguments)


@pytest.fixture(scope="module")
def with_workers() -> Iterator[TrainLoader]:
    """One loader with two workers, for all tests here: starting them is what costs."""
    loader = make(num_workers=2, prefetch_factor=2)
    yield loader
    loader.close()


def begin(loader: TrainLoader, epoch: int = 0, position: int = 0) -> TrainLoader:
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "position": position})
    return loader


def take(loader: TrainLoader, count: int) -> list[torch.Tensor]:
    """The next ``count`` batches, over the ends of epochs."""
    out: list[torch.Tensor] = []
    while len(out) < count:
        for batch in loader:
            out.append(batch)
            if len(out) == count:
                break
    return out


def indices(batches: list[torch.Tensor]) -> list[int]:
    return [int(i) for batch in batches for i in batch[:, 0].tolist()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_epoch_holds_every_sample_once_but_the_remainder() -> None:
    ranks = [make(rank) for rank in (0, 1)]
    epochs = [[indices(list(loader)) for loader in ranks] for _ in range(2)]
    for parts in epochs:
        seen = sorted(parts[0] + parts[1])
        assert len(parts[0]) == len(parts[1]) == 20 == len(ranks[0]) * BATCH
        assert len(set(seen)) == 40 == LENGTH - LENGTH % (2 * BATCH)
    assert epochs[0] != epochs[1]
    assert [loader.epoch for loader in ranks] == [2, 2]


def test_augmentation_differs_by_epoch_and_sample_and_not_by_world_size() -> None:
    two = {int(row[0]): row for rank in (0, 1) for batch in make(rank) for row in batch}
    one = {int(row[0]): row for batch in make(world=1, batch_size=2) for row in batch}
    shared = set(one) & set(two)
    assert len(shared) == 40
    assert all(torch.equal(one[i], two[i]) for i in shared)
    assert len({float(two[i][4]) for i in two}) == 40
    later = {int(row[0]): row for batch in begin(make(), epoch=1) for row in batch}
    assert all(not torch.equal(later[i][1:], two[i][1:]) for i in later if i in two)


def test_batches_are_identical_with_workers_and_prefetching(with_workers: TrainLoader) -> None:
    assert same(take(begin(with_workers), 12), take(make(), 12))


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_middle_equals_the_uninterrupted_run(stop: int, workers: int, with_workers: TrainLoader) -> None:
    """Stops in the first epoch, at its end (5 batches), and in the second; workers have read ahead by then."""
    whole = take(make(), 11)
    loader = begin(with_workers) if workers else make()
    head = take(loader, stop)
    state = json.loads(json.dumps(loader.state_dict()))
    take(loader, 2)  # what the killed process still did is forgotten
    resumed = with_workers if workers else make()
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.position) == (stop // 5, stop % 5 * 8)
    assert same(head + take(resumed, 11 - stop), whole)


def test_position_counts_yielded_batches_not_prefetched_ones(with_workers: TrainLoader) -> None:
    batches = iter(begin(with_workers))
    for n in range(1, 5):
        next(batches)
        assert (with_workers.epoch, with_workers.position) == (0, n * 8)
    next(batches)
    assert (with_workers.epoch, with_workers.position) == (1, 0)
    assert next(batches, None) is None


def test_new_iterator_ends_previous_one(with_workers: TrainLoader) -> None:
    for loader in (make(), begin(with_workers)):
        first = iter(loader)
        head = [next(first)]
        second = iter(loader)
        head.append(next(second))
        assert next(first, None) is None
        assert same(head, take(make(), 2))


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()


def test_iteration_does_not_change_rank_generators(with_workers: TrainLoader) -> None:
    before = generators()
    take(make(), 7)
    assert generators() == before
    take(begin(with_workers), 7)
    assert generators() == before
    fresh = make(num_workers=1)  # also when it starts processes
    take(fresh, 1)
    fresh.close()
    assert generators() == before


@pytest.mark.parametrize(("batch_is", "batch"), [("per_rank", 4), ("global", 12)])
@pytest.mark.parametrize(("before", "after"), [(b, a) for b in range(1, 5) for a in range(1, 5) if a != b])
def test_another_world_size_goes_on_at_the_same_sample(before: int, after: int, batch_is: str, batch: int) -> None:
    """In the middle of an epoch: every sample is used once until the remainder that fills no global batch."""
    options: dict[str, Any] = {"dataset": Noisy(75), "batch_is": batch_is, "batch_size": batch}
    old = [make(rank, before, **options) for rank in range(before)]
    used = [indices(take(loader, 2)) for loader in old]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in old]
    new = [make(rank, after, **options) for rank in range(after)]
    with pytest.raises(ValueError, match=f"recorded with {before} ranks"):
        new[0].load_state_dict(states[0])
    for loader in new:
        loader.load_resized(states)
    global_batch = 4 * after if batch_is == "per_rank" else 12
    done = sum(map(len, used))
    left = (75 - done) // global_batch
    rest = [indices(take(loader, left)) for loader in new]
    assert [(loader.epoch, loader.position) for loader in new] == [(1, 0)] * after
    assert left and {len(part) for part in rest} == {left * global_batch // after}
    everything = [i for part in (*used, *rest) for i in part]
    assert len(everything) == len(set(everything)) == done + left * global_batch
    whole = [int(i) for b in make(0, 1, **{**options, "batch_size": 1}) for i in b[:, 0].tolist()]
    assert sorted(everything) == sorted(whole[: len(everything)])


def test_incompatible_loader_state_is_refused() -> None:
    loader = make()
    state = loader.state_dict()
    for key, value in [("seed", 12), ("length", 47), ("shuffle", False), ("order_version", 0), ("kind", "stream")]:
        with pytest.raises(ValueError, match=key):
            loader.load_state_dict({**state, key: value})
    for position in (-1, 47, "x", None):
        with pytest.raises(ValueError, match="not a data position"):
            loader.load_state_dict({**state, "position": position})
    with pytest.raises(ValueError, match="different data positions"):
        loader.load_resized([state, {**state, "position": 8}])
    assert loader.state_dict() == state


class Noise:
    """Has generators in containers."""

    def __init__(self) -> None:
        self.words = {"numpy": np.random.default_rng(5), "python": [random.Random(5)]}
        self.late: np.random.RandomState | None = None

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        words: Any = self.words
        return torch.stack(samples) * words["numpy"].random() + words["python"][0].random()


def test_generators_of_dataset_and_collate_fn_are_saved_with_position() -> None:
    def own() -> tuple[TrainLoader, Noise]:
        generator, noise = torch.Generator().manual_seed(5), Noise()
        session = object.__new__(Session)  # as a script's functions see it: what it holds is saved by itself
        vars(session)["generator"] = torch.Generator()

        def turn(sample: torch.Tensor, _: torch.Generator) -> torch.Tensor:
            assert session is not None
            return torch.cat([sample, torch.rand(1, generator=generator, dtype=torch.float64)])

        return make(augment=turn, collate_fn=partial(noise.collate)), noise

    loader, _ = own()
    whole = take(loader, 3)
    snapshot = Snapshot()
    snapshot.add("generators", loader.own_generators.states())
    position = loader.state_dict()
    whole += take(loader, 4)
    again, noise = own()
    again.load_state_dict(position)
    states = snapshot.value("generators")
    assert set(states) == {"augment.generator", "collate_fn.words['numpy']", "collate_fn.words['python'][0]"}
    assert not same(take(again, 4), whole[3:])  # the control
    again.load_state_dict(position)
    assert again.own_generators.load(states) == [] and again.exact
    assert same(take(again, 4), whole[3:])
    noise.words = {"python": []}
    noise.late = np.random.RandomState(5)
    told = again.own_generators.load(states)
    assert len(told) == 3 and "collate_fn.late starts again: the checkpoint has none" in told[2]
    assert "collate_fn.words['numpy'] is no generator when training begins" in told[0]


def test_generator_used_in_workers_makes_loader_inexact() -> None:
    noise = Noise()
    loader = make(collate_fn=noise.collate, num_workers=1)
    assert not loader.exact and loader.inexact_reason is not None
    assert loader.inexact_reason.startswith(
        "collate_fn.words['numpy'], collate_fn.words['python'][0]: a generator of its own"
    )
    noise.words = {}
    assert loader.exact


class Restless(str):
    """A key that adds to its dict when it is looked at, as a thread of a data set would."""

    def __new__(cls, items: dict[Any, Any]) -> Restless:
        self = super().__new__(cls, "key")
        self.items = items
        return self

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        self.items["late"] = np.random.default_rng(5)
        return "'key'"


def test_generator_scan_tolerates_concurrent_container_changes() -> None:
    noise = Noise()
    noise.words = {"numpy": np.random.default_rng(5)}
    noise.words[Restless(noise.words)] = np.random.default_rng(5)
    found = make(collate_fn=noise.collate).own_generators.states()
    assert set(found) == {"collate_fn.words['numpy']", "collate_fn.words['key']"}


def test_invalid_loader_arguments_raise_with_advice() -> None:
    with pytest.raises(UserError, match="smaller batch_size"):
        make(batch_size=24)
    with pytest.raises(UserError, match="prefetch_factor"):
        make(prefetch_factor=2)
    local = make(augment=lambda sample, generator: sample, num_workers=1)
    with pytest.raises(UserError, match="must be importable"):
        take(local, 1)


def test_an_error_in_a_worker_reaches_the_rank() -> None:
    class Nothing(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        take(make(dataset=Nothing(LENGTH)), 1)


def test_data_digest_uses_dataset_digest() -> None:
    class Named(Noisy):
        def digest(self) -> str:
            return "abc"

    assert make(dataset=Named(LENGTH)).data_digest() == "abc"
    assert make().data_digest() is None
