"""Metrics and hook summaries as they are stored: a long series is thinned while it grows, so that a job of a million steps stays
small and quick to read.

A series keeps the points at steps of a grid (``step % stride == phase``) and the newest point. When there are more than
``Bounds.points``, the stride doubles. Since the grid follows from steps alone, a step that a later attempt does again replaces
the very point that it supersedes; and since the stride follows from the points there are, the portions in which those of a
regular series came do not matter. Values are never averaged.

A point that a step done again replaces is kept beside (``SupersededMetric``) where the new value is another one, up to a bound;
the attempt has the names of such series.

The series that ``checkpoint.keep_best`` judges by has points beside its grid, too: those at steps that are checkpoints, or may
become ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ratchet_service.bounds import Bounds
from ratchet_service.models import (
    Attempt,
    Checkpoint,
    HookSample,
    Job,
    Metric,
    MetricSeries,
    SupersededMetric,
)

_CHUNK: Final = 500
_LOOK: Final = 256
"""Messages of a rank between two looks at how many of its hook summaries there are."""
_SUPERSEDED: Final = 1000
"""Values of a series that are kept beside those that replaced them."""
_NAMES: Final = 100
"""Of series in which an attempt's values differ, on its row."""
Row = dict[str, Any]
_metrics, _series = cast("sa.Table", Metric.__table__), cast("sa.Table", MetricSeries.__table__)


@dataclass(slots=True)
class Kept:
    """A row of ``MetricSeries``."""

    job_id: str
    name: str
    stride: int = 1
    phase: int = 0
    points: int = 0
    top: int = -1
    newest: int = -1
    epoch: int = 0


_KEPT: Final = tuple(field.name for field in fields(Kept))
_COUNTS: Final = _KEPT[2:]
_OF_SERIES: Final = _series.c.job_id == sa.bindparam("job_id_"), _series.c.name == sa.bindparam("name_")
# Made once: to build a statement takes longer than SQLite needs to carry it out.
_READ: Final = sa.select(*(_series.c[name] for name in _KEPT)).where(
    _series.c.job_id == sa.bindparam("job_id_"), _series.c.name.in_(sa.bindparam("names", expanding=True))
)
_MAKE: Final = sa.insert(_series)
_CHANGE: Final = sa.update(_series).where(*_OF_SERIES)
_FORGET: Final = sa.delete(_metrics).where(
    _metrics.c.job_id == sa.bindparam("job_id_"),
    _metrics.c.name == sa.bindparam("name_"),
    _metrics.c.step == sa.bindparam("step_"),
)


class Series:
    """Points of one attempt, gathered by ``add`` and written by ``store``; the caller holds the job's row."""

    def __init__(self, session: Session, job: Job, epoch: int, bounds: Bounds, best: str | None) -> None:
        """``best``: the series that ``checkpoint.keep_best`` judges by."""
        self._session, self._job, self._epoch, self._bounds = session, job, epoch, bounds
        self._rows: dict[str, dict[int, Row]] = {}
        self._best = best

    def add(self, name: str, step: int, row: Row) -> None:
        """A step told again replaces what was told before."""
        self._rows.setdefault(name, {})[step] = row

    def store(self) -> list[str]:
        """Write what was gathered; returns the names that there is no room for, once for each value of theirs."""
        if not self._rows:
            return []
        connection, names = self._session.connection(), list(self._rows)
        known = self._read(names)
        before = {name: replace(series) for name, series in known.items()}
        refused = set(self._make(known, [name for name in names if name not in known]))
        rows: list[Row] = []
        gone: list[Row] = []
        old: list[Row] = []
        for name in names:
            if name not in refused:
                rows += self._chosen(known[name], self._rows[name], gone, old)
        if old:
            self._keep_superseded(old)
        if gone:
            connection.execute(_FORGET, gone)
        upsert(self._session, Metric, ("job_id", "name", "step"), rows)
        for series in known.values():
            if series.points > self._bounds.points:
                self._thin(series)
        fresh = [asdict(series) for name, series in known.items() if name not in before]
        if fresh:
            connection.execute(_MAKE, fresh)
        changed = [_change(series) for name, series in known.items() if name in before and series != before[name]]
        if changed:
            connection.execute(_CHANGE, changed)
        left_out = [name for name in names if name in refused for _ in self._rows[name]]
        self._rows = {}
        return left_out

    def committed(self) -> None:
        """A checkpoint more is known: what could have been one up to it, and is none, need not be kept for ``keep_best``."""
        series = None if self._best is None else self._read([self._best]).get(self._best)
        if series is not None and series.stride > 1:
            self._session.execute(sa.delete(Metric).where(*self._beside(series)))

    def _read(self, names: list[str]) -> dict[str, Kept]:
        found: dict[str, Kept] = {}
        for begin in range(0, len(names), _CHUNK):  # a job may put the step's number into the name
            some = {"job_id_": self._job.id, "names": names[begin : begin + _CHUNK]}
            found |= {row.name: Kept(*row) for row in self._session.connection().execute(_READ, some)}
        return found

    def _make(self, known: dict[str, Kept], fresh: list[str]) -> list[str]:
        """New series while there is room for their names; the rest."""
        if not fresh:
            return []
        count = sa.select(sa.func.count()).select_from(MetricSeries).where(MetricSeries.job_id == self._job.id)
        room = max(0, self._bounds.series - (self._session.scalar(count) or 0))
        known |= {name: Kept(self._job.id, name) for name in fresh[:room]}
        return fresh[room:]

    def _chosen(self, series: Kept, rows: dict[int, Row], gone: list[Row], old: list[Row]) -> list[Row]:
        """Those of ``rows`` that are stored; the series' counts are brought up to date. ``gone``: gets the key of the point that
        need not be kept any longer; ``old``: the points of earlier attempts that are replaced by other values."""
        before, there = series.newest, self._there(series, rows)
        if self._epoch > series.epoch:
            series.newest, series.epoch = max(rows), self._epoch
        elif self._epoch == series.epoch:
            series.newest = max(series.newest, *rows)
        if before not in (-1, series.newest) and not _on_grid(series, before) and series.name != self._best:
            gone.append({"job_id_": series.job_id, "name_": series.name, "step_": before})
        grid = [step for step in rows if _on_grid(series, step)]
        series.points += len(grid) - len(there.keys() & {*grid})
        series.top = max(series.top, *grid) if grid else series.top
        newest = series.newest if self._epoch == series.epoch else None
        stored = {
            step: row
            for step, row in rows.items()
            if series.name == self._best or step == newest or _on_grid(series, step)
        }
        old += [
            there[step]
            for step in stored.keys() & there.keys()
            if there[step]["epoch"] < self._epoch and there[step]["value"] != stored[step]["value"]
        ]
        return list(stored.values())

    def _there(self, series: Kept, steps: Collection[int]) -> dict[int, Row]:
        """The points that are there at these steps: none, where all come behind the last."""
        again = [step for step in steps if step <= max(series.top, series.newest)]
        if not again:
            return {}
        between = Metric.step.between(min(again), max(again))
        columns = [_metrics.c[name] for name in ("job_id", "name", "step", "epoch", "value", "at")]
        found = self._session.execute(sa.select(*columns).where(*self._of(series), between)).mappings()
        return {row["step"]: dict(row) for row in found if row["step"] in steps}

    def _keep_superseded(self, old: list[Row]) -> None:
        """As many of each series as there is room for; the names go to the attempt."""
        first: dict[str, int] = {}
        for name in dict.fromkeys(row["name"] for row in old):
            mine = sorted((row for row in old if row["name"] == name), key=lambda row: int(row["step"]))
            first[name] = mine[0]["step"]
            count = sa.select(sa.func.count()).select_from(SupersededMetric)
            mine_too = SupersededMetric.job_id == self._job.id, SupersededMetric.name == name
            room = max(0, _SUPERSEDED - (self._session.scalar(count.where(*mine_too)) or 0))
            upsert(self._session, SupersededMetric, ("job_id", "name", "step", "epoch"), mine[:room])
        attempt = Attempt.job_id == self._job.id, Attempt.number == self._epoch
        known: dict[str, int] = self._session.scalar(sa.select(Attempt.metrics_differ).where(*attempt)) or {}
        names = known | {name: min(step, known.get(name, step)) for name, step in first.items()}
        if names != known:
            some = dict([*names.items()][:_NAMES])
            statement = sa.update(Attempt).where(*attempt).values(metrics_differ=some)
            self._session.execute(statement, execution_options={"synchronize_session": False})

    def _thin(self, series: Kept) -> None:
        """Points of branches left behind go first, then every second one, until there are few enough."""
        later = sa.exists().where(
            Attempt.job_id == Metric.job_id, Attempt.number > Metric.epoch, Attempt.base_step < Metric.step
        )
        self._session.execute(sa.delete(Metric).where(*self._of(series), later, *self._unprotected(series)))
        series.points = self._count(series, series.stride, series.phase)
        while series.points > self._bounds.points:
            half = self._count(series, series.stride * 2, series.phase)
            if half * 2 < series.points - half:  # such as steps 1, 101, 201: all of them odd
                series.phase += series.stride
                half = series.points - half
            series.stride, series.points = series.stride * 2, half
        self._session.execute(sa.delete(Metric).where(*self._beside(series)))
        on_grid = Metric.step % series.stride == series.phase
        top = self._session.scalar(sa.select(sa.func.max(Metric.step)).where(*self._of(series), on_grid))
        series.top = -1 if top is None else top

    def _count(self, series: Kept, stride: int, phase: int) -> int:
        found = sa.select(sa.func.count()).select_from(Metric).where(*self._of(series), Metric.step % stride == phase)
        return self._session.scalar(found) or 0

    def _of(self, series: Kept) -> tuple[sa.ColumnElement[bool], ...]:
        return Metric.job_id == series.job_id, Metric.name == series.name

    def _beside(self, series: Kept) -> tuple[sa.ColumnElement[bool], ...]:
        """Points beside the grid that nothing keeps."""
        beside = (Metric.step % series.stride != series.phase, Metric.step != series.newest)
        return (*self._of(series), *beside, *self._unprotected(series))

    def _unprotected(self, series: Kept) -> tuple[sa.ColumnElement[bool], ...]:
        if series.name != self._best:
            return ()
        kept = sa.select(Checkpoint.step).where(Checkpoint.job_id == self._job.id, Checkpoint.state == "committed")
        return Metric.step <= self._job.committed_step, Metric.step.not_in(kept)


def _change(series: Kept) -> Row:
    counts = {name: getattr(series, name) for name in _COUNTS}
    return {"job_id_": series.job_id, "name_": series.name, **counts}


def _on_grid(series: Kept, step: int) -> bool:
    return step % series.stride == series.phase


class Samples:
    """Hook summaries of one attempt, gathered by ``add`` and written by ``store``."""

    def __init__(self, session: Session, job_id: str, bounds: Bounds) -> None:
        self._session, self._job_id, self._bounds = session, job_id, bounds
        self._rows: dict[tuple[int, int], Row] = {}

    def add(self, rank: int, step: int, row: Row) -> None:
        self._rows[rank, step] = row

    def store(self, ranks: Collection[int]) -> None:
        """Write what was gathered. ``ranks``: whose summaries are to be counted, and thinned if there are too many."""
        upsert(self._session, HookSample, ("job_id", "rank", "step"), self._rows.values())
        for rank in {rank for rank, _ in self._rows}.intersection(ranks):
            thin_samples(self._session, self._job_id, rank, self._bounds.samples)
        self._rows = {}


def look_is_due(before: int, after: int) -> bool:
    """Whether a rank's messages ``before`` + 1 to ``after`` are reason to count its summaries."""
    return before // _LOOK != after // _LOOK


def thin_samples(session: Session, job_id: str, rank: int, most: int) -> None:
    """Beyond ``most`` summaries of a rank, every second one goes, the newest stays: the history keeps its whole length."""
    mine = (HookSample.job_id == job_id) & (HookSample.rank == rank)
    if (session.scalar(sa.select(sa.func.count()).select_from(HookSample).where(mine)) or 0) <= most:
        return
    order = sa.func.row_number().over(order_by=HookSample.step.desc()).label("row")
    rows = sa.select(HookSample.step, order).where(mine).subquery()
    session.execute(
        sa.delete(HookSample).where(mine, HookSample.step.in_(sa.select(rows.c.step).where(rows.c.row % 2 == 0)))
    )


def upsert(session: Session, table: Any, keys: tuple[str, ...], values: Iterable[Row]) -> None:
    """Later epochs replace earlier ones, never the other way round. All rows have the same columns."""
    rows = list(values)
    if rows:
        statement = _upsert(session.get_bind().dialect.name, table, keys, tuple(rows[0]))
        session.connection().execute(statement, rows)  # one statement, compiled once, whatever the number of rows


@cache
def _upsert(dialect: str, table: Any, keys: tuple[str, ...], columns: tuple[str, ...]) -> Any:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table.__table__)
    new = {name: statement.excluded[name] for name in columns if name not in keys}
    return statement.on_conflict_do_update(
        index_elements=keys, set_=new, where=table.__table__.c.epoch <= statement.excluded.epoch
    )
