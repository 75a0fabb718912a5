"""Reconcilers that die, stall or multiply: no job is run twice, none is lost. Both databases."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.phases import JobPhase
from ratchet_contract.protocol.messages import AttemptResult
from ratchet_service.db import leases
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.leases import LeaseLost
from ratchet_service.db.models import AttemptNode, Job
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.reconciler import finish_attempt
from ratchet_service.reconciler.drain_spools import batches
from tests.support.control_plane import Plane, trainer_launcher
from tests.support.server import agent_pid, wait_for

pytestmark = pytest.mark.takes_turns


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


class Died(BaseException):
    """The reconciler's process ends here: nothing is cleaned up."""


class DiesBefore(LocalLauncher):
    def submit(self, plan: LaunchPlan) -> None:
        raise Died


class DiesAfterWriting(LocalLauncher):
    """Between ``launch.json`` and the start of the agent."""

    def submit(self, plan: LaunchPlan) -> None:
        self._agent = ("/nonexistent/python",)
        try:
            super().submit(self.plan(plan.launch))
        except Exception as error:
            raise Died from error


class DiesAfter(LocalLauncher):
    def submit(self, plan: LaunchPlan) -> None:
        super().submit(plan)
        raise Died


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """Reconcilers' threads that ended as their process would."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    return seen


def test_reconciler_crash_around_submission_runs_the_attempt_exactly_once(
    control_plane: Plane, deaths: list[type[BaseException]]
) -> None:
    control_plane.serve_api()
    jobs = []
    for kind in (DiesBefore, DiesAfterWriting, DiesAfter):
        jobs.append(control_plane.submit({"steps": 20}))
        control_plane.start_reconciler(trainer_launcher(control_plane.paths, kind), lease=600)
        wait_for(lambda: len(deaths) == len(jobs), "the reconciler to die", 30)
        assert control_plane.job(jobs[-1]).phase is JobPhase.STARTING
    assert deaths == [Died] * 3
    with control_plane.database.write() as session:
        session.execute(sa.update(Job).values(lease_expires_at=utc_now()))
    control_plane.start_reconciler()
    for job_id in jobs:
        control_plane.wait(job_id, JobPhase.SUCCEEDED)
        (attempt,) = control_plane.attempts(job_id)
        assert (attempt.number, attempt.last_step, attempt.steps_lost) == (1, 20, 0)
        assert "another agent" not in control_plane.attempt_paths(job_id, 1).agent_log.read_text()


def test_two_reconcilers_run_every_job_once_and_share_no_slot(control_plane: Plane) -> None:
    control_plane.serve_api()
    jobs = [control_plane.submit({"steps": 10}, resources={"cpus_per_rank": 2}) for _ in range(5)]
    control_plane.start_reconciler()
    control_plane.start_reconciler()
    for job_id in jobs:
        control_plane.wait(job_id, JobPhase.SUCCEEDED, deadline=60)
    spans = []
    for job_id in jobs:
        (attempt,) = control_plane.attempts(job_id)
        assert "another agent" not in control_plane.attempt_paths(job_id, 1).agent_log.read_text()
        with control_plane.database.read() as session:
            node = session.get_one(AttemptNode, (job_id, 1, 0))
        assert len(node.cpu_slots) == 2
        spans.append((attempt.created_at, attempt.ended_at, set(node.cpu_slots)))
    for i, (begin, end, slots) in enumerate(spans):
        for other_begin, other_end, others in spans[i + 1 :]:
            assert end is not None and other_end is not None
            assert end <= other_begin or other_end <= begin or not slots & others


def test_restarted_service_adopts_living_agents_and_replaces_dead_ones(control_plane: Plane) -> None:
    service = control_plane.start_process()
    lives = control_plane.submit({"steps": 100_000, "every": 10})
    dies = control_plane.submit({"steps": 100_000, "every": 10})
    for job_id in (lives, dies):
        control_plane.wait_job(job_id, lambda job: job.committed_step >= 10, "saved")
    agents = {job_id: agent_pid(control_plane.attempt_paths(job_id, 1)) for job_id in (lives, dies)}
    service.kill()
    service.wait(10)
    os.kill(agents[dies], signal.SIGKILL)
    step = control_plane.job(lives).step
    control_plane.start_process()
    control_plane.wait_job(lives, lambda job: job.step > step + 20, "training on")
    wait_for(lambda: control_plane.attempts(dies)[-1].base_step, "the other to train in a second attempt", 30)
    assert control_plane.job(lives).attempt == 1
    assert agent_pid(control_plane.attempt_paths(lives, 1)) == agents[lives]
    first, second = control_plane.attempts(dies)
    assert second.base_step == first.committed_step == first.last_step - (first.steps_lost or 0)
    for job_id in (lives, dies):
        control_plane.post(f"/v1/jobs/{job_id}/cancel")
    for job_id in (lives, dies):
        control_plane.wait(job_id, JobPhase.CANCELLED)
    assert [len(control_plane.attempts(job_id)) for job_id in (lives, dies)] == [1, 2]


def test_unreported_spools_and_results_are_read_from_disk_once(control_plane: Plane) -> None:
    control_plane.serve_api()
    job_id = control_plane.submit({"steps": 30, "epochs": {"1": {"at": 27, "do": "kill-agent"}}})
    control_plane.paths.service_file.unlink()  # the agents find no service
    control_plane.start_reconciler()
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    rows = control_plane.checkpoints(job_id)
    assert [(row.step, row.attempt, row.adopted) for row in rows] == [(10, 1, False), (20, 1, False), (30, 2, False)]
    assert [a.training_at is not None for a in control_plane.attempts(job_id)] == [True, True]
    assert [a.steps_lost for a in control_plane.attempts(job_id)] == [7, 0]
    result = AttemptResult.model_validate_json(control_plane.attempt_paths(job_id, 2).result_file.read_bytes())
    last = control_plane.attempts(job_id)[1]
    assert last.ended_at == datetime.fromisoformat(result.ended_at)  # not when the service came to look
    ran = sum(
        (a.ended_at - a.begun_at).total_seconds() for a in control_plane.attempts(job_id) if a.ended_at and a.begun_at
    )
    assert control_plane.job(job_id).running_seconds == pytest.approx(ran)
    for attempt in (1, 2):
        lines = control_plane.attempt_paths(job_id, attempt).spool(0).read_text().splitlines()
        with control_plane.database.read() as session:
            assert session.get_one(AttemptNode, (job_id, attempt, 0)).acked == {"0": len(lines)}
    types = [e.type for e in control_plane.events(job_id)]
    assert types.count("training") == 2


def test_attempt_ends_although_user_code_wrote_a_spool_of_no_sender(control_plane: Plane, tmp_path: Path) -> None:
    """The agent of a job without copies in an object store writes none of its own."""
    control_plane.serve_api()
    go = tmp_path / "go"
    job_id = control_plane.submit({"steps": 5, "epochs": {"1": {"at": 3, "after": str(go), "do": "train on"}}})
    paths = control_plane.attempt_paths(job_id, 1)
    control_plane.start_reconciler()
    wait_for(paths.spool(0).exists, "the rank to start", 30)
    paths.agent_spool.write_text('{"kind":"progress","rank":-1,"at":"2026-01-01T00:00:00Z","step":1}\n' * 600)
    go.touch()
    control_plane.wait(job_id, JobPhase.SUCCEEDED, deadline=30)
    (dropped,) = [event for event in control_plane.events(job_id) if event.type == "message-dropped"]
    assert "agent.jsonl" in dropped.message and dropped.attempt == 1


def test_unreported_checkpoint_with_an_unreadable_time_is_adopted(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = finish_attempt.find_adoptable

    def adoptable(*args: Any, **more: Any) -> Any:
        return [manifest.model_copy(update={"created": "yesterday"}) for manifest in real(*args, **more)]

    monkeypatch.setattr(finish_attempt, "find_adoptable", adoptable)
    control_plane.serve_api()
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 10, "epochs": {"1": {"at": 10, "do": "mute"}}})
    job = control_plane.wait(job_id, JobPhase.SUCCEEDED)
    (row,) = control_plane.checkpoints(job_id)
    assert row.adopted and job.created_at < row.created_at <= utc_now()


def test_spool_batches_skip_partial_lines_and_keep_sequence_numbers(tmp_path: Path) -> None:
    spool = tmp_path / "rank-00003.jsonl"
    good = '{"kind":"progress","rank":3,"at":"2026-01-01T00:00:00Z","step":%d}'
    spool.write_text("\n".join([good % 1, "garbage", good % 3, good % 4]) + '\n{"kind":"prog')
    (batch,) = batches(spool, 3, acked=1)
    assert (batch.rank, batch.from_seq) == (3, 2)
    assert [m.kind for m in batch.messages] == ["note", "progress", "progress"]
    assert list(batches(spool, 3, acked=4)) == []
    assert list(batches(tmp_path / "absent", 0, acked=0)) == []


def test_reconciler_stop_releases_leases_and_leaves_agents_running(control_plane: Plane) -> None:
    control_plane.serve_api()
    job_id = control_plane.submit({"steps": 100_000})
    first = control_plane.start_reconciler()
    control_plane.wait(job_id, JobPhase.RUNNING)
    agent = agent_pid(control_plane.attempt_paths(job_id, 1))
    first.stop()
    control_plane.wait_job(job_id, lambda job: job.lease_token is None, "free")
    os.kill(agent, 0)
    control_plane.start_reconciler()
    control_plane.post(f"/v1/jobs/{job_id}/cancel")
    control_plane.wait(job_id, JobPhase.CANCELLED)
    assert len(control_plane.attempts(job_id)) == 1


def insert(database: Database, **columns: object) -> str:
    now = utc_now()
    values: dict[str, object] = {
        "id": "job-000000000001", "name": "t", "phase": JobPhase.RUNNING, "spec": {}, "resolved": {}, "spec_digest": "",
        "created_at": now, "updated_at": now, "attempt": 3, **columns,
    }  # fmt: skip
    with database.write() as session:
        session.add(Job(**values))
    return str(values["id"])


def test_concurrent_lease_takers_let_only_one_win(database: Database) -> None:
    insert(database)
    with database.read() as session:
        (free,) = leases.free_jobs(session, (), sa.true())
    taken = []

    def take() -> None:
        with database.write() as session:
            lease = leases.acquire(session, free, "a/1/1", 60)
        if lease is not None:
            taken.append(lease)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(taken) == 1
    with database.write() as session:
        assert leases.lock_leased_job(session, taken[0]).attempt == 3
        assert leases.free_jobs(session, (), sa.true()) == []


def test_expired_lease_is_taken_over_and_the_first_owner_loses_write_access(database: Database) -> None:
    job_id = insert(database)
    with database.write() as session:
        first = leases.acquire(session, leases.free_jobs(session, (), sa.true())[0], "elsewhere/1/1", 60)
        assert first is not None
    with database.write() as session:
        leases.renew(session, [first], -1.0)
    with database.write() as session:
        second = leases.acquire(session, leases.free_jobs(session, (), sa.true())[0], "elsewhere/2/2", 60)
        assert second is not None
    with database.write() as session, pytest.raises(LeaseLost):
        leases.lock_leased_job(session, first)
    with database.write() as session:
        leases.renew(session, [first], 60)
        leases.release(session, [first])
        assert leases.lock_leased_job(session, second).id == job_id


def test_lease_renewed_meanwhile_is_not_taken_over(database: Database) -> None:
    """It had run out when it was seen; the owner, back from where it was held up, trusts in it again."""
    job_id = insert(database)
    with database.write() as session:
        first = leases.acquire(session, leases.free_jobs(session, (), sa.true())[0], "elsewhere/1/1", -1.0)
        assert first is not None
    with database.read() as session:
        (seen,) = leases.free_jobs(session, (), sa.true())
    with database.write() as session:
        assert leases.renew(session, [first], 60) == {job_id}
    with database.write() as session:
        assert leases.acquire(session, seen, "elsewhere/2/2", 60) is None
    with database.write() as session:
        assert leases.lock_leased_job(session, first).lease_owner == "elsewhere/1/1"


def test_lease_of_an_earlier_attempt_is_lost(database: Database) -> None:
    insert(database)
    with database.write() as session:
        lease = leases.acquire(session, leases.free_jobs(session, (), sa.true())[0], "a/1/1", 60)
        assert lease is not None
        session.execute(sa.update(Job).values(attempt=4))
    with database.write() as session, pytest.raises(LeaseLost):
        leases.lock_leased_job(session, lease)


def test_lease_of_a_dead_local_process_is_free_at_once(database: Database) -> None:
    host = leases.new_owner().rsplit("/", 2)[0]
    later = utc_now() + timedelta(minutes=5)
    insert(database, lease_owner=leases.new_owner(), lease_token="t", lease_expires_at=later)
    with database.write() as session:
        assert leases.free_jobs(session, (), sa.true()) == []
        session.execute(sa.update(Job).values(lease_owner=f"elsewhere/{os.getpid()}/1"))
        assert leases.free_jobs(session, (), sa.true()) == []
        session.execute(sa.update(Job).values(lease_owner=f"{host}/{os.getpid()}/1"))
        assert len(leases.free_jobs(session, (), sa.true())) == 1
