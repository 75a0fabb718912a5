"""Attempts that are stopped, given up for dead, replaced, and then go on: what they write late must change nothing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import parse_checkpoint_dir_name
from ratchet_contract.phases import Cause, JobPhase
from ratchet_contract.protocol.messages import AttemptResult
from ratchet_service.checkpoints.lineage import lineage_of
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint
from ratchet_service.launchers.base import AttemptRef, AttemptState
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_store.read.find_base import find_base
from tests.support import invariants
from tests.support.control_plane import Plane
from tests.support.server import agent_pid, processes_below, wait_for


class OutOfReach(LocalLauncher):
    """An engine that has lost sight of some attempts, and says that they are gone for good, as one does of a lost node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost: set[str] = set()

    def poll(self, ref: AttemptRef) -> AttemptState:
        state = super().poll(ref)
        return AttemptState(False, state.nodes) if ref.name in self.lost else state

    def kill(self, ref: AttemptRef) -> list[str]:
        return [] if ref.name in self.lost else super().kill(ref)

    def sweep(self, known: Any) -> list[str]:
        return []


@dataclass
class Zombie:
    """The first attempt of a job, from its stop on."""

    plane: Plane
    job_id: str
    agent: int
    ranks: list[int]
    rows: dict[str, Any]
    deleted: list[int]

    @property
    def committed_late(self) -> int:
        """Manifests of its own that lie beyond what the next attempt began from."""
        base = self.plane.attempts(self.job_id)[1].base_step or 0
        folder = self.plane.paths.job(self.job_id).checkpoints
        found = [parse_checkpoint_dir_name(path.parent.name) for path in folder.glob("*/MANIFEST.json")]
        return sum(one is not None and one[1] == 1 and one[0] > base for one in found)

    @property
    def failed(self) -> bool:
        """Its ranks have ended: what they were in the middle of writing was tidied away when the attempt was settled."""
        return not set(self.ranks) & set(processes_below(self.plane.attempt_paths(self.job_id, 1).root))


def create_zombies(plane: Plane, engine: OutOfReach, number: int, *, told_by: str) -> list[Zombie]:
    """``number`` jobs, whose first attempts are stopped until second ones train, and let go on. ``told_by``: "service": they
    find no mark on their disk; "disk": they find no service."""
    plan = {"steps": 100, "every": 4, "pause": 0.05, "keep": True}
    jobs = [plane.submit(plan, checkpoint={"keep_last": 2}, policy={"backoff": 0.05}) for _ in range(number)]
    pids = {}
    for job_id in jobs:
        plane.wait_job(job_id, lambda job: job.committed_step >= 12, "saved", deadline=120)
        pids[job_id] = processes_below(plane.attempt_paths(job_id, 1).root)
        for pid in pids[job_id]:
            os.kill(pid, signal.SIGSTOP)
        engine.lost.add(AttemptRef(job_id, 1, plane.attempt_paths(job_id, 1)).name)
    for job_id in jobs:
        plane.wait_job(
            job_id, lambda job: job.attempt == 2 and job.phase is JobPhase.RUNNING, "trained by attempt 2", deadline=120
        )
    zombies = []
    for job_id in jobs:
        agent = agent_pid(plane.attempt_paths(job_id, 1))
        ranks = [pid for pid in pids[job_id] if pid != agent]
        zombies.append(Zombie(plane, job_id, agent, ranks, _rows(plane, job_id), _deleted(plane, job_id)))
    for zombie in zombies:  # the ranks first: nobody has told them anything
        for pid in zombie.ranks:
            os.kill(pid, signal.SIGCONT)
    for zombie in zombies:
        wait_for(lambda zombie=zombie: zombie.committed_late or zombie.failed, "the zombie to commit", 60)  # type: ignore[misc]
        plane.wait_job(zombie.job_id, lambda job: job.committed_attempt == 2, "saved by attempt 2", deadline=120)
    service = plane.paths.service_file.read_text()
    if told_by == "disk":
        plane.paths.service_file.unlink()
    else:
        for job_id in jobs:
            plane.attempt_paths(job_id, 1).fence_file.unlink()
    for zombie in zombies:
        os.kill(zombie.agent, signal.SIGCONT)
    for zombie in zombies:
        root = plane.attempt_paths(zombie.job_id, 1).root
        wait_for(lambda root=root: not processes_below(root), "the zombie to end by itself", 60)  # type: ignore[misc]
    plane.paths.service_file.write_text(service)
    return zombies


def check_zombie(zombie: Zombie, *, told_by: str) -> None:
    """Nothing that it wrote after its stop counts anywhere, and the job came to its end without it."""
    plane, job_id = zombie.plane, zombie.job_id
    job = plane.wait(job_id, JobPhase.SUCCEEDED, deadline=120)
    old, new = (plane.attempt_paths(job_id, attempt) for attempt in (1, 2))
    base = Base.model_validate_json(new.base_file.read_bytes())
    assert (job.step, job.attempt) == (100, 2)
    assert _rows(plane, job_id) == zombie.rows, "a row of the old attempt has changed"
    late = _deleted(plane, job_id)[len(zombie.deleted) :]  # it may have been stopped half way through one
    assert len(late) <= 1 and base.step not in late, f"it deleted steps {late}; the new attempt began from {base.step}"
    types = [event.type for event in plane.events(job_id) if event.attempt == 1]
    refused = plane.attempts(job_id)[0].late_requests
    # Where the disk tells it, it may have been stopped with a report on its lips.
    assert refused == types.count("stale-request") and refused in ((1,) if told_by == "service" else (0, 1)), types
    results = [AttemptResult.model_validate_json(paths.result_file.read_bytes()) for paths in (old, new)]
    assert (results[0].attempt, results[1].attempt, results[1].cause) == (1, 2, Cause.COMPLETED)
    assert results[0].cause is Cause.LEASE_LOST or not zombie.committed_late, results[0]
    second = plane.attempts(job_id)[1]
    assert (base.step, base.attempt, base.digest) == (second.base_step, 1, second.base_digest)
    assert json.loads(new.control_file.read_bytes())["desired"] == "run"
    paths = plane.paths.job(job_id)
    with plane.database.read() as session:
        segments = lineage_of(session, job)
        faults = invariants.check_job(session, job)
    found, moved = find_base(paths.checkpoints, paths.quarantine, segments, expected_job_id=job_id)
    assert found is not None and (found.step, found.attempt, moved) == (100, 2, [])
    assert faults == []


def _rows(plane: Plane, job_id: str) -> dict[str, Any]:
    """All that the first attempt's reports may have changed."""
    with plane.database.read() as session:
        attempt = session.get_one(Attempt, (job_id, 1))
        node = session.get_one(AttemptNode, (job_id, 1, 0))
        query = sa.select(Checkpoint.step).where(Checkpoint.job_id == job_id, Checkpoint.attempt == 1)
        return {
            "phase": attempt.phase,
            "cause": attempt.cause,
            "last_step": attempt.last_step,
            "committed_step": attempt.committed_step,
            "results": attempt.results,
            "ended_at": attempt.ended_at,
            "acked": node.acked,
            "checkpoints": list(session.scalars(query.order_by(Checkpoint.step))),
        }


def _deleted(plane: Plane, job_id: str) -> list[int]:
    """Steps that the first attempt says it has deleted."""
    lines = plane.attempt_paths(job_id, 1).spool(0).read_text().splitlines()
    return [int(json.loads(line)["step"]) for line in lines if '"checkpoint_deleted"' in line]
