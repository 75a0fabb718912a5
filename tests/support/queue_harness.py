"""The queue of a real reconciler over rows alone: attempts are made and ended in the table, no process is started."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, Cause, Desired, Event
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Job
from ratchet_service.db.transitions import apply
from ratchet_service.reconciler.launch import AttemptLauncher
from ratchet_service.scheduling.scheduler import Preemption
from ratchet_service.scheduling.slots import Capacity
from ratchet_service.usecases import submit
from tests.support.control_plane import single_launcher, trainer_launcher, trainer_spec


class Queue:
    """A machine of ``cpus`` slots and ``gpus``; times in seconds."""

    def __init__(self, home: Path, database: Database, *, cpus: int = 4, gpus: int = 0, **preemption: Any) -> None:
        self.database = database
        self.paths = HomePaths(home)
        self.paths.jobs.mkdir(parents=True, exist_ok=True)
        kinds = single_launcher(trainer_launcher(self.paths))
        capacity = Capacity(tuple(range(gpus)), cpus)
        self._launching = AttemptLauncher(database, self.paths, kinds, capacity, "me", 15.0, Preemption(**preemption))

    def submit(self, cpus: int = 1, owner: str = "local", *, device: Any = "cpu", ranks: int = 1, **more: Any) -> str:
        """``cpus``: slots of each rank."""
        spec = parse_spec(trainer_spec(world={"ranks_per_node": ranks, "device": device}, **more))
        resolved = Resolved(device=device, backend="gloo", threads_per_rank=cpus, python="/usr/bin/python3")
        with self.database.write() as session:
            return submit.store(session, submit.Prepared(spec, resolved, []), owner).id

    def run_round(self) -> list[str]:
        """Who is started now, in order."""
        return [launched.lease.job_id for launched in self._launching.launch_ready()]

    def waits_for_row(self, job_id: str) -> bool:
        """Whether a round waits while another transaction holds the job's row; of PostgreSQL."""
        with self.database.write() as session:
            session.scalar(sa.select(Job.id).where(Job.id == job_id).with_for_update())
            aside = threading.Thread(target=self.run_round)
            aside.start()
            aside.join(30)
            waited = aside.is_alive()
        aside.join(30)
        return waited

    def end(self, job_id: str, cause: Cause = Cause.COMPLETED, event: Event = Event.END_SUCCEEDED) -> None:
        with self.database.write() as session:
            attempt = session.get_one(Attempt, (job_id, session.get_one(Job, job_id).attempt))
            attempt.phase, attempt.cause = AttemptPhase.ENDED, cause
            session.flush()
            apply(session, job_id, event)

    def requeue(self, job_id: str) -> None:
        """As the end of an attempt that was stopped for another job."""
        self.end(job_id, Cause.HIGHER_PRIORITY, Event.END_REQUEUE)

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.get_one(Job, job_id)

    def reason_and_message(self, job_id: str) -> tuple[str | None, str]:
        job = self.job(job_id)
        return job.reason, str(job.message)

    def stopping(self) -> set[str]:
        """Those that are being stopped for another job."""
        with self.database.read() as session:
            jobs = session.query(Job).filter(Job.desired == Desired.PREEMPT)
            return {job.id for job in jobs if job.desired_cause is Cause.HIGHER_PRIORITY}

    def set_columns(self, job_id: str, **columns: Any) -> None:
        with self.database.write() as session:
            job = session.get_one(Job, job_id)
            for key, value in columns.items():
                setattr(job, key, value)
