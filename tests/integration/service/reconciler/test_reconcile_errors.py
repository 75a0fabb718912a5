"""Attempts that cannot be looked after: the others go on, the job says why, and all goes on when the cause is gone."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.paths import AttemptPaths, HomePaths, JobPaths
from ratchet_contract.phases import JobPhase
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.isolation import file_access
from ratchet_service.launchers import attempt_files
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.observability import health
from ratchet_service.observability.health import Health, Unready
from ratchet_service.reconciler import drain_spools, finish_attempt, supervise
from tests.support.control_plane import Plane
from tests.support.run_as import AS_ROOT, UID, open_directory
from tests.support.server import processes_below, wait_for

pytestmark = pytest.mark.takes_turns

LONG = {"steps": 100_000}
NOWHERE = "n" * 300  # a link to it can neither be followed nor listed, whoever asks


def told(plane: Plane, job_id: str) -> list[str]:
    return [event.message for event in plane.events(job_id) if event.type == "reconcile-error"]


def test_unwritable_attempt_end_is_reported_once_and_retried(
    control_plane: Plane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of a read-only disk: an error of the call that makes the file."""
    reconciler = control_plane.start_reconciler()
    poisoned = control_plane.submit(LONG)
    control_plane.wait_job(poisoned, lambda job: job.step > 5, "training")
    real = attempt_files._fence

    def fence(paths: AttemptPaths) -> None:
        if poisoned in str(paths.root):
            raise OSError(errno.EROFS, "Read-only file system")
        real(paths)

    monkeypatch.setattr(attempt_files, "_fence", fence)
    control_plane.post(f"/v1/jobs/{poisoned}/cancel")
    job = control_plane.wait_job(
        poisoned, lambda job: job.reason == "reconcile-error", "told that it cannot be looked after"
    )
    assert job.phase is JobPhase.STOPPING
    assert job.message is not None and "OSError: [Errno 30] Read-only file system" in job.message
    watch = reconciler._watches[poisoned]
    wait_for(lambda: watch.failures >= 3, "two more tries", 30)
    other = control_plane.submit({"steps": 20})
    control_plane.wait(other, JobPhase.SUCCEEDED)
    assert len(told(control_plane, poisoned)) == 1
    tracebacks = [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]
    assert len(tracebacks) == 1, "one for each try floods the log"
    assert watch.paused_until - control_plane.database.clock.monotonic() < 30

    monkeypatch.setattr(attempt_files, "_fence", real)
    job = control_plane.wait(poisoned, JobPhase.CANCELLED)
    assert job.reason != "reconcile-error"
    assert len(told(control_plane, poisoned)) == 1


def _lock_made_a_directory(paths: AttemptPaths) -> None:
    paths.lock_file.unlink()
    paths.lock_file.mkdir()


def _fence_linked_to_nowhere(paths: AttemptPaths) -> None:
    paths.fence_file.symlink_to("/nonexistent/fence")


def _attempt_made_a_file(paths: AttemptPaths) -> None:
    paths.root.rename(paths.root.with_name("before"))
    paths.root.touch()


@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("damage", [_lock_made_a_directory, _fence_linked_to_nowhere, _attempt_made_a_file])
def test_job_whose_code_replaced_files_of_its_attempt_can_be_cancelled(
    control_plane: Plane, damage: Callable[[AttemptPaths], None]
) -> None:
    control_plane.start_reconciler(timing=Timing(kill_after=2.0))
    job_id = control_plane.submit(LONG, policy={"stop_grace": 1})
    control_plane.wait_job(job_id, lambda job: job.step > 5, "training")
    damage(control_plane.attempt_paths(job_id, 1))
    control_plane.post(f"/v1/jobs/{job_id}/cancel")
    control_plane.wait(job_id, JobPhase.CANCELLED)
    assert not processes_below(control_plane.settings.home)


def test_reconcile_error_reason_is_cleared_once_the_row_is_readable(control_plane: Plane) -> None:
    """A row of another version, from the first look on: the one of the database's jobs that is told in it."""
    job_id, good = control_plane.submit(LONG), control_plane.submit(LONG)
    control_plane.start_reconciler()
    for one in (job_id, good):
        control_plane.wait_job(one, lambda job: job.step > 5, "training")
    wish = sa.text("UPDATE jobs SET desired_cause = :word WHERE id = :job")
    with control_plane.database.write() as session:
        session.execute(wish, {"word": "of-tomorrow", "job": job_id})
    reason = sa.select(Job.reason, Job.message).where(Job.id == job_id)

    def said() -> tuple[str | None, str]:
        with control_plane.database.read() as session:
            found = session.execute(reason).one()
            return found[0], found[1] or ""

    wait_for(lambda: said()[0] == "reconcile-error", "the row to be told of", 30)
    assert "of-tomorrow" in said()[1]
    control_plane.post(f"/v1/jobs/{good}/cancel")
    control_plane.wait(good, JobPhase.CANCELLED)

    with control_plane.database.write() as session:
        session.execute(wish, {"word": None, "job": job_id})
    control_plane.wait_job(job_id, lambda job: job.reason is None, "supervised again")
    assert len(told(control_plane, job_id)) == 1
    control_plane.post(f"/v1/jobs/{job_id}/cancel")
    control_plane.wait(job_id, JobPhase.CANCELLED)


@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
def test_reconciler_with_failing_rounds_is_unready_until_a_round_succeeds(control_plane: Plane) -> None:
    """The database answers the probe, and no round comes to its end: the jobs' table is away."""
    reconciler = control_plane.start_reconciler()
    probe = Health(heartbeat=reconciler.heartbeat)
    ready = lambda: health.check(probe, control_plane.database, control_plane.paths)["reconciler"]  # noqa: E731
    wait_for(lambda: reconciler.heartbeat.succeeded_at is not None, "a round", 30)
    assert ready().status == "ok"
    with control_plane.database.write() as session:
        session.execute(sa.text("ALTER TABLE jobs RENAME TO away"))
    wait_for(lambda: reconciler.heartbeat.failures > 0, "a round to fail", 30)
    assert ready().status == "warning", "one may fail"
    wait_for(lambda: reconciler.heartbeat.failures >= health.FAILED_ROUNDS, "more of them", 60)
    with pytest.raises(Unready, match="OperationalError") as caught:
        ready()
    assert caught.value.code == "reconciler-failing"
    with control_plane.database.write() as session:
        session.execute(sa.text("ALTER TABLE away RENAME TO jobs"))
    wait_for(lambda: reconciler.heartbeat.failures == 0, "a round to succeed", 30)
    assert ready().status == "ok"
    control_plane.wait(control_plane.submit({"steps": 3}), JobPhase.SUCCEEDED)


def test_job_that_cannot_be_taken_over_does_not_block_other_jobs(control_plane: Plane) -> None:
    jobs = [control_plane.submit(LONG) for _ in range(2)]
    first = control_plane.start_reconciler()
    for one in jobs:
        control_plane.wait_job(one, lambda job: job.step > 5, "training")
    first.stop()
    control_plane.reconcilers[0][1].join(30)
    specs = {one: control_plane.job(one).spec for one in jobs}
    with control_plane.database.write() as session:
        session.get_one(Job, jobs[0]).spec = specs[jobs[0]] | {"hook": {"name": "of-tomorrow"}}
    control_plane.start_reconciler(lease=2)
    control_plane.wait_job(jobs[0], lambda job: job.reason == "reconcile-error", "told that it cannot be looked after")
    control_plane.post(f"/v1/jobs/{jobs[1]}/cancel")
    control_plane.wait(jobs[1], JobPhase.CANCELLED)
    with control_plane.database.write() as session:
        session.get_one(Job, jobs[0]).spec = specs[jobs[0]]
    control_plane.post(f"/v1/jobs/{jobs[0]}/cancel")
    control_plane.wait(jobs[0], JobPhase.CANCELLED)
    assert len(told(control_plane, jobs[0])) == 1


def _a_file(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.touch()


def _not_to_be_listed(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to(NOWHERE)


def _one_not_to_be_opened(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / "step-000000000010.a0001")
    (checkpoints / "step-000000000010.a0001").symlink_to(NOWHERE)


@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("damage", [_a_file, _not_to_be_listed, _one_not_to_be_opened])
def test_attempt_ends_although_its_checkpoints_are_unreadable(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    """The job's code did it, or the disk. What nobody can see is neither deleted nor called lost."""
    real, looked = finish_attempt.cleanup.scan_disk, list[JobPaths]()

    def look(paths: JobPaths, *args: Any) -> Any:
        if not looked:
            with control_plane.database.write() as session:
                row = session.get_one(Checkpoint, (paths.root.name, 10, 1))
                row.verification, row.verification_error = "damaged", "a digest"
            damage(paths.checkpoints)
        looked.append(paths)
        return real(paths, *args)

    monkeypatch.setattr(finish_attempt.cleanup, "scan_disk", look)
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 30}, checkpoint={"keep_last": 2})
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert {row.state for row in control_plane.checkpoints(job_id)} == {"committed"}
    said = [event.message for event in control_plane.events(job_id) if event.type == "checkpoint-not-deleted"]
    assert any("nothing in it is deleted" in message and "checkpoints" in message for message in said), said
    assert told(control_plane, job_id) == []


@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("place", ["spool", "spool/rank-00000.jsonl", "counters", "results", "logs/rank-00000.log"])
def test_attempt_ends_although_a_link_to_nowhere_replaced_its_files(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    real = supervise.ingest_leftover

    def ingest(database: Database, paths: JobPaths, *args: Any) -> int:
        damaged = paths.attempt(1).root / place
        if not damaged.is_symlink():
            if damaged.exists():
                damaged.rename(damaged.with_name("before"))
            damaged.symlink_to(NOWHERE)
        return real(database, paths, *args)

    monkeypatch.setattr(supervise, "ingest_leftover", ingest)
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 20, "epochs": {"1": {"at": 15, "do": "kill-agent"}}})
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert told(control_plane, job_id) == []
    dropped = [event.message for event in control_plane.events(job_id) if event.type == "message-dropped"]
    assert bool(dropped) is place.startswith("spool"), dropped


@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_spool_that_the_disk_or_the_process_cannot_read_now_is_read_later(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, failed = drain_spools.open_read, list[Path]()

    def open_read(path: Path) -> Any:
        if not failed and path.name == "rank-00000.jsonl":
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(drain_spools, "open_read", open_read)
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 20, "every": 5})
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert failed and [c.step for c in control_plane.checkpoints(job_id)] == [5, 10, 15, 20]
    assert not [event for event in control_plane.events(job_id) if event.type == "message-dropped"]


@AS_ROOT
@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("place", "mode"), [("attempts/0001/spool", 0), ("attempts/0001", 0o444), ("attempts", 0o444), (".", 0)]
)
def test_attempt_of_another_user_that_closed_its_directories_ends_and_names_them(
    database: Database, monkeypatch: pytest.MonkeyPatch, place: str, mode: int
) -> None:
    """As under ``--run-as``: the job's directory is given to that user once the ranks are dead."""
    _end_with(database, monkeypatch, lambda root: (root / place).chmod(mode), "Permission denied")


@AS_ROOT
@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
def test_attempt_of_another_user_that_closed_its_logs_ends(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    _end_with(database, monkeypatch, lambda root: JobPaths(root).attempt(1).log(0).parent.chmod(0o444), None)


@AS_ROOT
@pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
def test_attempt_of_another_user_that_linked_its_spool_to_a_file_ends_and_names_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(root: Path) -> None:
        spool = JobPaths(root).attempt(1).spool(0)
        spool.rename(spool.with_name("elsewhere"))
        spool.symlink_to("elsewhere")

    _end_with(database, monkeypatch, link, "is a symbolic link")


def _end_with(database: Database, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], text: str) -> None:
    """Run a job whose files belong to another user, and are damaged, when its attempt is ended: it ends all the same."""
    real, found = supervise.ingest_leftover, list[str]()

    def ingest(database: Database, paths: JobPaths, *args: Any) -> int:
        if not found:
            paths.root.parent.chmod(0o711)
            HomePaths(paths.root.parent.parent).run_as_file.touch()
            file_access.give_to_user(paths.root, UID, UID)
            damage(paths.root)
            found.append("damaged")
        return real(database, paths, *args)

    monkeypatch.setattr(supervise, "ingest_leftover", ingest)
    with open_directory() as folder:
        plane = Plane(folder, database)
        try:
            plane.serve_api()
            plane.start_reconciler()
            job_id = plane.submit({"steps": 20})
            plane.wait(job_id, JobPhase.SUCCEEDED)
            assert told(plane, job_id) == []
            dropped = [event.message for event in plane.events(job_id) if event.type == "message-dropped"]
            assert len(dropped) == (text is not None), dropped
            assert all("rank-00000.jsonl" in message and str(text) in message for message in dropped), dropped
        finally:
            plane.close()
