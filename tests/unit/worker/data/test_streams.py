"""TrainStream: exact with a state, by reading again when told so, and honest otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ratchet_worker.data.streams import TrainStream
from tests.support.data_sets import Counting, Stale


class Lines:
    """Repeatable, different in each epoch, and careless enough to draw from the process's generator."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for n in range(4):
            torch.rand(1)
            yield 100 * self.epoch + n


def take(data: Iterable[Any], count: int) -> list[Any]:
    out: list[Any] = []
    while len(out) < count:
        for batch in data:
            out.append(batch)
            if len(out) == count:
                break
    return out


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize("kind", ["state", "skip"])
def test_stream_resume_equals_uninterrupted_run(kind: str, stop: int) -> None:
    def make() -> TrainStream:
        return TrainStream(Counting(4)) if kind == "state" else TrainStream(Lines(), repeatable=True)

    whole = take(make(), 10)
    assert whole == ([0, 1, 2, 3, 0, 1, 2, 3, 0, 1] if kind == "state" else [0, 1, 2, 3, 100, 101, 102, 103, 200, 201])
    first = make()
    head = take(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    again = make()
    again.load_state_dict(state)
    assert head + take(again, 10 - stop) == whole
    assert again.exact and again.inexact_reason is None
    assert again.epoch == 2


def test_stream_skip_on_resume_does_not_change_rank_generator() -> None:
    data = TrainStream(Lines(), repeatable=True)
    take(data, 3)
    again = TrainStream(Lines(), repeatable=True)
    again.load_state_dict(data.state_dict())
    torch.manual_seed(5)
    expected = torch.Generator().manual_seed(5)
    assert next(iter(again)) == 3  # nor does this one draw from the training's own
    assert torch.equal(torch.get_rng_state(), expected.get_state())


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_stream_resume_restores_dataloader_generator_of_epoch_start(stop: int) -> None:
    """A shuffled ``DataLoader`` of three batches: its generator alone decides the order of every epoch."""

    def make() -> TrainStream:
        generator = torch.Generator().manual_seed(3)
        return TrainStream(DataLoader(range(30), batch_size=10, shuffle=True, generator=generator), repeatable=True)  # type: ignore[arg-type]

    first = make()
    whole = [batch.tolist() for batch in take(first, stop)]
    position, states = first.state_dict(), first.own_generators.states()
    whole += [batch.tolist() for batch in take(first, 4)]
    again = make()
    again.load_state_dict(position)
    assert again.own_generators.load(states) == []
    assert [batch.tolist() for batch in take(again, 4)] == whole[stop:]


def test_stream_without_position_restarts_and_reports_inexact() -> None:
    data = TrainStream([1, 2, 3])
    take(data, 2)
    again = TrainStream([1, 2, 3])
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert take(again, 3) == [1, 2, 3]
    assert not again.exact
    assert (
        again.inexact_reason is not None and "list" in again.inexact_reason and "state_dict()" in again.inexact_reason
    )


@pytest.mark.parametrize("kind", ["state", "skip", "restart"])
def test_stream_iterated_again_within_an_epoch_continues_from_the_position(kind: str) -> None:
    make: dict[str, Callable[[], TrainStream]] = {
        "state": lambda: TrainStream(Counting(3)),
        "skip": lambda: TrainStream([0, 1, 2], repeatable=True),
        "restart": lambda: TrainStream([0, 1, 2]),
    }
    data = make[kind]()
    assert [take(data, count) for count in (1, 1, 1, 2)] == [[0], [1], [2], [0, 1]]
    assert (data.epoch, data.position) == (1, 2)


def test_epoch_of_stream_without_position_that_is_ended_early_is_not_continued() -> None:
    data = TrainStream([0, 1, 2])
    assert take(data, 1) == [0]
    data.end_epoch()
    assert (take(data, 1), data.epoch) == ([0], 1)


def test_stream_without_position_starts_over_once_its_iterator_has_raised() -> None:
    class Failing:
        failures = 1

        def __iter__(self) -> Any:
            yield 0
            if self.failures:
                self.failures -= 1
                raise OSError("the disk is away")
            yield 1

    data = TrainStream(Failing())
    with pytest.raises(OSError, match="the disk is away"):
        take(data, 2)
    assert take(data, 3) == [0, 1, 0] and (data.epoch, data.position) == (1, 1)


def test_stream_state_lagging_behind_is_detected_at_first_batch() -> None:
    with pytest.raises(TypeError, match="advance the position before the batch is yielded"):
        take(TrainStream(Stale(4)), 1)


def test_stream_wrongly_declared_repeatable_is_detected() -> None:
    data = TrainStream([1, 2, 3], repeatable=True)
    take(data, 3)
    shorter = TrainStream([1, 2], repeatable=True)
    shorter.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match="ended after 2 batches where 3"):
        take(shorter, 1)


def test_batches_with_arrays_of_objects_are_compared_at_resume() -> None:
    def made(last: object) -> TrainStream:
        return TrainStream(
            [{"x": np.array(value, dtype=object)} for value in (None, ["a", None], last)], repeatable=True
        )

    data = made("b")
    take(data, 3)
    for last in ("b", "c"):
        again = made(last)
        again.load_state_dict(data.state_dict())
        again.reach()
        assert again.exact is (last == "b")


def test_incompatible_stream_state_is_refused() -> None:
    class Half:
        def __iter__(self) -> Any:
            yield 1

        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(TypeError, match="only one of"):
        TrainStream(Half())
    with pytest.raises(ValueError, match="recorded for 'stream'/'skip'"):
        TrainStream(Counting(3)).load_state_dict(TrainStream([1], repeatable=True).state_dict())

    class Tensors(Counting):
        def state_dict(self) -> Any:
            return {"next": torch.tensor(self.next), "lock": [object()]}

    with pytest.raises(TypeError, match=r"Tensors.state_dict\(\).lock\[0\]: a builtins.object cannot be stored"):
        TrainStream(Tensors(3)).state_dict()


class Carrying(Counting):
    """Has a value in its state besides the position, which no ``load_state_dict`` restores."""

    def __init__(self, value: Any) -> None:
        super().__init__(4)
        self.value = value

    def state_dict(self) -> Any:
        return {"next": self.next, "value": self.value}


def reached(recorded: Any, now: Any) -> TrainStream:
    """A stream, moved to the position that another one has recorded; ``recorded`` and ``now``: the values they carry."""
    first, again = TrainStream(Carrying(recorded)), TrainStream(Carrying(now))
    take(first, 2)
    again.load_state_dict(first.state_dict())
    again.reach()
    return again


VALUES: dict[str, Callable[[float], Any]] = {
    "float": float,
    "tensor": lambda value: torch.tensor([value]),
    "complex tensor": lambda value: torch.tensor([1j * value]),
    "nested tensor": lambda value: [{"in": torch.tensor(value, dtype=torch.bfloat16)}],
    "array": lambda value: np.array([value]),
    "numpy number": np.float32,
}


@pytest.mark.parametrize("kind", VALUES)
def test_stream_state_is_compared_by_bits_at_resume(kind: str) -> None:
    make = VALUES[kind]
    assert reached(make(math.nan), make(math.nan)).exact
    zero = reached(make(0.0), make(-0.0))
    assert zero.inexact_reason is not None and "is not what was recorded there" in zero.inexact_reason


def test_stream_state_of_another_dtype_or_shape_is_inexact() -> None:
    zeros = torch.zeros(2)
    assert not reached(zeros, zeros.int()).exact and not reached(zeros, zeros.reshape(2, 1)).exact


def test_stream_state_that_is_always_nan_is_detected_at_first_batch() -> None:
    class Constant(Counting):
        def state_dict(self) -> Any:
            return {"mean": torch.tensor(math.nan)}

    with pytest.raises(TypeError, match="advance the position before the batch is yielded"):
        take(TrainStream(Constant(4)), 1)
