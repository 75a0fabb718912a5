"""A trial ends early, its total and schedules as they are, and strikes itself where its plan says; ranks and agents are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.launch import Attempt, Job
from tests.support.server import processes_below, wait_for
from tests.support.user_projects import make_project


class Trials:
    def __init__(self, home: Path) -> None:
        self.home, self.project = home, make_project(home / "project")
        self.jobs: list[Job] = []

    def job(self, job_id: str, trial: dict[str, Any] | None, **args: Any) -> Job:
        spec = {
            "task": {"entrypoint": "mine:Mine", "args": {"steps": 40, **args}},
            "code": {"path": str(self.project)},
            "checkpoint": {"every_steps": 3, "first": "off"},
            "trial": trial,
        }
        self.jobs.append(Job(self.home, spec, self.project, job_id=job_id))
        return self.jobs[-1]


@pytest.fixture
def trials(tmp_path: Path) -> Iterator[Trials]:
    made = Trials(tmp_path)
    yield made
    for job in made.jobs:
        job.close()


def facts(attempt: Attempt) -> dict[str, Any]:
    (note,) = [message for message in attempt.messages(kind="note") if message.type == "trial-ended"]
    return dict(note.data)


def test_trial_ends_at_end_at_and_injects_planned_faults(trials: Trials) -> None:
    whole = trials.job("whole", {"end_at": 13}, evaluate_every=8)
    attempt = whole.launch()
    result = attempt.wait()
    assert (result.cause, result.exit_code, result.last_step) == (Cause.COMPLETED, 0, 13), attempt.logs()
    told = facts(attempt)
    assert (told["step"], told["total"], told["evaluations"], told["batches"]) == (13, 40, [8], 1)
    assert whole.checkpoints()[-1] == "step-000000000013.a0001"

    plan = [("kill-rank", 1, 5), ("kill-in-evaluation", 0, 8), ("kill-agent", 1, 11), ("preempt", 0, 11)]
    faults = [{"attempt": n + 1, "kind": kind, "rank": r, "step": s} for n, (kind, r, s) in enumerate(plan)]
    cut = trials.job("cut", {"end_at": 13, "faults": faults}, evaluate_every=8)
    attempt = cut.launch()
    result = attempt.wait()
    assert (result.cause, result.rank, result.last_step) == (Cause.RANK_KILLED, 1, 5), attempt.logs()
    attempt = cut.launch()
    result = attempt.wait()
    assert (result.cause, result.rank, result.last_step) == (Cause.RANK_KILLED, 0, 8), attempt.logs()
    attempt = cut.launch()
    wait_for(lambda: attempt.agent.poll() is not None, "the agent to kill itself", 60)
    assert attempt.agent.poll() == -9 and not attempt.paths.result_file.exists(), attempt.logs()
    wait_for(lambda: not processes_below(attempt.paths.root), "its ranks to die with it", 10)
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.SIGTERM, attempt.logs()
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    bases = [one.base() for one in cut.attempts]
    assert [base and base.step for base in bases[:4]] == [0, 3, 6, 9] and bases[4] is not None
    assert bases[4].step in (11, 12)  # whoever was ahead takes the others along
    assert [one.report().verdict for one in cut.attempts[1:]] == ["exact"] * 4
    found = compare(whole.newest(), cut.newest())
    assert found.identical, render(found)


def test_trial_without_end_at_covers_an_epoch_and_an_evaluation(trials: Trials) -> None:
    attempt = trials.job("auto", {}, evaluate_every=5).launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    told = facts(attempt)
    assert told["epoch_ends"] and told["evaluations"][0] == 5
    assert told["step"] == max(told["epoch_ends"][0], 5) + 8 < told["total"]


def test_job_that_ends_before_the_end_of_the_trial_completes(trials: Trials) -> None:
    attempt = trials.job("short", {"end_at": 50}, steps=6).launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert (facts(attempt)["step"], facts(attempt)["total"]) == (6, 6)
