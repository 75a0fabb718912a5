"""A database that is older than the run directory: a backup was restored, and jobs had run on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import AttemptPhase, Cause, Desired, EventType, JobPhase
from ratchet_contract.protocol.messages import Note
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.checkpoints import run_directory_scan
from ratchet_service.checkpoints.run_directory_scan import Next, next_attempt
from ratchet_service.db.engine import Database
from ratchet_service.db.models import AttemptNode
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_worker.ipc.log_lines import now
from tests.support.control_plane import Plane
from tests.support.database_restore import dump_rows, restore_rows
from tests.support.server import processes_below, wait_for

pytestmark = pytest.mark.takes_turns


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


def stop_reconcilers(plane: Plane) -> None:
    for reconciler, thread in plane.reconcilers:
        reconciler.stop()
        thread.join(30)
        assert not thread.is_alive()
    plane.reconcilers.clear()


def test_restored_backup_adopts_later_attempts_and_reuses_no_number(control_plane: Plane) -> None:
    """Attempt 1 runs at the backup; 1 and 2 end and 3 runs on when it is restored. Another job came later than the backup."""
    control_plane.serve_api()
    control_plane.start_reconciler(lease=1.5)
    dumped = control_plane.paths.home / "dumped"
    faults = {"1": {"at": 25, "do": "kill", "after": str(dumped)}, "2": {"at": 45, "do": "kill"}}
    job_id = control_plane.submit({"steps": 100_000, "every": 10, "pause": 0.01, "epochs": faults})
    wait_for(lambda: control_plane.checkpoints(job_id), "a checkpoint", 30)
    before = dump_rows(control_plane.database)
    assert [row["number"] for row in before["attempts"]] == [1]
    dumped.touch()
    later = control_plane.submit({"steps": 100_000, "pause": 0.01})
    for one, attempt in ((job_id, 3), (later, 1)):
        control_plane.wait_job(one, lambda job: job.attempt == attempt and job.step >= 10, f"in attempt {attempt}")  # noqa: B023
    wait_for(lambda: any(c.attempt == 3 for c in control_plane.checkpoints(job_id)), "a checkpoint of attempt 3", 30)
    stop_reconcilers(control_plane)
    known = {(c.step, c.attempt): c.digest for c in control_plane.checkpoints(job_id)}
    first = control_plane.job(job_id).created_at

    restore_rows(control_plane.database, before)
    assert control_plane.job(job_id).attempt == 1
    told = run_directory_scan.compare(control_plane.paths, control_plane.database)
    assert (told.without_row, told.with_unknown_attempts, told.without_directory) == ((later,), (job_id,), ())
    control_plane.start_reconciler(lease=1.5)
    job = control_plane.wait_job(job_id, lambda job: job.attempt == 4 and job.phase is JobPhase.RUNNING, "in attempt 4")

    def fourth() -> bool:  # the agent's own word may come behind its ranks'
        return control_plane.attempts(job_id)[-1].phase is AttemptPhase.RUNNING

    wait_for(fourth, "attempt 4 to run", 30)
    attempts = control_plane.attempts(job_id)
    assert [(a.number, a.phase) for a in attempts] == [
        *((n, AttemptPhase.ENDED) for n in (1, 2, 3)),
        (4, AttemptPhase.RUNNING),
    ]
    assert [a.cause for a in attempts] == [Cause.RANK_KILLED, Cause.RANK_KILLED, Cause.UNKNOWN, None]
    assert [a.base_step for a in attempts[:3]] == [0, 20, 40]
    newest = max(known)
    assert attempts[3].base_step is not None
    assert (attempts[3].base_step, attempts[3].base_attempt) >= newest, "what was safe is lost"
    assert attempts[3].base_attempt == 3
    assert {(c.step, c.attempt): c.digest for c in control_plane.checkpoints(job_id)}.items() >= known.items()
    assert [a.created_at for a in attempts] == sorted(a.created_at for a in attempts)
    assert attempts[0].created_at >= first
    found = [e.attempt for e in control_plane.events(job_id) if e.type == EventType.ATTEMPT_FOUND]
    assert found == [2, 3]
    assert job.failures <= 3
    wait_for(
        lambda: not processes_below(control_plane.paths.job(later).root), "the job that nobody knows to be ended", 30
    )
    assert list(control_plane.paths.job(later).checkpoints.iterdir()), "its files stay"
    told = run_directory_scan.compare(control_plane.paths, control_plane.database)
    assert (told.without_row, told.with_unknown_attempts) == ((later,), ())


def test_restored_backup_lets_a_known_running_agent_continue(control_plane: Plane) -> None:
    """The backup has fewer of its reports than it was told of: it sends them again, and nothing is stored twice."""
    control_plane.serve_api()
    control_plane.start_reconciler(lease=1.5)
    job_id = control_plane.submit({"steps": 120, "every": 10, "pause": 0.01})
    wait_for(lambda: control_plane.checkpoints(job_id), "a checkpoint", 30)
    before = dump_rows(control_plane.database)
    control_plane.wait_job(job_id, lambda job: job.step >= 60, "further")
    stop_reconcilers(control_plane)
    restore_rows(control_plane.database, before)
    control_plane.start_reconciler(lease=1.5)
    job = control_plane.wait(job_id, JobPhase.SUCCEEDED, deadline=60)
    assert (job.attempt, job.step) == (1, 120)
    assert [c.step for c in control_plane.checkpoints(job_id)] == list(range(10, 121, 10))
    assert not any(c.adopted for c in control_plane.checkpoints(job_id))


def test_next_attempt_number_follows_the_attempts_found_on_disk(tmp_path: Path) -> None:
    paths = JobPaths(tmp_path)
    assert next_attempt(paths, 0) == Next(1)
    for name in ("0001", "0003", "7", "junk", "9" * 9, "9" * 30, "\u00b2"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert next_attempt(paths, 0) == Next(1, on_disk=True)
    assert next_attempt(paths, 1) == Next(3, on_disk=True)
    assert next_attempt(paths, 3) == Next(4)
    paths.checkpoint(500, 5).mkdir(parents=True)
    assert next_attempt(paths, 3) == Next(6, skipped=range(4, 6))
    (paths.quarantine / "step-000000000700.a0008.1").mkdir(parents=True)
    assert next_attempt(paths, 3) == Next(9, skipped=range(4, 9))
    for number in ("9" * 9, "9" * 30):  # made by user code: too many to skip, and too large for the database
        paths.checkpoint(900, int(number)).mkdir()
    assert next_attempt(paths, 12) == Next(13)


def test_attempt_numbers_with_leftover_checkpoints_are_skipped(control_plane: Plane) -> None:
    """What is there under them is nobody's, and not used."""
    control_plane.serve_api()
    job_id = control_plane.submit({"steps": 5})
    left = control_plane.paths.job(job_id).checkpoint(700, 4)
    left.mkdir(parents=True)
    control_plane.start_reconciler(lease=1.5)
    job = control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert (job.attempt, job.step) == (5, 5)
    (attempt,) = control_plane.attempts(job_id)
    assert (attempt.number, attempt.base_step) == (5, 0)
    assert control_plane.paths.job(job_id).attempt(5).launch_file.exists()


def test_attempt_found_on_disk_is_ended_with_the_nodes_and_the_ranks_that_it_had(control_plane: Plane) -> None:
    """The world and the hook were changed after the backup, before the attempt: the rows have those of the backup."""
    control_plane.serve_api()
    job_id = control_plane.submit({"steps": 5}, world={"ranks_per_node": 1})
    job = control_plane.job(job_id)
    changed = {"world": {"nodes": 2, "ranks_per_node": 2}, "hook": {"name": "powerSGD", "matrix_approximation_rank": 3}}
    spec, resolved = JobSpec.model_validate(job.spec | changed), Resolved.model_validate(job.resolved)
    paths = control_plane.paths.job(job_id).attempt(1)
    launch = build_launch_file(control_plane.paths, job_id, 1, spec, resolved, (), "a-token", Desired.RUN)
    paths.spool(3).parent.mkdir(parents=True)
    paths.launch_file.write_text(launch.model_dump_json())
    last = Note(rank=3, at=now(), type="last-rank", message="from the second node")
    paths.spool(3).write_text(last.model_dump_json() + "\n")

    control_plane.start_reconciler(lease=1.5)
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    attempts = control_plane.attempts(job_id)
    assert [(a.number, a.cause) for a in attempts] == [(1, Cause.LAUNCHER_ERROR), (2, Cause.COMPLETED)]
    with control_plane.database.read() as session:
        rows = session.execute(
            sa.select(AttemptNode.attempt, AttemptNode.node).order_by(AttemptNode.attempt, AttemptNode.node)
        )
        assert [*rows] == [(1, 0), (1, 1), (2, 0)]
    events = {event.type: event.message for event in control_plane.events(job_id)}
    assert events["note.last-rank"] == "from the second node"
    advice = "--world 2 --nodes 2 --hook powerSGD --set hook.matrix_approximation_rank=3`"
    assert f"another world and another hook than the job has now: `ratchet suspend {job_id}`" in events["attempt-found"]
    assert advice in events["attempt-found"]
