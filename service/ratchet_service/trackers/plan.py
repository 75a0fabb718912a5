"""Decides what a tracker's run gets next, in a transaction that has locked the job's row.

A batch is stored before it is sent, as bounds of rows and events whose set can no longer change: within a job, ids grow in commit
order. ``_Batch`` therefore gives the same points and notes at every try. Rows are deleted once no run can need them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event, EventType, JobPhase
from ratchet_contract.spec.masking import masked_spec
from ratchet_service.checkpoints.lineage import bases_of, committed_in_lineage, fork_of
from ratchet_service.db.models import Attempt, Job, JobLabel, TrackerOutbox, TrackerRun
from ratchet_service.db.models import Event as EventRow
from ratchet_service.db.transitions import add_event
from ratchet_service.trackers import settle
from ratchet_service.trackers.settle import ALL_STEPS, Part, Row
from ratchet_service.trackers.sink import Batch, End, Note, Point, Run, name_of

MAX_ROWS: Final = 1000
MAX_BYTES: Final = 256 << 10
"""Rows of a batch, and their values as JSON; more only if they are of one step."""
_MARGIN: Final = 1000
"""Steps after the redone ones within which a report that one of them differs may arrive."""
_TYPES: Final = (Event.TRAINING, EventType.RESUMED, EventType.REPLAY_DIFFERENCE, EventType.ATTEMPT_ENDED)


@dataclass(frozen=True)
class JobFacts:
    """What other parts of the service know of a job. ``environment``: of its newest attempt, as text; ``goodput``: figures of the
    whole job."""

    homes: HomePaths
    environment: Callable[[str, int], Mapping[str, str]]
    goodput: Callable[[Session, Job], Mapping[str, float]]


def signature(job: Job | sa.Row[*tuple[Any, ...]], live: bool) -> str:
    """Return a text that changes when there may be something new to send. ``job``: a job, or a row with its columns."""
    text = f"{job.phase} {job.attempt} {(job.committed_step, job.committed_attempt)}"
    return f"{text} {job.updated_at.timestamp()}" if live else text


def plan(session: Session, job: Job, run: TrackerRun, facts: JobFacts) -> Batch | None:
    """Store the next batch of ``run`` in its row, and return it; None if nothing is to be sent now."""
    while run.batch is None and not run.done:
        if run.last_attempt is None:
            _branch_if_needed(session, job, run)
        run.batch = _bounds(session, job, run, facts)
        batch = _batch(session, run)
        if batch.points or batch.notes or batch.end is not None:
            if run.facts is None:
                run.facts = _run_facts(session, job, run, facts)
            return batch
        if not record(session, job, run, batch, run.state):
            return None
    return None if run.batch is None else _batch(session, run)


def record(session: Session, job: Job, run: TrackerRun, batch: Batch, state: Mapping[str, Any]) -> bool:
    """Store that the planned ``batch`` was sent. Return False if nothing is left to send now."""
    bounds = run.batch
    assert bounds is not None
    run.state, run.marks = dict(state), settle.advance(run.marks, batch.points)
    run.sent_row, run.sent_step, run.event = bounds["row"], bounds["step"], bounds["event"]
    run.ended_attempt = max(run.ended_attempt, bounds["ended_attempt"])
    run.batch = None
    if batch.end is not None:
        run.ended_at = batch.end.at
    if bounds["last"]:
        run.seen = bounds["seen"]
        run.done = run.last_attempt is not None or (job.phase.terminal and run.ended_at == job.ended_at)
    session.flush()
    _delete_sent(session, job)
    return not bounds["last"]


def run_of(run: TrackerRun) -> Run:
    """Return the run as its sink gets it."""
    facts = run.facts
    assert facts is not None
    return Run(
        **{**facts, "created_at": datetime.fromisoformat(facts["created_at"])}, job_id=run.job_id, number=run.number
    )


def newest_step(run: TrackerRun) -> int:
    """Return the newest step that the run has; before it has one, that after which it begins."""
    return max(run.marks.values(), default=run.base_step)


def _branch_if_needed(session: Session, job: Job, run: TrackerRun) -> None:
    """End the run with the attempt before one that did sent steps again and is not the same run any more, and begin the next."""
    for event in _events(session, run, None):
        if event.type not in (Event.TRAINING, EventType.REPLAY_DIFFERENCE) or event.attempt is None:
            continue
        if event.type == Event.TRAINING:
            run.redone_until = newest_step(run)
            base, branches = event.data["base_step"], event.data.get("requested", False)
            branches = branches and base < run.redone_until
            why = f"attempt {event.attempt} starts from step {base}, as requested"
        else:
            branches = event.data["step"] <= run.redone_until
            base, why = session.get_one(Attempt, (job.id, event.attempt)).base_step or 0, event.message
        if branches:
            _begin_branch(session, job, run, event, base, why)
            return


def _begin_branch(session: Session, job: Job, run: TrackerRun, event: EventRow, base: int, why: str) -> None:
    """Let the tracker's next run begin after step ``base`` with the event's attempt."""
    assert event.attempt is not None
    run.last_attempt = event.attempt - 1
    branch = TrackerRun(
        job_id=job.id, sink=run.sink, number=run.number + 1, live=run.live, first_attempt=event.attempt, base_step=base,
        redone_until=base, ended_attempt=run.last_attempt, event=event.id - 1,
    )  # fmt: skip
    session.add(branch)
    session.flush()
    text = f"{run.sink}: run {name_of(job.id, branch.number)} has the values after step {base}: {why}"
    add_event(session, job.id, EventType.TRACKER_BRANCHED, text, attempt=event.attempt, data={"tracker": run.sink})


def _bounds(session: Session, job: Job, run: TrackerRun, facts: JobFacts) -> dict[str, Any]:
    """Return what identifies the next batch, as JSON values. ``last``: it is the last one for now."""
    ended = job.phase.terminal or run.last_attempt is not None
    attempts = range(run.first_attempt, (job.attempt if run.last_attempt is None else run.last_attempt) + 1)
    bases = {number: base for number, base in bases_of(session, job.id).items() if number <= attempts[-1]}
    step = ALL_STEPS
    if run.live:
        parts = [Part(number, -1, ALL_STEPS) for number in attempts]
    elif ended:
        parts = settle.parts_of(bases, None, fork_of(job))
    else:
        committed = Base(step=job.committed_step, attempt=job.committed_attempt)
        parts = settle.parts_of(bases, committed, fork_of(job))
        step = -1 if committed.attempt is None else committed.step
    newest = session.scalar(sa.select(sa.func.max(TrackerOutbox.id)))  # of all jobs, which is found at once
    row = max(newest or 0, run.sent_row)
    found = sa.select(TrackerOutbox.step, sa.func.length(TrackerOutbox.points)).where(_unsent(run, row, step))
    rows = session.execute(found.order_by(TrackerOutbox.step, TrackerOutbox.id).limit(MAX_ROWS + 1)).all()
    sizes = accumulate(size for _, size in rows)
    fitting = [at for (at, _), size in zip(rows[:MAX_ROWS], sizes, strict=False) if size <= MAX_BYTES]
    limit = fitting[-1] if fitting else rows[0].step if rows else step
    last = len(rows) <= MAX_ROWS and (not rows or rows[-1].step <= limit)
    step = step if last else limit
    events = _events(session, run, None)
    end = _end(session, job, run, facts) if ended and last else None
    return {
        "parts": [list(part) for part in parts], "step": step, "row": row, "last": last, "end": end,
        "seen": signature(job, run.live),
        "event": max((event.id for event in events), default=run.event),
        "ended_attempt": max((event.attempt or 0 for event in events if event.type == EventType.ATTEMPT_ENDED), default=0),
    }  # fmt: skip


def _end(session: Session, job: Job, run: TrackerRun, facts: JobFacts) -> dict[str, Any] | None:
    """Return the end of the job, or of a run that a later one has replaced; None if it was sent, or there is no run."""
    if run.last_attempt is not None:
        over = session.get_one(Attempt, (job.id, run.last_attempt)).ended_at or job.updated_at
        status, summary, checkpoint = JobPhase.CANCELLED.value, dict[str, float](), None
    else:
        assert job.ended_at is not None
        over, status, summary = job.ended_at, job.phase.value, dict(facts.goodput(session, job))
        checkpoint = next(
            (
                row.uri
                if row.uploaded_at is not None
                else str(facts.homes.job(job.id).checkpoint(row.step, row.attempt))
                for row in committed_in_lineage(session, job)
            ),
            None,
        )
    if run.ended_at == over or (run.last_attempt is not None and run.facts is None):
        return None
    return {"status": status, "at": over.isoformat(), "summary": summary, "checkpoint": checkpoint}


def _batch(session: Session, run: TrackerRun) -> Batch:
    """Return the stored batch of the run: the same at every call."""
    bounds = run.batch
    assert bounds is not None
    columns = (TrackerOutbox.id, TrackerOutbox.attempt, TrackerOutbox.step, TrackerOutbox.at, TrackerOutbox.points)
    found = session.execute(sa.select(*columns).where(_unsent(run, bounds["row"], bounds["step"])))
    rows = [Row(id_, attempt, step, at, json.loads(points)) for id_, attempt, step, at, points in found]
    parts = [Part(*part) for part in bounds["parts"]]
    points: list[Point] = settle.choose(rows, parts, run.marks, run.base_step)
    notes = [note for event in _events(session, run, bounds["event"]) if (note := _note(event)) is not None]
    end = bounds["end"]
    end = None if end is None else End(**{**end, "at": datetime.fromisoformat(end["at"])})
    return Batch(points, notes, end, bounds["last"])


def _unsent(run: TrackerRun, row: int, step: int) -> sa.ColumnElement[bool]:
    """Return the SQL condition for the job's rows up to these bounds that were not sent."""
    sent = (TrackerOutbox.id <= run.sent_row) & (TrackerOutbox.step <= run.sent_step)
    upto = (TrackerOutbox.id <= row) & (TrackerOutbox.step <= step)
    return (TrackerOutbox.job_id == run.job_id) & upto & ~sent


def _events(session: Session, run: TrackerRun, upto: int | None) -> list[EventRow]:
    """Return the events of the run's attempts that are after those that it has, up to the id ``upto``."""
    query = sa.select(EventRow).where(EventRow.job_id == run.job_id, EventRow.id > run.event, EventRow.type.in_(_TYPES))
    if upto is not None:
        query = query.where(EventRow.id <= upto)
    if run.last_attempt is not None:
        query = query.where(EventRow.attempt <= run.last_attempt)
    return list(session.scalars(query.where(EventRow.attempt >= run.first_attempt).order_by(EventRow.id)))


def _note(event: EventRow) -> Note | None:
    """Return the note for an event that tells what a curve does not show; else None."""
    data = event.data
    if event.type == EventType.ATTEMPT_ENDED:
        step = data.get("last_step") or 0
    elif event.type == EventType.REPLAY_DIFFERENCE or (
        event.type == EventType.RESUMED and data.get("verdict") == "not-exact"
    ):
        step = data["step"]
    elif event.type == Event.TRAINING and data.get("requested"):
        step = data["base_step"]
        return Note(event.id, step, event.at, f"attempt {event.attempt} starts from step {step}, as requested")
    else:
        return None
    return Note(event.id, step, event.at, event.message)


def _run_facts(session: Session, job: Job, run: TrackerRun, facts: JobFacts) -> dict[str, Any]:
    """Return the fields of ``Run`` that are fixed with its first batch, as JSON values."""
    parent = None if job.forked_from is None else job.forked_from.partition("/")[0]
    if run.number > 1:
        parent = name_of(job.id, run.number - 1)
    labels = session.execute(sa.select(JobLabel.key, JobLabel.value).where(JobLabel.job_id == job.id))
    spec = masked_spec(job.spec)
    parameters = _flat("", {key: value for key, value in spec.items() if key not in ("name", "labels", "tracking")})
    environment = {f"environment.{name}": text for name, text in facts.environment(job.id, job.attempt).items()}
    return {
        "job_name": job.name, "owner": job.owner, "experiment": spec["tracking"]["experiment"],
        "labels": {key: value for key, value in labels}, "parameters": parameters | environment,  # noqa: C416
        "created_at": job.created_at.isoformat(), "parent": parent,
    }  # fmt: skip


def _flat(prefix: str, value: Any) -> dict[str, str]:
    """Return the leaves of a JSON value by their path, as texts; without those that are null."""
    if isinstance(value, Mapping) and value:
        return {
            path: text
            for key, item in value.items()
            for path, text in _flat(f"{prefix}.{key}" if prefix else key, item).items()
        }
    if value is None:
        return {}
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


def _delete_sent(session: Session, job: Job) -> None:
    """Delete the rows of the job that no run can need. Redone steps, and those soon after, stay until every run has looked at
    the events up to the end of their attempt: if one differs, a new run gets them."""
    delete = sa.delete(TrackerOutbox).where(TrackerOutbox.job_id == job.id)
    delete = delete.execution_options(synchronize_session=False)
    columns = (TrackerRun.sent_row, TrackerRun.sent_step, TrackerRun.ended_attempt)
    runs = session.execute(sa.select(*columns).where(TrackerRun.job_id == job.id, TrackerRun.done.is_(False))).all()
    if not runs:
        session.execute(delete)
        return
    row, step, ended = (min(column) for column in zip(*runs, strict=True))
    redone = session.scalar(
        sa.select(sa.func.max(Attempt.last_step)).where(Attempt.job_id == job.id, Attempt.number < job.attempt)
    )
    looked_at = (TrackerOutbox.attempt <= ended) | (TrackerOutbox.step > (-1 if redone is None else redone + _MARGIN))
    session.execute(delete.where(TrackerOutbox.id <= row, TrackerOutbox.step <= step, looked_at))
