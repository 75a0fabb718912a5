"""A database that is older than the run directory: a backup was restored, and jobs had run on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import AttemptPhase, Cause, JobPhase
from ratchet_service import unrecorded
from ratchet_service.database import Database
from ratchet_service.unrecorded import Next, next_attempt
from tests.support.plane import Plane
from tests.support.restoring import put_aside, put_back
from tests.support.server import processes_below, wait_for


@pytest.fixture
def plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


def stop_reconcilers(plane: Plane) -> None:
    for reconciler, thread in plane.reconcilers:
        reconciler.stop()
        thread.join(30)
        assert not thread.is_alive()
    plane.reconcilers.clear()


def test_what_ran_behind_the_backup_is_taken_in_and_no_number_is_used_twice(plane: Plane) -> None:
    """Attempt 1 runs at the backup; 1 and 2 end and 3 runs on when it is restored. Another job came later than the backup."""
    plane.serve_api()
    plane.reconcile(lease=1.5)
    faults = {"1": {"at": 25, "do": "kill"}, "2": {"at": 45, "do": "kill"}}
    job_id = plane.submit({"steps": 100_000, "every": 10, "pause": 0.01, "epochs": faults})
    wait_for(lambda: plane.checkpoints(job_id), "a checkpoint", 30)
    before = put_aside(plane.database)
    assert [row["number"] for row in before["attempts"]] == [1]
    later = plane.submit({"steps": 100_000, "pause": 0.01})
    for one, epoch in ((job_id, 3), (later, 1)):
        plane.wait_job(one, lambda job: job.epoch == epoch and job.step >= 10, f"in attempt {epoch}")  # noqa: B023
    wait_for(lambda: any(c.epoch == 3 for c in plane.checkpoints(job_id)), "a checkpoint of attempt 3", 30)
    stop_reconcilers(plane)
    known = {(c.step, c.epoch): c.digest for c in plane.checkpoints(job_id)}
    first = plane.job(job_id).created_at

    put_back(plane.database, before)
    assert plane.job(job_id).epoch == 1
    told = unrecorded.compare(plane.paths, plane.database)
    assert (told.lost, told.ahead, told.gone) == ((later,), (job_id,), ())
    plane.reconcile(lease=1.5)
    job = plane.wait_job(job_id, lambda job: job.epoch == 4 and job.phase is JobPhase.RUNNING, "in attempt 4")

    def fourth() -> bool:  # the agent's own word may come behind its ranks'
        return plane.attempts(job_id)[-1].phase is AttemptPhase.RUNNING

    wait_for(fourth, "attempt 4 to run", 30)
    attempts = plane.attempts(job_id)
    assert [(a.number, a.phase) for a in attempts] == [
        *((n, AttemptPhase.ENDED) for n in (1, 2, 3)),
        (4, AttemptPhase.RUNNING),
    ]
    assert [a.cause for a in attempts] == [Cause.RANK_KILLED, Cause.RANK_KILLED, Cause.UNKNOWN, None]
    assert [a.base_step for a in attempts[:3]] == [0, 20, 40]
    newest = max(known)
    assert attempts[3].base_step is not None
    assert (attempts[3].base_step, attempts[3].base_epoch) >= newest, "what was safe is lost"
    assert attempts[3].base_epoch == 3
    assert {(c.step, c.epoch): c.digest for c in plane.checkpoints(job_id)}.items() >= known.items()
    assert [a.created_at for a in attempts] == sorted(a.created_at for a in attempts)
    assert attempts[0].created_at >= first
    found = [e.epoch for e in plane.events(job_id) if e.type == unrecorded.EVENT]
    assert found == [2, 3]
    assert job.failures <= 3
    wait_for(lambda: not processes_below(plane.paths.job(later).root), "the job that nobody knows to be ended", 30)
    assert list(plane.paths.job(later).checkpoints.iterdir()), "its files stay"
    told = unrecorded.compare(plane.paths, plane.database)
    assert (told.lost, told.ahead) == ((later,), ())


def test_an_agent_that_the_backup_knows_goes_on(plane: Plane) -> None:
    """The backup has fewer of its reports than it was told of: it sends them again, and nothing is stored twice."""
    plane.serve_api()
    plane.reconcile(lease=1.5)
    job_id = plane.submit({"steps": 120, "every": 10, "pause": 0.01})
    wait_for(lambda: plane.checkpoints(job_id), "a checkpoint", 30)
    before = put_aside(plane.database)
    plane.wait_job(job_id, lambda job: job.step >= 60, "further")
    stop_reconcilers(plane)
    put_back(plane.database, before)
    plane.reconcile(lease=1.5)
    job = plane.wait(job_id, JobPhase.SUCCEEDED, deadline=60)
    assert (job.epoch, job.step) == (1, 120)
    assert [c.step for c in plane.checkpoints(job_id)] == list(range(10, 121, 10))
    assert not any(c.adopted for c in plane.checkpoints(job_id))


def test_the_number_after_what_the_disk_has_seen(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path)
    assert next_attempt(paths, 0) == Next(1)
    for name in ("0001", "0003", "7", "junk"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert next_attempt(paths, 0) == Next(1, found=True)
    assert next_attempt(paths, 1) == Next(3, found=True)
    assert next_attempt(paths, 3) == Next(4)
    paths.checkpoint(500, 5).mkdir(parents=True)
    assert next_attempt(paths, 3) == Next(6, skipped=range(4, 6))
    (paths.quarantine / "step-000000000700.a0008.1").mkdir(parents=True)
    assert next_attempt(paths, 3) == Next(9, skipped=range(4, 9))
    assert next_attempt(paths, 12) == Next(13)


def test_numbers_of_which_checkpoints_alone_are_left_are_passed_over(plane: Plane) -> None:
    """What is there under them is nobody's, and not used."""
    plane.serve_api()
    job_id = plane.submit({"steps": 5})
    left = plane.paths.job(job_id).checkpoint(700, 4)
    left.mkdir(parents=True)
    plane.reconcile(lease=1.5)
    job = plane.wait(job_id, JobPhase.SUCCEEDED)
    assert (job.epoch, job.step) == (5, 5)
    (attempt,) = plane.attempts(job_id)
    assert (attempt.number, attempt.base_step) == (5, 0)
    assert plane.paths.job(job_id).attempt(5).launch_file.exists()
