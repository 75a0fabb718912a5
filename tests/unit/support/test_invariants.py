"""What a job's history must say about the checkpoint that an attempt began from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_contract.paths import checkpoint_dir_name
from tests.support.invariants import check_history


def happening(type: str, attempt: int, /, **data: Any) -> Any:
    return SimpleNamespace(type=type, attempt=attempt, data=data)


def launched(attempt: int, base_step: int, base_attempt: int | None) -> list[Any]:
    begun = {"base_step": base_step, "base_attempt": base_attempt, "desired": "run"}
    return [
        happening("launch", attempt, **{"from": "QUEUED", "to": "STARTING", "attempt": attempt, "desired": "run"}),
        happening("training", attempt, **{"from": "STARTING", "to": "RUNNING"}, **begun),
    ]


def ended(attempt: int) -> list[Any]:
    return [
        happening("attempt-ended", attempt, cause="rank-killed"),
        happening("end-requeue", attempt, **{"from": "RUNNING", "to": "QUEUED", "desired": "run"}),
    ]


@pytest.mark.parametrize(
    ("recorded", "faults"), [(True, []), (False, ["began from step 10 of attempt 1, which was never recorded"])]
)
def test_checkpoint_that_an_attempt_began_from_is_recorded_until_that_attempt_ends(
    recorded: bool, faults: list[str]
) -> None:
    adopted = [happening("checkpoint-adopted", 1, checkpoint=checkpoint_dir_name(10, 1))] if recorded else []
    found = check_history([*launched(1, 0, None), *ended(1), *launched(2, 10, 1), *adopted, *ended(2)]).faults
    assert len(found) == len(faults) and all(text in fault for text, fault in zip(faults, found, strict=True)), found
