"""How an error of a component that does not accept the state of a checkpoint ends the attempt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ratchet_contract.errors import UserError
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.data.stream_position import StreamPosition


def load(error: BaseException) -> Any:
    def raises() -> None:
        raise error

    state: Any = SimpleNamespace(rank=1)
    return JobState._load_component(state, "user:mine", raises)


@pytest.mark.parametrize("kind", [ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError])
def test_error_of_user_code_that_loads_a_state_is_the_users_and_is_not_retried(kind: type[Exception]) -> None:
    with pytest.raises(UserError, match="user:mine of rank 1 cannot load the state") as caught:
        load(kind("count"))
    assert caught.value.code == "state-mismatch"


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_resize_begins_the_epoch_again_and_refuses_data_without_epochs(kind: str) -> None:
    job = JobState(0, torch.device("cpu"))
    job.data = SamplerPosition(DataLoader(range(8))) if kind == "sampler" else StreamPosition(DataLoader(Endless()))  # type: ignore[arg-type]
    mine = job.data.state_dict()
    with pytest.raises(UserError, match=r"data of rank 0 cannot load the state .* was recorded for") as caught:
        job._resize_data([{"mine": 3}] * 2, 2)
    assert caught.value.code == "state-mismatch"
    other = StreamPosition(DataLoader(Endless())) if kind == "sampler" else SamplerPosition(DataLoader(range(8)))  # type: ignore[arg-type]
    assert (
        job._resize_data([{**other.state_dict(), "epoch": 1}] * 2, 2).status == "reset"
    )  # a loader of each number of ranks
    report = job._resize_data([{**mine, "epoch": 1, "position": 3, "taken": 3}] * 2, 2)
    assert report.status == "reset"
    assert str(report.reason).endswith("epoch 1 begins again, so that its batches up to there are trained on twice")


def test_error_of_the_device_that_loads_a_state_is_raised_unchanged() -> None:
    error = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        load(error)
    assert caught.value is error
