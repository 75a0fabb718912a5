"""Where the time of jobs and attempts went (``ratchet_service.lifecycle.goodput``), from their rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.views import GoodputView
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Attempt, Checkpoint, Job
from ratchet_service.lifecycle import goodput
from ratchet_service.lifecycle.goodput import Parts, Span
from ratchet_service.lifecycle.unmanaged_script import UNMANAGED

SPAN_COLUMNS: Final = (
    Attempt.created_at, Attempt.ended_at, Attempt.begun_at, Attempt.training_at, Attempt.stop_at, Attempt.end_began_at,
    Attempt.base_step, Attempt.last_step, Attempt.steps_lost, Attempt.resume_report["verdict"].as_string().label("verdict"),
)  # fmt: skip
"""The columns of a row that ``span_of`` reads."""


class Saves(NamedTuple):
    """The saves of one attempt. ``stall``: seconds for which training stood still for saves, without the save for a stop.
    ``stop``: when the save for a stop was committed; None: there is no such save."""

    stall: float = 0.0
    stop: datetime | None = None


class Spent(NamedTuple):
    """The goodput of one attempt, and its use of the stop notice. ``notice_seconds``: the time that it had for its last save
    before a stop; None: it received no stop request. ``notice_used``: how much of this time it used; None: no stop
    request, or not known."""

    goodput: GoodputView
    notice_seconds: float | None
    notice_used: float | None


def attempt_goodput(session: Session, job: Job, attempts: Collection[Attempt]) -> dict[int, Spent]:
    """Return, by attempt number, the goodput of each of ``attempts`` and how much of its stop notice it used."""
    now = now_in(session)
    of = (Checkpoint.job_id == job.id) & Checkpoint.attempt.in_([attempt.number for attempt in attempts])
    saves = save_times(session, of)
    policy = job.spec["policy"]
    return {a.number: _attempt_spent(policy, a, saves.get((job.id, a.number), Saves()), now) for a in attempts}


def job_goodputs(session: Session, jobs: Sequence[Job]) -> dict[str, GoodputView]:
    """Return, by job id, the goodput of each whole job, until it ended or was suspended, or until now; earlier pauses do not
    count."""
    now, spans = now_in(session), {job.id: list[Span]() for job in jobs}
    saves = save_times(session, Checkpoint.job_id.in_(spans))
    query = sa.select(Attempt.job_id, Attempt.number, *SPAN_COLUMNS).where(Attempt.job_id.in_(spans))
    for job_id, number, *row in session.execute(query):
        spans[job_id].append(span_of(row, saves.get((job_id, number), Saves()), now))
    return {
        job.id: goodput_view(
            goodput.total_parts(spans[job.id], job.created_at, job.paused_at or now, job.paused_seconds)
        )
        for job in jobs
    }


def save_times(session: Session, of: sa.ColumnElement[bool]) -> dict[tuple[str, int], Saves]:
    """Return the saves by job id and attempt number. ``of``: the condition on checkpoints. Attempts without a checkpoint are
    absent."""
    stopped = Checkpoint.reason == "stop"
    query = sa.select(
        Checkpoint.job_id,
        Checkpoint.attempt,
        sa.func.sum(sa.case((stopped, 0.0), else_=sa.func.coalesce(Checkpoint.stall, 0.0))),
        sa.func.max(sa.case((stopped, Checkpoint.created_at))),
    ).where(of)
    return {
        (job_id, attempt): Saves(float(stall), stop)
        for job_id, attempt, stall, stop in session.execute(query.group_by(Checkpoint.job_id, Checkpoint.attempt))
    }


def _attempt_spent(policy: dict[str, Any], a: Attempt, saves: Saves, now: datetime) -> Spent:
    """Return the goodput and the use of the stop notice of one attempt. ``policy``: the spec's."""
    verdict = None if a.resume_report is None else a.resume_report.get("verdict")
    row = (
        a.created_at, a.ended_at, a.begun_at, a.training_at, a.stop_at, a.end_began_at, a.base_step, a.last_step, a.steps_lost,
        verdict,
    )  # fmt: skip
    view = goodput_view(goodput.parts_of(span_of(row, saves, now)))
    if a.stop_at is None:
        return Spent(view, None, None)
    given = goodput.notice_given(a.cause, float(policy["stop_grace"]), policy.get("preemption_notice"))
    used = goodput.notice_used(a.outcome, a.stop_at, saves.stop, a.ended_at, unsaved=bool(a.steps_lost))
    return Spent(view, given, None if used is None else round(used, 3))


def span_of(row: Any, saves: Saves, now: datetime) -> Span:
    """Return the times and steps of an attempt's ``row`` of ``SPAN_COLUMNS``; ``now`` is the end of an attempt that runs."""
    created, ended, begun, training, stop, over, base, last, lost, verdict = row
    return Span(
        created=created, until=ended or now, begun=begun, training=training, stop=stop, end_began=over,
        steps_done=0 if base is None else last - base, steps_lost=lost or 0, stall=saves.stall,
        unmanaged=verdict == UNMANAGED,
    )  # fmt: skip


def goodput_view(parts: Parts) -> GoodputView:
    """Return the API's view of ``parts``: the share rounded to four digits, seconds to three."""
    share = parts.goodput
    return GoodputView(
        goodput=None if share is None else round(share, 4),
        wall_seconds=round(parts.wall, 3),
        **{f"{name}_seconds": round(seconds, 3) for name, seconds in parts._asdict().items()},
    )
