"""A user's own hook in whole attempts: what its state cannot keep ends the job; replicas that part are told with its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_CHECKPOINT_ERROR, EXIT_USER_ERROR
from ratchet_contract.phases import Cause
from tests.support.launch import Job

HOOKS = """
import threading

import torch


def ready(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


class Growing:
    def __init__(self, late):
        self.seen = {} if late else {"lock": threading.Lock()}

    def __getstate__(self):
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state)


def locks(state, bucket):
    state.seen["last"] = [bucket.index(), threading.Lock()]
    return ready(bucket.buffer())


def alone(group, bucket):
    return ready(bucket.buffer())
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    root.mkdir()
    (root / "own_hooks.py").write_text(HOOKS)
    return root


def spec(ranks: int, **hook: Any) -> dict[str, Any]:
    return {
        "task": {
            "entrypoint": "ratchet_worker.tasks.digits:DigitsTask",
            "args": {"steps": 6, "width": 4, "evaluate": False},
        },
        "world": {"ranks_per_node": ranks, "device": "cpu"},
        "hook": {"name": "custom", **hook},
        "checkpoint": {"every_steps": 1},
    }


def test_unsaveable_hook_state_and_diverging_replicas_end_the_job(tmp_path: Path, jobs: list[Job], code: Path) -> None:
    """A state that is wrong from the start, one that is so at its first save, and a hook that averages nothing; side by side."""
    state = {"hook": "own_hooks:locks", "state": "own_hooks:Growing"}
    asked = [
        spec(1, **state, state_args={"late": False}),
        spec(1, **state, state_args={"late": True}),
        spec(2, hook="own_hooks:alone"),
    ]
    jobs += [Job(tmp_path, one, code, job_id=f"job-{number}") for number, one in enumerate(asked)]
    attempts = [job.launch() for job in jobs]
    results = [attempt.wait() for attempt in attempts]
    expected = [
        (Cause.USER_ERROR, EXIT_USER_ERROR, 0, ["state.seen.lock", "_thread.lock", "own_hooks:Growing"]),
        (Cause.USER_ERROR, EXIT_USER_ERROR, 1, ["at step 1", "state.seen.last[1]", "leave it out"]),
        (
            Cause.CHECKPOINT_ERROR,
            EXIT_CHECKPOINT_ERROR,
            3,
            ["replicas have diverged", "of rank [1]", "own_hooks:alone", "set hook.replicas: rank"],
        ),
    ]
    for job, attempt, result, (cause, code_, step, words) in zip(jobs, attempts, results, expected, strict=True):
        assert (result.cause, result.exit_code) == (cause, code_), attempt.logs()
        # What cannot be saved is found out beside the training: it goes on until all ranks have agreed on the stop.
        assert result.last_step == step or (result.last_step > step and cause is Cause.CHECKPOINT_ERROR)
        assert len({end.last_step for end in result.ranks}) == 1
        assert [word for word in words if word not in str(result.message)] == []
        failures = attempt.messages(kind="checkpoint_failed")
        assert job.checkpoints() == [] and len(failures) == (3 if cause is Cause.CHECKPOINT_ERROR else 0)
