"""Reads and writes the few columns that a report of figures (metrics, progress, hook summaries) needs; ORM objects would take
most of its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_service.db.models import Attempt, AttemptNode, Job


@dataclass(slots=True)
class JobRow:
    """The columns of ``Job`` that a report of figures needs."""

    id: str
    attempt: int
    desired: Desired
    desired_cause: Cause | None
    checkpoint_request: int
    step: int
    total_steps: int | None
    data_epoch: int | None
    steps_per_second: float | None
    committed_step: int
    updated_at: datetime


@dataclass(slots=True)
class AttemptRow:
    """The columns of ``Attempt`` that a report of figures needs."""

    job_id: str
    number: int
    phase: AttemptPhase
    report_token_hash: str
    results: dict[str, Any]
    last_step: int
    notes_reported: int
    metric_values_refused: int
    stragglers: dict[str, Any] | None


@dataclass(slots=True)
class NodeRow:
    """The columns of ``AttemptNode`` that a report of figures needs."""

    node: int
    phase: AttemptPhase
    acked: dict[str, int]
    address: str | None
    reported_at: datetime | None
    times: dict[str, list[list[float]]] | None


class Shape(NamedTuple):
    """The parts of the job's spec that storing a report needs."""

    nodes: int
    ranks_per_node: int
    uploads_checkpoints: bool  # True if checkpoints are copied to an object store; node 0's agent reports the copies
    best_metric: str | None  # the metric that ``keep_best`` compares
    trackers: tuple[str, ...]  # which get the metrics


class Rows(NamedTuple):
    """Columns of a job, an attempt and a node, and parts of the job's spec, that a report of figures needs: plain objects, not
    ORM rows. Only ``write_changes`` stores changes. ``node`` is None if its row does not exist."""

    job: JobRow
    attempt: AttemptRow
    node: NodeRow | None
    shape: Shape


_JOBS: Final = cast("sa.Table", Job.__table__)
_ATTEMPTS: Final = cast("sa.Table", Attempt.__table__)
_NODES: Final = cast("sa.Table", AttemptNode.__table__)
_jobs, _attempts, _nodes = _JOBS.c, _ATTEMPTS.c, _NODES.c
_SHAPE_COLUMNS: Final = (  # by paths into the spec: reading all of it takes longer than the rest of a small report
    _jobs.spec[("world", "nodes")].as_integer(),
    _jobs.spec[("world", "ranks_per_node")].as_integer(),
    _jobs.spec[("checkpoint", "uri")].as_string(),
    _jobs.spec[("checkpoint", "keep_best", "metric")].as_string(),
    _jobs.resolved["trackers"],
)
_JOB_COLUMNS: Final = tuple(_jobs[name] for name in JobRow.__slots__)
_ATTEMPT_COLUMNS: Final = tuple(_attempts[name] for name in AttemptRow.__slots__)
_NODE_COLUMNS: Final = tuple(_nodes[name] for name in NodeRow.__slots__)
_NODE_JOIN: Final = (
    (_nodes.job_id == _attempts.job_id) & (_nodes.attempt == _attempts.number) & (_nodes.node == sa.bindparam("node_"))
)
_THIS_ATTEMPT: Final = (_attempts.job_id == sa.bindparam("job_id_"), _attempts.number == sa.bindparam("attempt_"))
_ATTEMPT_AND_NODE: Final = _ATTEMPTS.outerjoin(_NODES, _NODE_JOIN)

_SELECT_ALL: Final = (
    sa.select(*_ATTEMPT_COLUMNS, *_NODE_COLUMNS, *_JOB_COLUMNS, *_SHAPE_COLUMNS)
    .select_from(_ATTEMPT_AND_NODE.join(_JOBS, _jobs.id == _attempts.job_id))
    .where(*_THIS_ATTEMPT)
)
_LOCK_JOB: Final = (
    sa.select(*_JOB_COLUMNS, *_SHAPE_COLUMNS).where(_jobs.id == sa.bindparam("job_id_")).with_for_update()
)
_SELECT_ATTEMPT_AND_NODE: Final = (
    sa.select(*_ATTEMPT_COLUMNS, *_NODE_COLUMNS).select_from(_ATTEMPT_AND_NODE).where(*_THIS_ATTEMPT)
)
_SELECT_SHAPE: Final = sa.select(*_SHAPE_COLUMNS).where(_jobs.id == sa.bindparam("job_id_"))

_JOB_UPDATE_COLUMNS: Final = ("step", "total_steps", "data_epoch", "steps_per_second", "updated_at")
_ATTEMPT_UPDATE_COLUMNS: Final = ("last_step", "notes_reported", "metric_values_refused", "stragglers")
_NODE_UPDATE_COLUMNS: Final = ("acked", "reported_at", "times")
_UPDATE_JOB: Final = sa.update(_JOBS).where(_jobs.id == sa.bindparam("job_id_"))
_UPDATE_ATTEMPT: Final = sa.update(_ATTEMPTS).where(*_THIS_ATTEMPT)
_UPDATE_NODE: Final = sa.update(_NODES).where(
    _nodes.job_id == sa.bindparam("job_id_"),
    _nodes.attempt == sa.bindparam("attempt_"),
    _nodes.node == sa.bindparam("node_"),
)


def read_rows(session: Session, job_id: str, attempt: int, node: int) -> Rows | None:
    """Return what a report of figures needs of the rows of its job, attempt and node, not locked; None if there is no such
    attempt."""
    found = (
        session.connection().execute(_SELECT_ALL, {"job_id_": job_id, "attempt_": attempt, "node_": node}).one_or_none()
    )
    if found is None:
        return None
    job_start = len(_ATTEMPT_COLUMNS) + len(_NODE_COLUMNS)
    return _rows(found[job_start:], found[:job_start])


def lock_rows(session: Session, job_id: str, attempt: int, node: int) -> Rows | None:
    """Like ``read_rows``, but lock the job's row until the transaction ends."""
    connection, key = session.connection(), {"job_id_": job_id, "attempt_": attempt, "node_": node}
    # two statements: on PostgreSQL, one that waits for the lock would read the other tables as they were before the wait
    job = connection.execute(_LOCK_JOB, {"job_id_": job_id}).one_or_none()
    found = None if job is None else connection.execute(_SELECT_ATTEMPT_AND_NODE, key).one_or_none()
    if job is None or found is None:
        return None
    return _rows(job, found)


@contextmanager
def write_changes(session: Session, rows: Rows) -> Iterator[None]:
    """Context manager: if its block raises nothing, changes of ``rows`` are written, but only in columns that figures can
    change. The caller has locked the job's row."""
    job, attempt, node = replace(rows.job), replace(rows.attempt), None if rows.node is None else replace(rows.node)
    yield
    connection = session.connection()
    key: dict[str, Any] = {"job_id_": rows.job.id}
    if rows.job != job:
        connection.execute(_UPDATE_JOB, key | _values(rows.job, _JOB_UPDATE_COLUMNS))
    key["attempt_"] = rows.attempt.number
    if rows.attempt != attempt:
        connection.execute(_UPDATE_ATTEMPT, key | _values(rows.attempt, _ATTEMPT_UPDATE_COLUMNS))
    if rows.node is not None and rows.node != node:
        connection.execute(_UPDATE_NODE, key | {"node_": rows.node.node} | _values(rows.node, _NODE_UPDATE_COLUMNS))


def read_shape(session: Session, job_id: str) -> Shape:
    """Return the parts of the job's spec that a report needs. Raises ``NoResultFound`` if there is no such job."""
    return _shape(*session.connection().execute(_SELECT_SHAPE, {"job_id_": job_id}).one())


def _values(row: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return these attributes of ``row``, by name."""
    return {name: getattr(row, name) for name in names}


def _rows(job: Any, attempt_and_node: Any) -> Rows:
    """Split the selected columns of the job and of attempt and node into the row objects."""
    attempt, node = attempt_and_node[: len(_ATTEMPT_COLUMNS)], attempt_and_node[len(_ATTEMPT_COLUMNS) :]
    return Rows(
        JobRow(*job[: len(_JOB_COLUMNS)]),
        AttemptRow(*attempt),
        None if node[0] is None else NodeRow(*node),
        _shape(*job[len(_JOB_COLUMNS) :]),
    )


def _shape(
    nodes: int, ranks_per_node: int, uri: str | None, best_metric: str | None, trackers: list[str] | None
) -> Shape:
    """Return the shape. ``uri``: that of the object store for checkpoints, if the spec has one. ``trackers`` None: an older
    version stored the job."""
    return Shape(nodes, ranks_per_node, uri is not None, best_metric, tuple(trackers or ()))
