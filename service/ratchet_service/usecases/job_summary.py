"""Summaries of jobs for lists: a curve in few points, the newest attempts, the hook, the last checkpoint, the goodput. The number
of SQL statements does not depend on the number of jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.views import AttemptSummary, HookFigures, JobSummary, MetricSummary
from ratchet_contract.checkpoint.resume_report import ResumeReport, proof_text
from ratchet_service.db.models import Attempt, Checkpoint, HookSample, Job, Metric, MetricSeries
from ratchet_service.lifecycle.redone_steps import redone_of
from ratchet_service.usecases.goodput import job_goodputs
from ratchet_service.usecases.metrics import not_abandoned

POINTS: Final = 40
"""Most points of a job's curve."""
ATTEMPTS: Final = 20
"""Most attempts of a job."""
_REPORT: Final = ("verdict", "base", "world_size", "differences", "notes")
"""Fields of a resume report from which its proof follows."""


def job_summaries(session: Session, jobs: Sequence[Job]) -> dict[str, JobSummary]:
    """Return the summary of each job, by job id."""
    ids = [job.id for job in jobs]
    curves, attempts, checkpoints = _curves(session, ids), _attempts(session, ids), _checkpoint_times(session, ids)
    hooks = _hook_figures(session, [job.id for job in jobs if job.phase.active])
    goodputs = job_goodputs(session, jobs)
    return {
        job_id: JobSummary(
            metric=curves.get(job_id),
            attempts=attempts.get(job_id, []),
            hook=hooks.get(job_id),
            last_checkpoint_at=checkpoints.get(job_id),
            goodput=goodputs[job_id].goodput,
        )
        for job_id in ids
    }


def _curves(session: Session, ids: Collection[str]) -> dict[str, MetricSummary]:
    """Return, by job id, few points of the metric ``loss``, or else of the first metric by name. Jobs without a point are
    absent."""
    order = sa.func.row_number().over(
        partition_by=MetricSeries.job_id,
        order_by=(sa.case((MetricSeries.name == "loss", 0), else_=1), MetricSeries.name),
    )
    series = sa.select(MetricSeries.job_id, MetricSeries.name, order.label("place"))
    series_rows = series.where(MetricSeries.job_id.in_(ids)).subquery()

    def step(of: Any, order: Any, *conditions: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
        """Return the first step in ``order`` of the series ``of``, which the database looks up in the key."""
        found = sa.select(Metric.step).where(Metric.job_id == of.c.job_id, Metric.name == of.c.name, *conditions)
        return found.order_by(order).limit(1).scalar_subquery()

    first = step(series_rows, Metric.step)
    last = step(series_rows, Metric.step.desc(), not_abandoned(Metric))  # max() would read the whole series
    chosen = sa.select(series_rows.c.job_id, series_rows.c.name, first.label("first"), last.label("last"))
    ends = chosen.where(series_rows.c.place == 1).cte("ends").prefix_with("MATERIALIZED")
    part = sa.select(sa.literal(0).label("part")).cte("parts", recursive=True)
    part = part.union_all(sa.select(part.c.part + 1).where(part.c.part < POINTS - 1))
    span, parts = ends.c.last - ends.c.first, POINTS - 1
    target = (
        ends.c.first + span // parts * part.c.part + span % parts * part.c.part // parts
    )  # the span may be near 2**63
    nearest = step(ends, Metric.step, Metric.step >= target)
    shown = sa.select(ends.c.job_id, ends.c.name, nearest.label("step")).join(part, sa.true()).distinct().subquery()
    query = sa.select(Metric.job_id, Metric.name, Metric.step, Metric.value).join(
        shown, (Metric.job_id == shown.c.job_id) & (Metric.name == shown.c.name) & (Metric.step == shown.c.step)
    )
    out: dict[str, MetricSummary] = {}
    for job_id, name, at, value in session.execute(query.where(not_abandoned(Metric)).order_by(Metric.step)):
        curve = out.setdefault(job_id, MetricSummary(name=name, points=[]))
        curve.points.append((at, math.nan if value is None else value))
    return out


def _attempts(session: Session, ids: Collection[str]) -> dict[str, list[AttemptSummary]]:
    """Return, by job id, the newest attempts, oldest first. Jobs without an attempt are absent."""
    # The components of all ranks say nothing more, and a list has a thousand reports: the database leaves them out.
    report = [Attempt.resume_report[key].label(key) for key in _REPORT]
    columns = (Attempt.job_id, Attempt.number, Attempt.outcome, Attempt.cause, Attempt.redone)
    query = sa.select(*columns, *report).join(Job, Job.id == Attempt.job_id)
    newest = query.where(Job.id.in_(ids), Attempt.number > Job.attempt - ATTEMPTS).order_by(Attempt.number)
    out: dict[str, list[AttemptSummary]] = defaultdict(list)
    for job_id, number, outcome, cause, redone, *values in session.execute(newest):
        found = {key: value for key, value in zip(_REPORT, values, strict=True) if value is not None}
        proof = None
        if found:
            proof = proof_text(ResumeReport.model_validate(found), redone_of(redone))
        out[job_id].append(AttemptSummary(number=number, outcome=outcome, cause=cause, proof=proof))
    return out


def _hook_figures(session: Session, ids: Collection[str]) -> dict[str, HookFigures]:
    """Return, by job id, the figures of the newest summary of rank 0's hook in the job's newest attempt."""
    of_rank = (HookSample.job_id == Job.id, HookSample.rank == 0, HookSample.attempt == Job.attempt)
    newest = sa.select(sa.func.max(HookSample.step)).where(*of_rank).correlate(Job).scalar_subquery()
    query = sa.select(HookSample.job_id, HookSample.summary).join(Job, Job.id == HookSample.job_id)
    rows = session.execute(query.where(Job.id.in_(ids), HookSample.rank == 0, HookSample.step == newest))
    return {job_id: HookFigures.model_validate(summary) for job_id, summary in rows}


def _checkpoint_times(session: Session, ids: Collection[str]) -> dict[str, datetime]:
    """Return, by job id, when the newest committed checkpoint of the job's own lineage was created."""
    newest = (Checkpoint.step == Job.committed_step) & (Checkpoint.attempt == Job.committed_attempt)
    query = sa.select(Job.id, Checkpoint.created_at).join(Checkpoint, (Checkpoint.job_id == Job.id) & newest)
    return {job_id: at for job_id, at in session.execute(query.where(Job.id.in_(ids)))}  # noqa: C416
