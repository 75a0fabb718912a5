"""TrainStream through a checkpoint after every batch: batches and what the training draws are those of the undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ratchet_contract.checkpoint.resume_report import ComponentReport
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.data.loader import endless
from ratchet_worker.data.streams import TrainStream
from ratchet_worker.state import rng
from ratchet_worker.state.snapshot import Snapshot
from tests.support import streams
from tests.support.optional_packages import missing_reason
from tests.support.streams import BY_STATE, REPEATABLE, TORCHDATA, N, train_stream

CPU = torch.device("cpu")
Made = tuple[list[Any], Snapshot]


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    with rng.fork_rng(CPU):
        yield


class Run:
    """A training of nothing but batches and draws. ``before``: called in each step before its batch."""

    def __init__(self, make: Callable[[], TrainStream], before: Callable[[Any, int], None] | None = None) -> None:
        rng.seed_all(0, 0)
        self.data, self.step, self.before = make(), 0, before
        self.state = JobState(0, CPU)
        self.state.register("data", self.data)
        self.batches = endless(self.data, lambda: None)

    def steps(self, count: int) -> list[Any]:
        return [self._one() for _ in range(count)]

    def _one(self) -> Any:
        if self.before is not None:
            self.before(self.data.stream, self.step)
        self.step += 1
        batch = next(self.batches)
        plain = torch.as_tensor(batch["x"] if isinstance(batch, dict) else batch).clone()
        if isinstance(batch, torch.Tensor) and batch.is_floating_point():
            batch.add_(1)  # in place, as training does
        return plain.tolist(), torch.rand(2).tolist(), random.random(), np.random.random()

    def save(self) -> Snapshot:
        snapshot = Snapshot()
        snapshot.add("data", self.data.state_dict())
        snapshot.add("data_generators", self.data.own_generators.states())
        snapshot.add("rng", rng.capture(CPU))
        return Snapshot({}, {n: t.clone() for n, t in snapshot.private.items()}, snapshot.state)

    def restore(self, saved: Snapshot, step: int) -> ComponentReport:
        self.step = step
        found = self.state._restore_data(
            lambda data: data.load_state_dict(saved.value("data")), saved.value("data_generators")
        )
        rng.restore(saved.value("rng"), CPU)
        return found


def differing(make: Callable[[], TrainStream], stops: list[int], *, before: Any = None) -> list[str]:
    """What the undisturbed run and one that is interrupted after each of ``stops`` make otherwise, in words; reasons first."""
    total = 3 * N
    whole = Run(make, before).steps(total)
    told: list[str] = []
    for first in stops:
        run = Run(make, before)
        made = run.steps(first)
        for count in (0, 1, total - first - 1):  # interrupted again at once, and after another step
            saved = run.save()
            run = Run(make, before)
            report = run.restore(saved, len(made))
            told += [f"after {len(made)}: {report.reason}"] if report.status != "exact" else []
            made += run.steps(count)
        told += [f"{first}: step {n}" for n in range(total) if made[n] != whole[n]]
    return told


ALL = [1, 2, 4, N, N + 1]
FEW = [N + 4]
WITH_WORKERS = [kind for kind in (BY_STATE | TORCHDATA | REPEATABLE) if "workers" in kind]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", [*BY_STATE, *TORCHDATA, *REPEATABLE])
def test_resumed_stream_matches_uninterrupted_one(kind: str) -> None:
    if kind in TORCHDATA and (why := missing_reason("torchdata")):
        pytest.skip(why)
    assert differing(lambda: train_stream(kind), FEW if kind in WITH_WORKERS else ALL) == []


def test_resumed_stream_supports_set_epoch_at_epoch_start() -> None:
    def tell(stream: DataLoader[Any], step: int) -> None:
        if step % N == 0:
            stream.sampler.set_epoch(10 + step // N)  # type: ignore[attr-defined]

    assert differing(lambda: train_stream("epochs"), ALL, before=tell) == []


def test_resumed_stream_supports_generator_shared_with_training() -> None:
    def draw(stream: DataLoader[Any], step: int) -> None:
        torch.rand(step % 3, generator=stream.generator)

    assert differing(lambda: train_stream("generator"), ALL, before=draw) == []


def test_repeatable_stream_draws_differ_by_epoch_and_from_training() -> None:
    class Draws:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for n in range(N):
                yield torch.rand(2) if n else torch.zeros(2)

    with rng.fork_rng(CPU):
        run = Run(lambda: TrainStream(Draws(), repeatable=True))
        drawn = [value for batch, trained, *_ in run.steps(3 * N) for value in (*batch, *trained) if value]
    assert len(drawn) == len(set(drawn)) == 3 * (N - 1) * 2 + 3 * N * 2


NAMED: dict[str, Callable[[], TrainStream]] = {
    "counts": lambda: TrainStream(DataLoader(streams.Counts(), batch_size=streams.SIZE), repeatable=True),
    "worker noise": lambda: TrainStream(streams.LateLoader(noise=True, **streams.WORKERS)),
    "an earlier batch alone": lambda: TrainStream(streams.UnknownAtFirst(), repeatable=True),
    "unknown order": lambda: TrainStream(streams.Unknown(), repeatable=True),
    "unknown order, with a state": lambda: TrainStream(streams.UnknownByState()),
}


@pytest.mark.parametrize("kind", NAMED)
def test_stream_with_different_batch_after_resume_is_named_inexact(kind: str) -> None:
    first = Run(NAMED[kind])
    first.steps(N + 3)
    again = Run(NAMED[kind])
    report = again.restore(first.save(), N + 3)
    assert report.status == "not-exact" and report.reason is not None and "batch 3 of epoch 1" in report.reason
    assert again.data.exact is False
    again.steps(1)  # told, and gone on with
    alone = NAMED[kind]()
    alone.load_state_dict(first.data.state_dict())
    with pytest.raises(ValueError, match="batch 3 of epoch 1"):
        next(iter(alone))
