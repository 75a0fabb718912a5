"""Checkpoints' files are deleted behind the transaction that says so: nobody waits for a disk, and no crash leaves them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import MANIFEST_NAME
from ratchet_contract.phases import JobPhase
from ratchet_service.checkpoints import removal
from ratchet_store.retention import delete
from tests.support.control_plane import Plane
from tests.support.server import wait_for

TWO_ATTEMPTS = {"steps": 40, "epochs": {"1": {"at": 25, "do": "kill"}}}
"""With ``keep_last`` 2 the second leaves the first one's checkpoints, of steps 10 and 20, to the service."""
one_database = pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file of a checkpoint is removed before the block ends. Set: somebody waits for it."""
    real, asked, answers = delete._remove_checkpoint, threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        asked.set()
        assert answers.wait(120)
        real(directory)

    monkeypatch.setattr(delete, "_remove_checkpoint", slow)
    try:
        yield asked
    finally:
        answers.set()


def there(plane: Plane, job_id: str) -> list[str]:
    return sorted(path.name for path in plane.paths.job(job_id).checkpoints.iterdir())


def kept(plane: Plane, job_id: str) -> list[tuple[int, int]]:
    rows = plane.checkpoints(job_id)
    assert all(row.removing_since is None for row in rows)
    return [(row.step, row.attempt) for row in rows if row.state == "committed"]


@one_database
def test_hanging_checkpoint_deletion_does_not_block_other_jobs(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_plane.start_reconciler()
    with slow_disk(monkeypatch) as asked:
        job_id = control_plane.submit(TWO_ATTEMPTS, checkpoint={"keep_last": 2})
        assert asked.wait(60)
        control_plane.wait(job_id, JobPhase.SUCCEEDED)
        control_plane.wait(control_plane.submit({"steps": 3}), JobPhase.SUCCEEDED)
    wait_for(lambda: not any("a0001" in name for name in there(control_plane, job_id)), "the files to go", 30)
    wait_for(
        lambda: not any(row.removing_since for row in control_plane.checkpoints(job_id)), "that to be recorded", 30
    )
    assert kept(control_plane, job_id) == [(30, 2), (40, 2)]


@one_database
def test_checkpoint_files_are_removed_while_the_next_attempt_runs(control_plane: Plane) -> None:
    control_plane.start_reconciler()
    faults = {"1": {"at": 25, "do": "kill"}, "2": {"at": 45, "do": "kill"}}
    job_id = control_plane.submit({"steps": 100_000, "every": 10, "epochs": faults}, checkpoint={"keep_last": 2})
    control_plane.wait_job(
        job_id, lambda job: job.attempt == 3 and job.phase is JobPhase.RUNNING, "in its third attempt"
    )
    wait_for(lambda: not any("a0001" in name for name in there(control_plane, job_id)), "the files to go", 30)
    assert control_plane.job(job_id).attempt == 3
    control_plane.post(f"/v1/jobs/{job_id}/cancel")
    control_plane.wait(job_id, JobPhase.CANCELLED)


def with_a_left_branch(plane: Plane) -> str:
    """A job whose lineage does not hold its checkpoint of step 20 of the first attempt."""
    plane.start_reconciler()
    job_id = plane.submit({"steps": 30, "epochs": {"1": {"at": 25, "do": "user-error"}}})
    plane.wait(job_id, JobPhase.FAILED)
    plane.post(f"/v1/jobs/{job_id}/resume", {"from_step": 10})
    plane.wait(job_id, JobPhase.SUCCEEDED)
    return job_id


@one_database
@pytest.mark.parametrize("part", ["_uncommit", "_remove_checkpoint"])
def test_prune_omits_files_the_system_refused_and_removes_them_next_time(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """``_uncommit`` refused once: it stays whole. ``_remove_checkpoint``: its manifest is gone, its bytes are not."""
    job_id = with_a_left_branch(control_plane)
    left, real, refusals = "step-000000000020.a0001", getattr(delete, part), [OSError(errno.EBUSY, "busy")]

    def refuses(directory: Path) -> Any:
        if directory.name == left and refusals:
            raise refusals.pop()
        return real(directory)

    monkeypatch.setattr(delete, part, refuses)
    prune = f"/v1/jobs/{job_id}/checkpoints/prune"
    assert control_plane.post(prune, {}) == {"dry_run": False, "checkpoints": [], "quarantined": [], "size": 0}
    assert left in there(control_plane, job_id)
    whole = (control_plane.paths.job(job_id).checkpoints / left / MANIFEST_NAME).exists()
    assert whole == ((20, 1) in kept(control_plane, job_id)) == (part == "_uncommit")
    assert [event.type for event in control_plane.events(job_id)].count("checkpoint-not-deleted") == 1
    answer = control_plane.post(prune, {})
    assert answer["checkpoints"] == [left] and answer["size"] > 0
    assert left not in there(control_plane, job_id)


@one_database
def test_hanging_prune_does_not_block_other_requests(control_plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = with_a_left_branch(control_plane)
    answers: list[Any] = []
    ask = threading.Thread(
        target=lambda: answers.append(control_plane.post(f"/v1/jobs/{job_id}/checkpoints/prune", {}))
    )
    with slow_disk(monkeypatch) as asked:
        ask.start()
        assert asked.wait(60)
        control_plane.wait(control_plane.submit({"steps": 3}), JobPhase.SUCCEEDED)
        pin = f"/v1/jobs/{job_id}/checkpoints/step-000000000020.a0001/pin"
        with pytest.raises(AssertionError, match="checkpoint-gone"):
            control_plane.post(pin, {})
    ask.join(60)
    assert answers[0]["checkpoints"] == ["step-000000000020.a0001"]
    assert kept(control_plane, job_id) == [(10, 1), (20, 2), (30, 2)]
    assert [event.type for event in control_plane.events(job_id)].count("checkpoints-pruned") == 1


class Died(BaseException):
    """The process ends here."""


def test_checkpoint_removal_interrupted_by_a_crash_is_completed_on_restart(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: deaths.append(args.exc_type))

    def dies(directory: Path) -> bool:
        raise Died

    real = removal.delete_unless_pinned
    monkeypatch.setattr(removal, "delete_unless_pinned", dies)
    job_id = control_plane.submit(TWO_ATTEMPTS, checkpoint={"keep_last": 2})
    control_plane.start_reconciler()
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    wait_for(lambda: deaths, "who deletes to die", 30)
    control_plane.reconcilers[0][0].stop()
    marked = [row.name for row in control_plane.checkpoints(job_id) if row.removing_since is not None]
    assert marked == ["step-000000000010.a0001", "step-000000000020.a0001"]
    assert set(marked) < set(there(control_plane, job_id)), "said to go, and there"
    assert [row.state for row in control_plane.checkpoints(job_id)] == ["deleted", "deleted", "committed", "committed"]
    with pytest.raises(AssertionError, match="checkpoint-gone"):
        control_plane.post(f"/v1/jobs/{job_id}/fork", {"checkpoint_id": marked[0]})

    monkeypatch.setattr(removal, "delete_unless_pinned", real)
    control_plane.start_reconciler()
    wait_for(lambda: not set(marked) & set(there(control_plane, job_id)), "the files to go", 30)
    wait_for(
        lambda: not any(row.removing_since for row in control_plane.checkpoints(job_id)), "that to be recorded", 30
    )
    assert kept(control_plane, job_id) == [(30, 2), (40, 2)]
    assert there(control_plane, job_id) == ["step-000000000030.a0002", "step-000000000040.a0002"]


@one_database
def test_removal_of_a_checkpoint_pinned_on_disk_is_reverted(control_plane: Plane) -> None:
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 30})
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    rows = control_plane.checkpoints(job_id)
    with control_plane.database.write() as session:
        removal.mark_deleted(session, [session.merge(row) for row in rows])
    (control_plane.paths.job(job_id).checkpoints / rows[0].name / "PINNED").touch()
    assert removal.delete_marked(control_plane.database, control_plane.paths.job(job_id), job_id) == {
        row.name for row in rows[1:]
    }
    assert kept(control_plane, job_id) == [(10, 1)]
    assert there(control_plane, job_id) == [rows[0].name]
