"""Jobs under arbitrary calls: the HTTP API in process, rounds of the real reconciler, a model agent, against the table of phases.

Hypothesis chooses the calls, with right and wrong ETags and Idempotency-Keys. What each must answer follows from the phase and
wish before it, by the transition table alone; whatever else moves a job must be in its history, which is replayed at each step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ratchet_contract.phases import Desired, Event, JobPhase, next_step
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Event as Row
from tests.support import invariants
from tests.support.api import FakeSubmission, spec
from tests.support.sim.agents import State
from tests.support.sim.processes import QUIET, SimDatabase
from tests.support.sim.stage_pool import stage_directory
from tests.support.sim.world import World

pytestmark = pytest.mark.takes_turns

EXAMPLES = int(os.environ.get("RATCHET_TEST_EXAMPLES", "4"))
_SPEC = spec(hook={"name": "allreduce"}, world={"ranks_per_node": 1, "device": "cpu"}, policy={"stop_grace": 5.0})
_ACTIONS = st.sampled_from(["suspend", "resume", "cancel", "preempt", "checkpoint"])
_WHICH = st.integers(0, 5)


class Jobs(RuleBasedStateMachine):
    """Whatever is asked in whatever order. ``database`` and ``folder`` are given by the test."""

    database: SimDatabase
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.database, self.folder, 0, QUIET)
        self.world._start_reconciler()
        app = create_app(Settings(home=self.folder), FakeSubmission(), self.database)
        self.client = TestClient(app, base_url="http://127.0.0.1")
        self.jobs: list[str] = []
        self.keys = 0

    def teardown(self) -> None:
        self.client.close()
        self.world.end()

    # --- users ---------------------------------------------------------------------------------------------------------

    @initialize()
    def first(self) -> None:
        self.submit()

    @rule()
    def submit(self) -> None:
        if len(self.jobs) < 4:
            answer = self._post("/v1/jobs", _SPEC, again=True)
            assert answer.status_code == 201, answer.text
            self.jobs.append(answer.json()["id"])

    @precondition(lambda self: self.jobs)
    @rule(which=_WHICH, action=_ACTIONS, again=st.booleans())
    def act(self, which: int, action: str, again: bool) -> None:
        job_id = self._job(which)
        before, told = self._get(job_id), self._events()
        cell = next_step(JobPhase(before["phase"]), Event(action), Desired(before["desired"]))
        answer = self._post(f"/v1/jobs/{job_id}/{action}", None, again=again)
        after = self._get(job_id)
        if cell.phase is None:
            assert (answer.status_code, answer.json()["code"]) == (409, cell.code)
            assert after == before
            return
        wish = cell.desired or Desired(before["desired"])
        assert answer.status_code in (200, 202), answer.text
        assert (after["phase"], after["desired"]) == (cell.phase, wish)
        if (before["phase"], before["desired"]) == (cell.phase, wish) and action != "checkpoint":
            assert self._events() == told, "what was there already is no news"

    @precondition(lambda self: self.jobs)
    @rule(which=_WHICH, priority=st.integers(-3, 3), tag=st.sampled_from(["none", "right", "any", "stale"]))
    def patch(self, which: int, priority: int, tag: str) -> None:
        job_id = self._job(which)
        before = self.client.get(f"/v1/jobs/{job_id}")
        answer = self.client.patch(f"/v1/jobs/{job_id}", json={"priority": priority}, headers=_match(before, tag))
        after = self._get(job_id)
        if tag == "stale":
            assert (answer.status_code, answer.json()["code"]) == (412, "precondition-failed")
            assert after == before.json()
        else:
            assert (answer.status_code, after["priority"], after["phase"]) == (200, priority, before.json()["phase"])

    @precondition(lambda self: self.jobs)
    @rule(which=_WHICH, tag=st.sampled_from(["none", "right", "stale"]))
    def delete(self, which: int, tag: str) -> None:
        job_id = self._job(which)
        before = self.client.get(f"/v1/jobs/{job_id}")
        cell = next_step(JobPhase(before.json()["phase"]), Event.DELETE)
        answer = self.client.delete(f"/v1/jobs/{job_id}", headers=_match(before, tag))
        if cell.phase is None:
            assert (answer.status_code, answer.json()["code"]) == (409, cell.code)
        elif tag == "stale":
            assert answer.status_code == 412
        elif answer.status_code == 409:
            assert answer.json()["code"] == "checkpoint-in-use" and any(self._forked_from(job_id))
        else:
            assert answer.status_code == 200, answer.text
            assert self.client.get(f"/v1/jobs/{job_id}").status_code == 404
            self.jobs.remove(job_id)
            return
        assert self._get(job_id) == before.json()

    @precondition(lambda self: 0 < len(self.jobs) < 5)
    @rule(which=_WHICH, again=st.booleans())
    def fork(self, which: int, again: bool) -> None:
        job_id = self._job(which)
        stored = self.client.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
        can = any(c["state"] == "committed" and c["lineage"] == "current" for c in stored)
        answer = self._post(f"/v1/jobs/{job_id}/fork", {}, again=again)
        if can:
            assert answer.status_code == 201, answer.text
            self.jobs.append(answer.json()["id"])
        else:
            assert (answer.status_code, answer.json()["code"]) == (404, "checkpoint-not-found")

    # --- the rest of the world -----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def reconcile(self, seconds: float) -> None:
        self.world.stage.clock.elapsed += seconds
        self.world.processes[0].turn()

    @rule(moves=st.integers(1, 6), fails=st.booleans())
    def agents(self, moves: int, fails: bool) -> None:
        for agent in self.world.engine.agents:
            if fails and moves == 6 and agent.state is State.TRAINING:
                agent.die("is killed")
            for _ in range(moves):
                agent.act()
            if agent.seen:
                agent.report()

    @invariant()
    def history_and_rows_agree(self) -> None:
        assert invariants.check_database(self.database, 3) == []

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _job(self, which: int) -> str:
        return self.jobs[which % len(self.jobs)]

    def _get(self, job_id: str) -> Any:
        answer = self.client.get(f"/v1/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _forked_from(self, job_id: str) -> list[bool]:
        return [str(self._get(other)["forked_from"]).startswith(f"{job_id}/") for other in self.jobs if other != job_id]

    def _post(self, path: str, body: Any, *, again: bool) -> httpx.Response:
        """``again``: with a key, twice, and then with another body: one effect, one answer, one refusal."""
        if not again:
            return self.client.post(path, json=body)
        self.keys += 1
        headers = {"Idempotency-Key": f"key-{self.keys}"}
        first = self.client.post(path, json=body, headers=headers)
        told = self._events()
        second = self.client.post(path, json=body, headers=headers)
        assert (second.status_code, second.content) == (first.status_code, first.content)
        assert second.headers["Idempotency-Replayed"] == "true"
        if body is not None:
            other = self.client.post(path, json=body | {"name": "another"}, headers=headers)
            assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")
        assert self._events() == told
        return first

    def _events(self) -> int | None:
        with self.database.read() as session:
            return session.scalar(sa.select(sa.func.max(Row.id)))


def _match(answer: httpx.Response, tag: str) -> dict[str, str]:
    tags = {"right": answer.headers["ETag"], "any": "*", "stale": '"0"'}
    return {} if tag == "none" else {"If-Match": tags[tag]}


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def simulated(request: pytest.FixtureRequest) -> Iterator[tuple[SimDatabase, Path]]:
    with stage_directory() as folder:
        url = (
            sqlite_url(folder / "ratchet.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
        )
        database = SimDatabase(url)
        upgrade(database)
        yield database, folder
        database.dispose()


def test_random_call_sequences_follow_the_transition_table(simulated: tuple[SimDatabase, Path]) -> None:
    Jobs.database, Jobs.folder = simulated
    run_state_machine_as_test(
        Jobs,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck),
            derandomize=True, database=None,
        ),
    )  # fmt: skip
