"""Jobs whose ranks' messages are stored as an agent's reports are, and a tracker that keeps what it gets in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ratchet_contract.checkpoint.resume_report import Base, StepDifference
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, Event, EventType
from ratchet_contract.protocol.messages import CheckpointCommitted, Metrics, RankMessage, RedoneSteps, Training
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_service.agent_reports.fast_rows import read_shape
from ratchet_service.agent_reports.message_effects import Effects
from ratchet_service.config.output_limits import DEFAULT_BOUNDS
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, Job, TrackerOutbox
from ratchet_service.db.transitions import add_event, apply, lock_job
from ratchet_service.trackers.plan import JobFacts
from ratchet_service.trackers.sink import Batch, Run, State, TrackerError

COMMIT = "c" * 40
START = datetime(2030, 1, 1, tzinfo=UTC)
FACTS = JobFacts(HomePaths(Path("/nowhere")), lambda *_: {"torch": "2.13"}, lambda *_: {"goodput": 0.5})


class Killed(BaseException):
    """The process has ended at this point."""


@dataclass
class MemorySink:
    """``fault``: ``refuse``, ``raise``, or ``kill`` after the batch is stored, at the next call alone."""

    name: str = "tensorboard"
    fault: str | None = None
    runs: dict[str, list[Any]] = field(default_factory=dict)
    described: dict[str, Run] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # the run of each call
    unrecorded: tuple[Run, State, Batch] | None = None

    def export(self, run: Run, state: State, batch: Batch) -> State:
        self.order.append(run.name)
        if self.unrecorded is not None and self.unrecorded[0].name == run.name:
            assert self.unrecorded == (run, state, batch) or repr(self.unrecorded) == repr((run, state, batch))  # NaN
        self.unrecorded = (run, state, batch)
        fault, self.fault = self.fault, None
        if fault == "refuse":
            raise TrackerError("the tracker is away")
        if fault == "raise":
            raise ValueError("a fault of the tracker's code")
        stored = self.runs.setdefault(run.name, [])
        self.described[run.name] = run
        assert run == self.described[run.name]
        del stored[state.get("length", 0) :]
        stored += [*batch.points, *batch.notes, *([] if batch.end is None else [batch.end])]
        if fault == "kill":
            raise Killed
        self.unrecorded = None
        return {"length": len(stored)}

    @property
    def calls(self) -> int:
        return len(self.order)

    def series(self, run: str) -> dict[str, list[tuple[int, float]]]:
        out: dict[str, list[tuple[int, float]]] = {}
        for one in self.runs.get(run, []):
            if hasattr(one, "value"):
                out.setdefault(one.name, []).append((one.step, one.value))
        return out

    def texts(self, run: str) -> list[str]:
        return [one.text for one in self.runs.get(run, []) if hasattr(one, "text")]


class TrackedJob:
    """A job by its rows."""

    def __init__(self, database: Database, *trackers: str, publish: str = "settled", name: str = "t") -> None:
        self.database, self.id = database, f"job-{name:0>12}"
        spec = {
            "name": name, "world": {"nodes": 1, "ranks_per_node": 2}, "checkpoint": {}, "labels": {}, "env": {"KEY": "hidden"},
            "secret_env": ["KEY"], "code": {"git": GitFacts(commit=COMMIT, changed=0).model_dump(mode="json")},
            "tracking": {"to": None, "publish": publish, "experiment": "e"},
        }  # fmt: skip
        with database.write() as session:
            now = utc_now()
            row = Job(id=self.id, name=name, spec=spec, resolved={"trackers": [*trackers]}, spec_digest="")
            row.created_at = row.updated_at = now
            session.add(row)

    def row(self) -> Job:
        with self.database.read() as session:
            return session.get_one(Job, self.id)

    def events(self) -> list[str]:
        from ratchet_service.db.models import Event as Row

        with self.database.read() as session:
            return list(session.scalars(sa.select(Row.type).where(Row.job_id == self.id).order_by(Row.id)))

    def outbox(self) -> int:
        with self.database.read() as session:
            query = sa.select(sa.func.count()).select_from(TrackerOutbox).where(TrackerOutbox.job_id == self.id)
            return session.scalar(query) or 0

    def start(self, base: tuple[int, int | None] = (0, None)) -> int:
        """The next attempt trains from ``base``."""
        with self.database.write() as session:
            job = lock_job(session, self.id)
            number = job.attempt + 1
            session.add(Attempt(job_id=job.id, number=number, report_token_hash="", created_at=utc_now()))
            session.flush()
            apply(session, job.id, Event.LAUNCH, values={"attempt": number})
        digest = None if base[1] is None else f"d{base[0]}"
        self.report(Training(rank=0, at=START.isoformat(), base=Base(step=base[0], attempt=base[1], digest=digest)))
        return number

    def report(self, *messages: RankMessage, rank: int = 0) -> None:
        with self.database.write() as session:
            job = lock_job(session, self.id)
            attempt = session.get_one(Attempt, (job.id, job.attempt))
            effects = Effects(session, job, attempt, {}, DEFAULT_BOUNDS, read_shape(session, job.id))
            effects.prefetch(messages)
            for one in messages:
                effects.apply(rank, one)
            effects.finish()

    def metrics(self, step: int, rank: int = 0, **values: float) -> None:
        at = (START + timedelta(seconds=step)).isoformat()
        self.report(Metrics(rank=rank, at=at, step=step, values=values), rank=rank)

    def log(self, steps: Iterable[int], offset: float = 0.0) -> None:
        for step in steps:
            self.metrics(step, loss=step + offset)

    def commit(self, step: int) -> None:
        number = self.row().attempt
        self.report(
            CheckpointCommitted(
                rank=0,
                at=START.isoformat(),
                step=step,
                attempt=number,
                digest=f"d{step}",
                size=1,
                files=1,
                seconds=0.1,
                reason="schedule",
                parent=Base(),
            )
        )

    def differ(self, step: int) -> None:
        difference = StepDifference(step=step, rank=0, part="parameters")
        self.report(
            RedoneSteps(
                rank=0, at=START.isoformat(), world_size=2, steps=1, compared=1, equal=0, first_difference=difference
            )
        )

    def end(self, event: Event = Event.END_REQUEUE, last_step: int = 0) -> None:
        """The attempt ends, and the job goes on as ``event`` says."""
        with self.database.write() as session:
            job = lock_job(session, self.id)
            attempt = session.get_one(Attempt, (job.id, job.attempt))
            attempt.phase, attempt.last_step, attempt.ended_at = AttemptPhase.ENDED, last_step, utc_now()
            text, data = (
                f"attempt {attempt.number} ended: rank-killed",
                {"last_step": last_step, "cause": "rank-killed"},
            )
            add_event(session, job.id, EventType.ATTEMPT_ENDED, text, attempt=attempt.number, data=data)
            session.flush()
            apply(session, job.id, event)

    def resume(self, step: int | None = None, attempt: int | None = None) -> None:
        """A user resumes the job, from a checkpoint that is named unless ``step`` is None."""
        with self.database.write() as session:
            source = None if step is None else {"step": step, "attempt": attempt}
            apply(session, self.id, Event.RESUME, values={"resume_from": source})
