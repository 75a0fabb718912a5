"""Storage of metrics and hook summaries: a long series is thinned while it grows.

A series keeps the points at steps of a grid (``step % stride == phase``) and the newest point; the stride doubles when there are
too many points. The grid depends on steps alone, so that a redone step replaces exactly its old point. The series of
``checkpoint.keep_best`` also keeps points at checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import cache
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.models import Attempt, Checkpoint, HookSample, Job, Metric, MetricSeries, SupersededMetric

_CHUNK: Final = 500
_COUNT_INTERVAL: Final = 256
"""Messages of a rank between two counts of its stored hook summaries."""
_MAX_SUPERSEDED: Final = 1000
"""Superseded values kept of one series."""
_MAX_NAMES: Final = 100
"""Names of series with superseded values that are kept on an attempt's row."""
Row = dict[str, Any]
_metrics, _series = cast("sa.Table", Metric.__table__), cast("sa.Table", MetricSeries.__table__)


@dataclass(slots=True)
class SeriesRow:
    """A row of ``MetricSeries``. ``points``: number of stored points on the grid. ``top``: the highest step of these points, -1
    if there are none. ``attempt``: the newest attempt with values. ``newest``: the highest step that this attempt reported."""

    job_id: str
    name: str
    stride: int = 1
    phase: int = 0
    points: int = 0
    top: int = -1
    newest: int = -1
    attempt: int = 0


_COLUMNS: Final = tuple(field.name for field in fields(SeriesRow))
_COUNT_COLUMNS: Final = _COLUMNS[2:]
_THIS_SERIES: Final = _series.c.job_id == sa.bindparam("job_id_"), _series.c.name == sa.bindparam("name_")
# Built once: building a statement takes longer than SQLite needs to execute it.
_SELECT_SERIES: Final = sa.select(*(_series.c[name] for name in _COLUMNS)).where(
    _series.c.job_id == sa.bindparam("job_id_"), _series.c.name.in_(sa.bindparam("names", expanding=True))
)
_INSERT_SERIES: Final = sa.insert(_series)
_UPDATE_SERIES: Final = sa.update(_series).where(*_THIS_SERIES)
_DELETE_POINT: Final = sa.delete(_metrics).where(
    _metrics.c.job_id == sa.bindparam("job_id_"),
    _metrics.c.name == sa.bindparam("name_"),
    _metrics.c.step == sa.bindparam("step_"),
)


class Series:
    """Metric points of one attempt, collected by ``add`` and written by ``store``. The caller has locked the job's row."""

    def __init__(self, session: Session, job: Job, attempt: int, bounds: Bounds, best_metric: str | None) -> None:
        """``best_metric``: name of the series that ``checkpoint.keep_best`` compares; None: there is none."""
        self._session, self._job, self._attempt, self._bounds = session, job, attempt, bounds
        self._rows: dict[str, dict[int, Row]] = {}
        self._best_metric = best_metric

    def add(self, name: str, step: int, row: Row) -> None:
        """Collect one point in memory; it replaces a collected point of the same name and step."""
        self._rows.setdefault(name, {})[step] = row

    def store(self) -> list[str]:
        """Write the collected points. Points of new series beyond the job's limit are left out. Return the name of the series of
        each point left out, so a name may occur several times."""
        if not self._rows:
            return []
        connection, names = self._session.connection(), list(self._rows)
        known = self._read(names)
        before = {name: replace(series) for name, series in known.items()}
        refused = set(self._add_new(known, [name for name in names if name not in known]))
        rows: list[Row] = []
        removed: list[Row] = []
        superseded: list[Row] = []
        for name in names:
            if name not in refused:
                rows += self._choose_points(known[name], self._rows[name], removed, superseded)
        if superseded:
            self._store_superseded(superseded)
        if removed:
            connection.execute(_DELETE_POINT, removed)
        upsert(self._session, Metric, ("job_id", "name", "step"), rows)
        for series in known.values():
            if series.points > self._bounds.points:
                self._thin(series)
        fresh = [asdict(series) for name, series in known.items() if name not in before]
        if fresh:
            connection.execute(_INSERT_SERIES, fresh)
        changed = [
            _update_values(series) for name, series in known.items() if name in before and series != before[name]
        ]
        if changed:
            connection.execute(_UPDATE_SERIES, changed)
        left_out = [name for name in names if name in refused for _ in self._rows[name]]
        self._rows = {}
        return left_out

    def delete_unneeded_points(self) -> None:
        """Delete off-grid points of the ``keep_best`` series whose steps can no longer become checkpoints."""
        series = None if self._best_metric is None else self._read([self._best_metric]).get(self._best_metric)
        if series is not None and series.stride > 1:
            self._session.execute(sa.delete(Metric).where(*self._off_grid_filter(series)))

    def _read(self, names: list[str]) -> dict[str, SeriesRow]:
        """Return the rows of those series of ``names`` that the job has, by name."""
        found: dict[str, SeriesRow] = {}
        for begin in range(0, len(names), _CHUNK):  # a job may put the step's number into the name
            some = {"job_id_": self._job.id, "names": names[begin : begin + _CHUNK]}
            found |= {row.name: SeriesRow(*row) for row in self._session.connection().execute(_SELECT_SERIES, some)}
        return found

    def _add_new(self, known: dict[str, SeriesRow], fresh: list[str]) -> list[str]:
        """Add a row for each new series of ``fresh`` to ``known``, up to the job's limit. Return the rest."""
        if not fresh:
            return []
        count = sa.select(sa.func.count()).select_from(MetricSeries).where(MetricSeries.job_id == self._job.id)
        room = max(0, self._bounds.series - (self._session.scalar(count) or 0))
        known |= {name: SeriesRow(self._job.id, name) for name in fresh[:room]}
        return fresh[room:]

    def _choose_points(
        self, series: SeriesRow, rows: dict[int, Row], removed: list[Row], superseded: list[Row]
    ) -> list[Row]:
        """Return those of the collected ``rows`` that are to be stored, and update ``series``. Keys of points to delete are added
        to ``removed``. Stored points of earlier attempts that get another value are added to ``superseded``."""
        before, stored_before = series.newest, self._stored_points(series, rows)
        if self._attempt > series.attempt:
            series.newest, series.attempt = max(rows), self._attempt
        elif self._attempt == series.attempt:
            series.newest = max(series.newest, *rows)
        if before not in (-1, series.newest) and not _on_grid(series, before) and series.name != self._best_metric:
            removed.append({"job_id_": series.job_id, "name_": series.name, "step_": before})
        grid = [step for step in rows if _on_grid(series, step)]
        series.points += len(grid) - len(stored_before.keys() & {*grid})
        series.top = max(series.top, *grid) if grid else series.top
        newest = series.newest if self._attempt == series.attempt else None
        stored = {
            step: row
            for step, row in rows.items()
            if series.name == self._best_metric or step == newest or _on_grid(series, step)
        }
        superseded += [
            stored_before[step]
            for step in stored.keys() & stored_before.keys()
            if stored_before[step]["attempt"] < self._attempt and stored_before[step]["value"] != stored[step]["value"]
        ]
        return list(stored.values())

    def _stored_points(self, series: SeriesRow, steps: Collection[int]) -> dict[int, Row]:
        """Return the stored points at these steps, by step. Steps higher than both ``top`` and ``newest`` are not looked up."""
        again = [step for step in steps if step <= max(series.top, series.newest)]
        if not again:
            return {}
        between = Metric.step.between(min(again), max(again))
        columns = [_metrics.c[name] for name in ("job_id", "name", "step", "attempt", "value", "at")]
        found = self._session.execute(sa.select(*columns).where(*self._series_filter(series), between)).mappings()
        return {row["step"]: dict(row) for row in found if row["step"] in steps}

    def _store_superseded(self, superseded: list[Row]) -> None:
        """Store points that this attempt's points replace, and note their series on the attempt's row. Both are limited."""
        first: dict[str, int] = {}
        for name in dict.fromkeys(row["name"] for row in superseded):
            mine = sorted((row for row in superseded if row["name"] == name), key=lambda row: int(row["step"]))
            first[name] = mine[0]["step"]
            count = sa.select(sa.func.count()).select_from(SupersededMetric)
            mine_too = SupersededMetric.job_id == self._job.id, SupersededMetric.name == name
            room = max(0, _MAX_SUPERSEDED - (self._session.scalar(count.where(*mine_too)) or 0))
            upsert(self._session, SupersededMetric, ("job_id", "name", "step", "attempt"), mine[:room])
        attempt = Attempt.job_id == self._job.id, Attempt.number == self._attempt
        known: dict[str, int] = self._session.scalar(sa.select(Attempt.metrics_differ).where(*attempt)) or {}
        names = known | {name: min(step, known.get(name, step)) for name, step in first.items()}
        if names != known:
            some = dict([*names.items()][:_MAX_NAMES])
            statement = sa.update(Attempt).where(*attempt).values(metrics_differ=some)
            self._session.execute(statement, execution_options={"synchronize_session": False})

    def _thin(self, series: SeriesRow) -> None:
        """Delete points of a series until it has at most ``Bounds.points`` on its grid, and update ``series``."""
        # points that a later attempt abandoned, by starting from an earlier step
        later = sa.exists().where(
            Attempt.job_id == Metric.job_id, Attempt.number > Metric.attempt, Attempt.base_step < Metric.step
        )
        self._session.execute(
            sa.delete(Metric).where(*self._series_filter(series), later, *self._unprotected_filter(series))
        )
        series.points = self._count_points(series, series.stride, series.phase)
        while series.points > self._bounds.points:
            half = self._count_points(series, series.stride * 2, series.phase)
            if half * 2 < series.points - half:  # such as steps 1, 101, 201: all of them odd
                series.phase += series.stride
                half = series.points - half
            series.stride, series.points = series.stride * 2, half
        self._session.execute(sa.delete(Metric).where(*self._off_grid_filter(series)))
        on_grid = Metric.step % series.stride == series.phase
        top = self._session.scalar(sa.select(sa.func.max(Metric.step)).where(*self._series_filter(series), on_grid))
        series.top = -1 if top is None else top

    def _count_points(self, series: SeriesRow, stride: int, phase: int) -> int:
        """Return how many stored points of the series are on the grid with this stride and phase."""
        found = (
            sa.select(sa.func.count())
            .select_from(Metric)
            .where(*self._series_filter(series), Metric.step % stride == phase)
        )
        return self._session.scalar(found) or 0

    def _series_filter(self, series: SeriesRow) -> tuple[sa.ColumnElement[bool], ...]:
        """Return the conditions that select the series' points."""
        return Metric.job_id == series.job_id, Metric.name == series.name

    def _off_grid_filter(self, series: SeriesRow) -> tuple[sa.ColumnElement[bool], ...]:
        """Return the conditions that select unprotected points of the series that are off its grid and not the newest."""
        beside = (Metric.step % series.stride != series.phase, Metric.step != series.newest)
        return (*self._series_filter(series), *beside, *self._unprotected_filter(series))

    def _unprotected_filter(self, series: SeriesRow) -> tuple[sa.ColumnElement[bool], ...]:
        """Return the conditions that select points which may be deleted. In the ``keep_best`` series, points at committed
        checkpoints are protected, and so are points after the job's last committed step."""
        if series.name != self._best_metric:
            return ()
        kept = sa.select(Checkpoint.step).where(Checkpoint.job_id == self._job.id, Checkpoint.state == "committed")
        return Metric.step <= self._job.committed_step, Metric.step.not_in(kept)


def _update_values(series: SeriesRow) -> Row:
    """Return the parameters of ``_UPDATE_SERIES`` for this row."""
    counts = {name: getattr(series, name) for name in _COUNT_COLUMNS}
    return {"job_id_": series.job_id, "name_": series.name, **counts}


def _on_grid(series: SeriesRow, step: int) -> bool:
    """True if the step is on the series' grid."""
    return step % series.stride == series.phase


class Samples:
    """Hook summaries of one attempt, collected by ``add`` and written by ``store``."""

    def __init__(self, session: Session, job_id: str, bounds: Bounds) -> None:
        self._session, self._job_id, self._bounds = session, job_id, bounds
        self._rows: dict[tuple[int, int], Row] = {}

    def add(self, rank: int, step: int, row: Row) -> None:
        """Collect the summary of one rank and step in memory; it replaces an earlier one."""
        self._rows[rank, step] = row

    def store(self, ranks: Collection[int]) -> None:
        """Write the collected summaries. For those of ``ranks`` that have new ones, the stored summaries may be thinned."""
        upsert(self._session, HookSample, ("job_id", "rank", "step"), self._rows.values())
        for rank in {rank for rank, _ in self._rows}.intersection(ranks):
            thin_samples(self._session, self._job_id, rank, self._bounds.samples)
        self._rows = {}


def is_count_due(before: int, after: int) -> bool:
    """True if a rank's number of messages has reached or passed a multiple of ``_COUNT_INTERVAL``. ``before``, ``after``: that
    number before and after this report."""
    return before // _COUNT_INTERVAL != after // _COUNT_INTERVAL


def thin_samples(session: Session, job_id: str, rank: int, limit: int) -> None:
    """If a rank has more than ``limit`` stored hook summaries, delete every second one, but not the newest."""
    mine = (HookSample.job_id == job_id) & (HookSample.rank == rank)
    if (session.scalar(sa.select(sa.func.count()).select_from(HookSample).where(mine)) or 0) <= limit:
        return
    order = sa.func.row_number().over(order_by=HookSample.step.desc()).label("row")
    rows = sa.select(HookSample.step, order).where(mine).subquery()
    session.execute(
        sa.delete(HookSample).where(mine, HookSample.step.in_(sa.select(rows.c.step).where(rows.c.row % 2 == 0)))
    )


def upsert(session: Session, table: Any, keys: tuple[str, ...], values: Iterable[Row]) -> None:
    """Insert ``values``, all with the same columns and with different ``keys``, as rows of ``table``. A stored row with the same
    ``keys`` is updated, unless it is of a later attempt."""
    rows = list(values)
    if not rows:
        return
    is_postgres = session.get_bind().dialect.name == "postgresql"
    statement = _upsert(is_postgres, table, keys, tuple(rows[0]))
    # on PostgreSQL, a statement for each row would take most of a report's time, in both processes
    session.connection().execute(statement, {"rows": _as_json(rows)} if is_postgres else rows)


@cache
def _upsert(is_postgres: bool, table: Any, keys: tuple[str, ...], columns: tuple[str, ...]) -> Any:
    """Return the statement of ``upsert`` for rows with these columns; cached. On PostgreSQL it takes all rows as one JSON array,
    the parameter ``rows``."""
    statement: Any
    if is_postgres:
        rows = f"json_populate_recordset(CAST(NULL AS {table.__tablename__}), CAST(:rows AS json))"
        source: Any = sa.select(*map(sa.column, columns)).select_from(sa.text(rows))
        statement = postgresql.insert(table.__table__).from_select(columns, source)
    else:
        statement = sqlite.insert(table.__table__)
    new = {name: statement.excluded[name] for name in columns if name not in keys}
    return statement.on_conflict_do_update(
        index_elements=keys, set_=new, where=table.__table__.c.attempt <= statement.excluded.attempt
    )


def _as_json(rows: list[Row]) -> str:
    """Return the rows as a JSON array from which PostgreSQL makes the same values. Raises ``ValueError`` for NaN and infinities
    within a JSON column."""
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    return json.dumps(plain, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Return a column's value as JSON has it."""
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
