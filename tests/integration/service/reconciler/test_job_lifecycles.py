"""Whole lives of jobs: real agents, real processes, both databases."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase, Outcome
from ratchet_contract.processes.procfs import pids_with_variable
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Attempt, Job
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.lifecycle.supervision import Timing
from ratchet_service.reconciler.ttl import Expiry
from tests.support.control_plane import Plane
from tests.support.server import agent_pid, wait_for

pytestmark = pytest.mark.takes_turns


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Plane]:
    """On SQLite alone: for what does not depend on the database."""
    database = Database(sqlite_url(tmp_path / "ratchet.db"))
    upgrade(database)
    made = Plane(tmp_path, database)
    made.serve_api()
    yield made
    made.close()
    database.dispose()


def executed(attempts: list[Attempt]) -> int:
    return sum(a.last_step - (a.base_step or 0) for a in attempts)


def test_job_succeeds_releases_everything_and_is_deleted_after_its_ttl(control_plane: Plane) -> None:
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 25})
    job = control_plane.wait(job_id, JobPhase.SUCCEEDED)
    (attempt,) = control_plane.attempts(job_id)
    assert (attempt.phase, attempt.outcome, attempt.cause) == (
        AttemptPhase.ENDED,
        Outcome.SUCCEEDED,
        Cause.COMPLETED,
    )
    assert (attempt.last_step, attempt.committed_step, attempt.steps_lost) == (25, 25, 0)
    assert (job.step, job.committed_step, job.desired, job.lease_token) == (25, 25, Desired.RUN, None)
    assert (job.preemptions, job.failures, job.attempts_without_progress) == (0, 0, 0)
    launch = control_plane.attempt_paths(job_id, 1).launch_file
    assert launch.stat().st_mode & 0o777 == 0o600
    assert not pids_with_variable("RATCHET_ATTEMPT_DIR", str(launch.parent))

    with control_plane.database.write() as session:
        session.get_one(Job, job_id).ttl = 0.001
    expiry = Expiry(control_plane.database, control_plane.paths)
    expiry.run()
    time.sleep(0.002)
    expiry.run()
    assert not control_plane.paths.job(job_id).root.exists()
    assert control_plane.events(job_id) == []


def test_attempt_deaths_lose_only_steps_since_the_last_checkpoint(control_plane: Plane) -> None:
    control_plane.start_reconciler()
    faults = {"1": {"at": 14, "do": "kill"}, "2": {"at": 27, "do": "kill-agent"}, "3": {"at": 33, "do": "raise"}}
    job_id = control_plane.submit({"steps": 40, "epochs": faults})
    orphans = control_plane.submit({"steps": 30, "epochs": {"1": {"at": 12, "do": "child"}}})
    mute = control_plane.submit({"steps": 30, "epochs": {"1": {"at": 15, "do": "mute"}}})

    control_plane.wait_job(orphans, lambda job: job.attempt == 2, "in its second attempt")
    assert pids_with_variable("RATCHET_ATTEMPT_DIR", str(control_plane.attempt_paths(orphans, 1).root)) == []

    job = control_plane.wait(job_id, JobPhase.SUCCEEDED)
    attempts = control_plane.attempts(job_id)
    assert [a.cause for a in attempts] == [Cause.RANK_KILLED, Cause.UNKNOWN, Cause.EXCEPTION, Cause.COMPLETED]
    assert [(a.base_step, a.base_attempt) for a in attempts] == [(0, None), (10, 1), (20, 2), (30, 3)]
    assert [a.steps_lost for a in attempts] == [4, 7, 3, 0]
    assert executed(attempts) == 40 + 14
    assert (job.failures, job.attempts_without_progress, job.step) == (1, 0, 40)
    assert attempts[2].message == "ValueError: wrong"
    reasons = [e.data["reason"] for e in control_plane.events(job_id) if e.type == "end-requeue"]
    assert reasons == ["rank-killed", "backoff", "exception"]

    control_plane.wait(mute, JobPhase.SUCCEEDED)
    assert [(row.step, row.attempt) for row in control_plane.checkpoints(mute) if row.adopted] == [(10, 1)]
    assert [a.steps_lost for a in control_plane.attempts(mute)] == [5, 0]
    assert control_plane.attempts(mute)[1].base_step == 10
    assert [e.type for e in control_plane.events(mute)].count("checkpoint-adopted") == 1


def test_keep_last_counts_across_attempts_and_partial_saves_are_removed(small: Plane, tmp_path: Path) -> None:
    small.start_reconciler()
    faults: dict[str, dict[str, Any]] = {
        "1": {"at": 44, "do": "kill"}, "2": {"at": 57, "do": "kill-agent"}, "3": {"at": 75, "do": "raise"},
        "4": {"at": 85, "do": "train on"},
    }  # fmt: skip
    for attempt, fault in faults.items():
        fault["after"] = str(tmp_path / f"may-end-{attempt}")
    job_id = small.submit({"steps": 90, "epochs": faults}, checkpoint={"keep_last": 2})
    directory = small.paths.job(job_id).checkpoints
    torn = [directory / f"step-000000000021.a{attempt:04d}" for attempt in (1, 2, 3, 4)]
    small.wait_job(job_id, lambda job: (job.committed_step or 0) >= 20, "past a checkpoint")
    for attempt, path in enumerate(torn, 1):  # only what a dead one left may go
        small.wait_job(job_id, lambda job, attempt=attempt: job.attempt == attempt, f"in attempt {attempt}")
        path.mkdir()
        (path / "rank-00000-of-00001.safetensors.tmp").write_bytes(b"half")
        assert not any(earlier.exists() for earlier in torn[: attempt - 1])
        Path(faults[str(attempt)]["after"]).touch()
    small.wait(job_id, JobPhase.SUCCEEDED)
    assert not any(path.exists() for path in torn), "killed, its agent killed, failed, completed"
    assert not list(small.paths.job(job_id).root.glob("attempts/**/*.reserve"))
    rows = small.checkpoints(job_id)
    kept = [(row.step, row.attempt) for row in rows if row.state == "committed"]
    assert sorted(kept) == [(80, 4), (90, 4)]
    left = ["step-000000000080.a0004", "step-000000000090.a0004"]
    wait_for(lambda: sorted(p.name for p in directory.iterdir()) == left, "the files of the others to go", 30)
    assert {(10, 1), (50, 2), (70, 3)} <= {(row.step, row.attempt) for row in rows if row.state == "deleted"}


def test_fork_whose_checkpoints_are_all_damaged_starts_from_its_source_again(small: Plane, tmp_path: Path) -> None:
    small.start_reconciler()
    parent = small.submit({"steps": 30})
    small.wait(parent, JobPhase.SUCCEEDED)
    may_end = tmp_path / "may-end"
    plan = {"steps": 30, "every": 5, "epochs": {"1": {"at": 17, "do": "kill", "after": str(may_end)}}}
    request = {"checkpoint_id": "step-000000000010.a0001", "spec": {"env": {"TRAINER": json.dumps(plan)}}}
    fork = str(small.post(f"/v1/jobs/{parent}/fork", request)["id"])
    small.wait_job(fork, lambda job: job.committed_attempt == 1 and job.committed_step == 15, "past its own checkpoint")
    (rank_file,) = small.paths.job(fork).checkpoint(15, 1).glob("rank-*")
    os.truncate(rank_file, 1)
    may_end.touch()
    small.wait(fork, JobPhase.SUCCEEDED)
    first, second = small.attempts(fork)
    assert (first.base_step, second.base_step) == (10, 10) and second.base_digest == first.base_digest


def test_suspend_resume_preempt_and_cancel_set_causes_and_lose_no_step(small: Plane) -> None:
    small.start_reconciler()
    job_id = small.submit({"steps": 100_000, "every": 50})
    small.wait_job(job_id, lambda job: job.step > 5, "training")
    small.post(f"/v1/jobs/{job_id}/suspend")
    job = small.wait(job_id, JobPhase.SUSPENDED)
    assert (job.desired, job.reason, job.lease_token) == (Desired.RUN, None, None)
    suspended_at = job.step
    small.post(f"/v1/jobs/{job_id}/resume")
    small.wait_job(job_id, lambda job: job.step > suspended_at, "training again")
    small.post(f"/v1/jobs/{job_id}/preempt")
    small.wait_job(job_id, lambda job: job.attempt == 3 and job.phase is JobPhase.RUNNING, "in its third attempt")
    small.post(f"/v1/jobs/{job_id}/cancel")
    job = small.wait(job_id, JobPhase.CANCELLED)
    attempts = small.attempts(job_id)
    assert [a.cause for a in attempts] == [Cause.API_SUSPEND, Cause.API_PREEMPT, Cause.API_CANCEL]
    assert [a.steps_lost for a in attempts] == [0, 0, 0]
    assert (job.preemptions, job.failures) == (1, 0)


def test_unresponsive_agent_is_killed_with_cause_hang(small: Plane) -> None:
    small.start_reconciler(timing=Timing(kill_after=0.5))
    job_id = small.submit({"steps": 100_000}, policy={"stop_grace": 1})
    small.wait_job(job_id, lambda job: job.committed_step >= 10, "saved")
    os.kill(agent_pid(small.attempt_paths(job_id, 1)), signal.SIGSTOP)
    small.post(f"/v1/jobs/{job_id}/suspend")
    job = small.wait(job_id, JobPhase.SUSPENDED)
    (attempt,) = small.attempts(job_id)
    assert (attempt.cause, job.reason, job.failures) == (Cause.HANG, "hang", 1)
    assert [e.type for e in small.events(job_id) if e.type.startswith("agent-")] == ["agent-stopped", "agent-killed"]
    assert attempt.steps_lost == attempt.last_step - (attempt.committed_step or 0)


def test_user_error_fails_the_job_at_once_and_no_progress_after_max_failures(small: Plane) -> None:
    small.start_reconciler()
    wrong = small.submit({"epochs": {"1": {"at": 1, "do": "user-error"}}})
    stuck = small.submit({"epochs": {str(n): {"at": 3, "do": "kill"} for n in range(1, 9)}}, policy={"max_failures": 5})
    job = small.wait(wrong, JobPhase.FAILED)
    assert (job.reason, job.message, job.attempt) == ("user-error", "no module named mine", 1)
    job = small.wait(stuck, JobPhase.FAILED)
    assert (job.reason, job.attempt) == ("no-progress", 5)
    assert job.message is not None and "rank-killed" in job.message


def test_the_timeout_ends_the_job_and_keeps_its_last_checkpoint(small: Plane) -> None:
    small.start_reconciler()
    job_id = small.submit({"steps": 100_000}, policy={"timeout": 2, "stop_grace": 1})
    job = small.wait(job_id, JobPhase.FAILED)
    (attempt,) = small.attempts(job_id)
    assert (job.reason, attempt.cause) == ("timeout", Cause.TIMEOUT)
    assert job.committed_step == attempt.last_step > 0


def test_agent_stopped_at_the_timeout_has_its_stop_grace_to_save(small: Plane) -> None:
    small.start_reconciler(timing=Timing(kill_after=0.1))
    job_id = small.submit({"steps": 100_000, "pause": 1.0, "every": 1000}, policy={"timeout": 2, "stop_grace": 30})
    small.wait(job_id, JobPhase.FAILED)
    (attempt,) = small.attempts(job_id)
    assert (attempt.cause, attempt.steps_lost) == (Cause.TIMEOUT, 0) and attempt.committed_step == attempt.last_step > 0
    assert [e.type for e in small.events(job_id) if e.type.startswith("agent-")] == ["agent-stopped"]


def test_agent_that_cannot_start_ends_with_cause_launcher_error(small: Plane) -> None:
    small.start_reconciler(LocalLauncher(small.paths, agent=("/bin/sh", "-c", "echo no such interpreter >&2; exit 3")))
    job_id = small.submit({}, policy={"max_failures": 0})
    job = small.wait(job_id, JobPhase.FAILED)
    (attempt,) = small.attempts(job_id)
    assert (attempt.cause, job.reason) == (Cause.LAUNCHER_ERROR, "max-failures")
    assert attempt.message is not None and "no such interpreter" in attempt.message


def test_agent_without_its_lock_is_given_up_at_the_launch_deadline(small: Plane) -> None:
    small.start_reconciler(
        LocalLauncher(small.paths, agent=("/bin/sh", "-c", "sleep 3600")), Timing(launch_deadline=0.5)
    )
    job_id = small.submit({}, policy={"max_failures": 0})
    small.wait(job_id, JobPhase.FAILED)
    (attempt,) = small.attempts(job_id)
    assert (attempt.cause, attempt.steps_lost) == (Cause.LAUNCHER_ERROR, 0)
    assert attempt.message is not None and "launch deadline" in attempt.message
    assert pids_with_variable("RATCHET_ATTEMPT_DIR", str(small.attempt_paths(job_id, 1).root)) == []


def test_unreadable_stored_spec_fails_only_its_own_job(small: Plane) -> None:
    bad, good = small.submit({"steps": 3}), small.submit({"steps": 3})
    with small.database.write() as session:
        session.get_one(Job, bad).spec = {"name": "t", "world": {"nodes": 1, "ranks_per_node": 1}}
    small.start_reconciler()
    job = small.wait(bad, JobPhase.FAILED)
    assert job.reason == "spec-unreadable"
    small.wait(good, JobPhase.SUCCEEDED)


def test_jobs_wait_for_slots_in_priority_order_with_reason_no_slot(small: Plane) -> None:
    release = {"steps": 100_000}
    first = small.submit(release, resources={"cpus_per_rank": 3})
    low = small.submit({"steps": 3}, resources={"cpus_per_rank": 4}, priority=1)
    high = small.submit({"steps": 3}, resources={"cpus_per_rank": 2}, priority=5)
    small.start_reconciler()
    small.wait(high, JobPhase.SUCCEEDED)
    small.wait(low, JobPhase.SUCCEEDED)
    small.wait_job(first, lambda job: job.phase is JobPhase.RUNNING, "running")
    late = small.submit({"steps": 3}, resources={"cpus_per_rank": 2})
    job = small.wait_job(late, lambda job: job.reason == "no-slot", "waiting")
    assert job.message == f"waits for 2 of 4 CPU slots (1 free; {small.job(first).name} ({first}) has 3)"
    small.post(f"/v1/jobs/{first}/cancel")
    small.wait(late, JobPhase.SUCCEEDED)
    order = [small.job(j).started_at for j in (high, low, first, late)]
    assert order == sorted(order, key=str)
