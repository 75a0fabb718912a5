"""Metrics and hook summaries over steps. Points of abandoned branches are left out: a later attempt started from a step before
that of the point. If a later attempt replaced a metric's value at a step, the earlier value is shown separately
(``superseded``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import views
from ratchet_contract.api.views import HookSampleView, HookView, MetricPoint, MetricsView, Page
from ratchet_contract.checkpoint.manifest import HOOK_SUMMARY
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.job import JobSpec
from ratchet_hooks.specs.compatibility import hook_change
from ratchet_hooks.specs.hook_specs import HookSpec
from ratchet_hooks.specs.registry import is_stateful
from ratchet_hooks.summary import HookSummary
from ratchet_service.db.models import Attempt, Checkpoint, HookSample, Job, Metric, MetricSeries, SupersededMetric
from ratchet_service.db.queries import find_job
from ratchet_service.db.sanitize import parse_time
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.usecases import pagination
from ratchet_service.usecases.resize import next_start
from ratchet_service.usecases.views import last_checkpoint
from ratchet_store.format.manifest_file import read_manifest

T = TypeVar("T")
_FIGURES: Final = (
    "phase", "iteration", "compression_rate", "elements_before", "elements_after", "bytes_before", "bytes_after",
    "memory_bytes", "averager_step", "next_averaging", "step",
)  # fmt: skip

MAX_PAGE_BYTES: Final = 4 * 2**20
"""About the most bytes of a page of hook summaries."""


def not_abandoned(table: Any) -> sa.ColumnElement[bool]:
    """Return the condition that a row of ``table`` belongs to no abandoned branch: no later attempt started from a step before
    the row's step."""
    later = sa.exists().where(
        Attempt.job_id == table.job_id, Attempt.number > table.attempt, Attempt.base_step < table.step
    )
    return ~later


class StepRange(NamedTuple):
    """Steps from ``first`` to ``last``, both included; ``last`` None: no upper end."""

    first: int = 0
    last: int | None = None

    def contains(self, column: Any) -> sa.ColumnElement[bool]:
        """Return the condition that the step in ``column`` is in the range."""
        condition: sa.ColumnElement[bool] = column >= self.first
        return condition if self.last is None else condition & (column <= self.last)


def metrics(
    session: Session, job_id: str, names: Sequence[str], max_points: int, steps: StepRange = StepRange()
) -> MetricsView:
    """Return the points in ``steps`` of the metric series ``names``, or of all with such points if ``names`` is empty. A series
    is reduced to at most ``max_points`` (at least 2) of its own points, evenly spaced. Raise ``NotFound``."""
    job = find_job(session, job_id)
    wanted = sa.select(MetricSeries).where(MetricSeries.job_id == job_id).order_by(MetricSeries.name)
    if names:
        wanted = wanted.where(MetricSeries.name.in_(names))
    kept = {series.name: series for series in session.scalars(wanted)}
    short = [
        name for name, series in kept.items() if series.points < max_points
    ]  # not counting, perhaps, the newest point
    points, totals = dict[str, list[MetricPoint]](), dict[str, int]()
    for name, found in _points(session, job_id, short, not_abandoned(Metric) & steps.contains(Metric.step)).items():
        points[name], totals[name] = evenly_spaced(found, max_points), len(found)
    long = [name for name in kept if name not in points]
    for name, (chosen, totals[name]) in _chosen_steps(session, job_id, long, max_points, steps).items():
        points |= _points(session, job_id, [name], Metric.step.in_(chosen))
    old = _superseded(session, job_id, kept, steps) if job.attempt > 1 and max_points > 2 else {}
    shown = [
        views.MetricSeries(
            name=name,
            every=kept[name].stride if name in kept else 1,
            total=totals.get(name, 0),
            points=points.get(name, []),
            superseded=old.get(name, []),
        )
        for name in (dict.fromkeys(names) if names else kept)
    ]
    return MetricsView(job_id=job_id, series=[series for series in shown if series.points or names])


def evenly_spaced(items: Sequence[T], max_count: int) -> list[T]:
    """Return at most ``max_count`` (at least 2) of the items, evenly spaced by position, with the first and the last."""
    if len(items) <= max_count:
        return list(items)
    last, parts = len(items) - 1, max_count - 1
    return [items[-(-part * last // parts)] for part in range(max_count)]


def _chosen_steps(
    session: Session, job_id: str, names: Sequence[str], max_points: int, steps: StepRange
) -> dict[str, tuple[list[int], int]]:
    """Return, by series name, at most ``max_points`` evenly spaced ones of the steps in ``steps`` outside abandoned branches, and
    the number of all of these."""
    if not names:
        return {}
    shown = Metric.job_id == job_id, Metric.name.in_(names), steps.contains(Metric.step), not_abandoned(Metric)
    if max_points == 2:
        figures = sa.func.min(Metric.step), sa.func.max(Metric.step), sa.func.count()
        ends = session.execute(sa.select(Metric.name, *figures).where(*shown).group_by(Metric.name))
        return {name: (sorted({first, last}), count) for name, first, last, count in ends}
    out: dict[str, list[int]] = {}
    # from the key alone, which costs a quarter of reading the rows
    for name, step in session.execute(
        sa.select(Metric.name, Metric.step).where(*shown).order_by(Metric.name, Metric.step)
    ):
        out.setdefault(name, []).append(step)
    return {name: (evenly_spaced(found, max_points), len(found)) for name, found in out.items()}


def _points(
    session: Session, job_id: str, names: Sequence[str], condition: sa.ColumnElement[bool]
) -> dict[str, list[MetricPoint]]:
    """Return the points that meet ``condition`` by series name, in ascending order of steps."""
    out: dict[str, list[MetricPoint]] = {name: [] for name in names}
    columns = (Metric.name, Metric.step, Metric.attempt, Metric.value, Metric.at)
    query = sa.select(*columns).where(Metric.job_id == job_id, Metric.name.in_(names), condition)
    for name, step, attempt, value, at in session.execute(query.order_by(Metric.name, Metric.step)) if names else ():
        number = math.nan if value is None else value
        out[name].append(MetricPoint(step=step, attempt=attempt, value=number, at=at))
    return out


def _superseded(
    session: Session, job_id: str, names: Collection[str], steps: StepRange
) -> dict[str, list[MetricPoint]]:
    """Return, by series name, the stored earlier points of those of ``steps`` that a later attempt did again with another
    value."""
    table = SupersededMetric
    query = sa.select(table.name, table.step, table.attempt, table.value, table.at)
    query = query.where(table.job_id == job_id, steps.contains(table.step))
    out: dict[str, list[MetricPoint]] = {}
    for name, step, attempt, value, at in session.execute(query.order_by(table.name, table.step, table.attempt)):
        if name in names:
            number = math.nan if value is None else value
            out.setdefault(name, []).append(MetricPoint(step=step, attempt=attempt, value=number, at=at))
    return out


def hook_view(session: Session, job_id: str, homes: HomePaths) -> HookView:
    """Return the state of the job's hook: from the active attempt's summaries, else from the checkpoint that the next attempt
    starts from, else without figures. Raise ``NotFound``."""
    job = find_job(session, job_id)
    spec = JobSpec.model_validate(job.spec).hook
    view = HookView(
        job_id=job_id,
        name=spec.name,
        wrapper=spec.wrapper,
        parameters=spec.parameters(),
        stateful=is_stateful(spec),
        checkpoint_id=last_checkpoint(job),
        checkpoint_iteration=_saved_iteration(session, job),
    )
    rows = _live_summaries(session, job) if job.phase.active else []
    if rows:
        return _with_figures(view, "live", [summary for summary, _ in rows], max(at for _, at in rows))
    saved = _checkpoint_summaries(session, job, homes, spec)
    return view if saved is None else _with_figures(view, "checkpoint", *saved)


def _live_summaries(session: Session, job: Job) -> list[tuple[HookSummary, datetime]]:
    """Return the newest summary of each rank of the current attempt, with its time, in order of ranks."""
    newest = sa.func.row_number().over(partition_by=HookSample.rank, order_by=HookSample.step.desc())
    samples = sa.select(HookSample, newest.label("age"))
    ranked = samples.where(HookSample.job_id == job.id, HookSample.attempt == job.attempt).subquery()
    query = sa.select(ranked.c.summary, ranked.c.at).where(ranked.c.age == 1).order_by(ranked.c.rank)
    return [(HOOK_SUMMARY.validate_python(summary), at) for summary, at in session.execute(query)]


def _checkpoint_summaries(
    session: Session, job: Job, homes: HomePaths, hook: HookSpec
) -> tuple[list[HookSummary], datetime] | None:
    """Return the ranks' summaries in the checkpoint that the next attempt starts from, and its time; None: no readable ones of
    this hook."""
    start = next_start(session, job, job.resume_from, homes)
    if start is None:
        return None
    try:
        with as_owner(start):
            manifest = read_manifest(start)
    except (CheckpointError, OSError):
        return None
    if not manifest.hook_summaries or hook_change(manifest.hook.name, manifest.hook.parameters, hook) is not None:
        return None
    at = parse_time(manifest.created, None)
    return None if at is None else (sorted(manifest.hook_summaries, key=lambda s: s.rank), at)


def _with_figures(
    view: HookView, source: Literal["live", "checkpoint"], ranks: list[HookSummary], at: datetime
) -> HookView:
    """Return ``view`` with the summaries of the ranks and the time ``at``; single figures are the first rank's."""
    update: dict[str, Any] = {key: getattr(ranks[0], key) for key in _FIGURES}
    update |= {
        "source": source,
        "residual_norm": {summary.rank: summary.residual_norm for summary in ranks},
        "ranks": ranks,
        "updated_at": at,
    }
    return view.model_copy(update=update)


def _saved_iteration(session: Session, job: Job) -> int | None:
    """Return the hook's iteration in the newest committed checkpoint; None if there is no checkpoint, or it has no iteration."""
    if job.committed_attempt is None:
        return None
    row = session.get(Checkpoint, (job.id, job.committed_step, job.committed_attempt))
    return None if row is None else row.hook_iteration


def hook_history(
    session: Session,
    job_id: str,
    rank: int | None,
    limit: int,
    cursor: str | None,
    max_points: int | None = None,
    steps: StepRange = StepRange(),
) -> Page[HookSampleView]:
    """Return a page of the stored hook summaries in ``steps`` outside abandoned branches, by step and rank. A page ends early
    after ``MAX_PAGE_BYTES``, since each summary has the hook's parameters. ``rank``: only this rank's. ``max_points``: only
    summaries of this number of steps (at least 2), evenly spaced. Raise ``NotFound`` or ``Refused``."""
    find_job(session, job_id)
    digest = pagination.query_digest(of="hook-history", job=job_id, rank=rank, max_points=max_points, steps=[*steps])
    shown = [HookSample.job_id == job_id, steps.contains(HookSample.step), not_abandoned(HookSample)]
    if rank is not None:
        shown.append(HookSample.rank == rank)
    if max_points is not None:
        stored = session.scalars(sa.select(HookSample.step).where(*shown).distinct().order_by(HookSample.step)).all()
        shown.append(HookSample.step.in_(evenly_spaced(stored, max_points)))
    query = sa.select(HookSample).where(*shown)
    after = pagination.decode(cursor, digest, (int, int))
    if after is not None:
        query = query.where(sa.tuple_(HookSample.step, HookSample.rank) > sa.tuple_(after[0], after[1]))
    query = query.order_by(HookSample.step, HookSample.rank).limit(limit + 1).execution_options(yield_per=100)
    items: list[HookSampleView] = []
    size = 0  # of the summaries, about as many bytes in the answer
    with closing(session.scalars(query)) as rows:
        for row in rows:
            if len(items) == limit or size > MAX_PAGE_BYTES:
                last = items[-1].summary
                return Page[HookSampleView](items=items, next_cursor=pagination.encode(digest, [last.step, last.rank]))
            summary = HOOK_SUMMARY.validate_python(row.summary)
            items.append(HookSampleView(attempt=row.attempt, at=row.at, summary=summary))
            size += len(str(row.summary))
    return Page[HookSampleView](items=items, next_cursor=None)
