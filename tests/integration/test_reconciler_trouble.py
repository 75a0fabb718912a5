"""Attempts that cannot be looked after: the others go on, the job says why, and all goes on when the cause is gone."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import JobPhase
from ratchet_service import ending, health
from ratchet_service.health import Health, Unready
from ratchet_service.models import Checkpoint, Job
from tests.support.plane import Plane
from tests.support.server import wait_for

LONG = {"steps": 100_000}
NOWHERE = "n" * 300  # a link to it can neither be followed nor listed, whoever asks


def told(plane: Plane, job_id: str) -> list[str]:
    return [event.message for event in plane.events(job_id) if event.type == "reconcile-error"]


def test_an_attempt_whose_end_cannot_be_written_is_told_of_once_and_ends_when_it_can(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    """In the place of a read-only disk: a link to where no file can be made."""
    reconciler = plane.reconcile()
    poisoned = plane.submit(LONG)
    plane.wait_job(poisoned, lambda job: job.step > 5, "training")
    fence = plane.attempt_paths(poisoned, 1).fence_file
    fence.symlink_to("/nonexistent/fence")
    plane.post(f"/v1/jobs/{poisoned}/cancel")
    job = plane.wait_job(poisoned, lambda job: job.reason == "reconcile-error", "told that it cannot be looked after")
    assert job.phase is JobPhase.STOPPING
    assert job.message is not None and "FileNotFoundError: [Errno 2] No such file or directory" in job.message
    watch = reconciler._watches[poisoned]
    wait_for(lambda: watch.failures >= 3, "two more tries", 30)
    other = plane.submit({"steps": 20})
    plane.wait(other, JobPhase.SUCCEEDED)
    assert len(told(plane, poisoned)) == 1
    tracebacks = [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]
    assert len(tracebacks) == 1, "one for each try floods the log"
    assert watch.paused_until - plane.database.clock.monotonic() < 30

    fence.unlink()
    job = plane.wait(poisoned, JobPhase.CANCELLED)
    assert job.reason != "reconcile-error"
    assert len(told(plane, poisoned)) == 1


def test_the_reason_goes_with_the_trouble_while_the_attempt_goes_on(plane: Plane) -> None:
    """A row of another version, from the first look on: the one of the database's jobs that is told in it."""
    job_id, good = plane.submit(LONG), plane.submit(LONG)
    plane.reconcile()
    for one in (job_id, good):
        plane.wait_job(one, lambda job: job.step > 5, "training")
    wish = sa.text("UPDATE jobs SET desired_cause = :word WHERE id = :job")
    with plane.database.write() as session:
        session.execute(wish, {"word": "of-tomorrow", "job": job_id})
    reason = sa.select(Job.reason, Job.message).where(Job.id == job_id)

    def said() -> tuple[str | None, str]:
        with plane.database.read() as session:
            found = session.execute(reason).one()
            return found[0], found[1] or ""

    wait_for(lambda: said()[0] == "reconcile-error", "the row to be told of", 30)
    assert "of-tomorrow" in said()[1]
    plane.post(f"/v1/jobs/{good}/cancel")
    plane.wait(good, JobPhase.CANCELLED)

    with plane.database.write() as session:
        session.execute(wish, {"word": None, "job": job_id})
    plane.wait_job(job_id, lambda job: job.reason is None, "looked after again")
    assert len(told(plane, job_id)) == 1
    plane.post(f"/v1/jobs/{job_id}/cancel")
    plane.wait(job_id, JobPhase.CANCELLED)


@pytest.mark.parametrize("migrated", ["sqlite"], indirect=True)
def test_a_reconciler_whose_rounds_fail_is_not_ready_and_one_that_heals_is(plane: Plane) -> None:
    """The database answers the probe, and no round comes to its end: the jobs' table is away."""
    reconciler = plane.reconcile()
    probe = Health(beat=reconciler.beat)
    ready = lambda: health.check(probe, plane.database, plane.paths)["reconciler"]  # noqa: E731
    wait_for(lambda: reconciler.beat.succeeded is not None, "a round", 30)
    assert ready().status == "ok"
    with plane.database.write() as session:
        session.execute(sa.text("ALTER TABLE jobs RENAME TO away"))
    wait_for(lambda: reconciler.beat.failures > 0, "a round to fail", 30)
    assert ready().status == "warning", "one may fail"
    wait_for(lambda: reconciler.beat.failures >= health.FAILED_ROUNDS, "more of them", 60)
    with pytest.raises(Unready, match="OperationalError") as caught:
        ready()
    assert caught.value.code == "reconciler-failing"
    with plane.database.write() as session:
        session.execute(sa.text("ALTER TABLE away RENAME TO jobs"))
    wait_for(lambda: reconciler.beat.failures == 0, "a round to succeed", 30)
    assert ready().status == "ok"
    plane.wait(plane.submit({"steps": 3}), JobPhase.SUCCEEDED)


def test_a_job_that_cannot_be_taken_over_says_so_and_the_others_are(plane: Plane) -> None:
    jobs = [plane.submit(LONG) for _ in range(2)]
    first = plane.reconcile()
    for one in jobs:
        plane.wait_job(one, lambda job: job.step > 5, "training")
    first.stop()
    plane.reconcilers[0][1].join(30)
    specs = {one: plane.job(one).spec for one in jobs}
    with plane.database.write() as session:
        session.get_one(Job, jobs[0]).spec = specs[jobs[0]] | {"hook": {"name": "of-tomorrow"}}
    plane.reconcile(lease=2)
    plane.wait_job(jobs[0], lambda job: job.reason == "reconcile-error", "told that it cannot be looked after")
    plane.post(f"/v1/jobs/{jobs[1]}/cancel")
    plane.wait(jobs[1], JobPhase.CANCELLED)
    with plane.database.write() as session:
        session.get_one(Job, jobs[0]).spec = specs[jobs[0]]
    plane.post(f"/v1/jobs/{jobs[0]}/cancel")
    plane.wait(jobs[0], JobPhase.CANCELLED)
    assert len(told(plane, jobs[0])) == 1


def _a_file(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.touch()


def _not_to_be_listed(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to(NOWHERE)


def _one_not_to_be_opened(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / "step-000000000010.a0001")
    (checkpoints / "step-000000000010.a0001").symlink_to(NOWHERE)


@pytest.mark.parametrize("migrated", ["sqlite"], indirect=True)
@pytest.mark.parametrize("damage", [_a_file, _not_to_be_listed, _one_not_to_be_opened])
def test_an_attempt_ends_though_its_checkpoints_cannot_be_looked_at(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    """The job's code did it, or the disk. What nobody can see is neither deleted nor called lost."""
    real, looked = ending.tidying.look, list[JobPaths]()

    def look(paths: JobPaths, *args: Any) -> Any:
        if not looked:
            with plane.database.write() as session:
                row = session.get_one(Checkpoint, (paths.root.name, 10, 1))
                row.verification, row.verification_error = "damaged", "a digest"
            damage(paths.checkpoints)
        looked.append(paths)
        return real(paths, *args)

    monkeypatch.setattr(ending.tidying, "look", look)
    plane.reconcile()
    job_id = plane.submit({"steps": 30}, checkpoint={"keep_last": 2})
    plane.wait(job_id, JobPhase.SUCCEEDED)
    assert {row.state for row in plane.checkpoints(job_id)} == {"committed"}
    said = [event.message for event in plane.events(job_id) if event.type == "checkpoint-not-deleted"]
    assert any("nothing of it is deleted" in message and "checkpoints" in message for message in said), said
    assert told(plane, job_id) == []
