"""The few columns that a report reads and writes, by statements that are made once.

Most reports bring figures alone, some ten a second for every core of agents: loading and writing whole rows as objects took most
of the time that such a report costs. Reports of anything else, and what an agent has left behind, go by the objects of
``models``; what messages do to either is written once (``ingest_effects``), since both have the attributes of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_service.models import Attempt, AttemptNode, Job


@dataclass(slots=True)
class JobRow:
    id: str
    epoch: int
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
    job_id: str
    number: int
    phase: AttemptPhase
    report_token_hash: str
    results: dict[str, Any]
    last_step: int
    notes: int
    values_refused: int


@dataclass(slots=True)
class NodeRow:
    node: int
    phase: AttemptPhase
    acked: dict[str, int]
    address: str | None
    reported_at: datetime | None


class Shape(NamedTuple):
    """What a report needs to know of the job's spec."""

    nodes: int
    ranks_per_node: int
    copies: bool  # are there any in an object store, of which node 0's agent tells
    best: str | None  # the metric that ``keep_best`` judges by


class Rows(NamedTuple):
    """``node`` None: nobody has made that row yet."""

    job: JobRow
    attempt: AttemptRow
    node: NodeRow | None
    shape: Shape


_JOBS: Final = cast("sa.Table", Job.__table__)
_ATTEMPTS: Final = cast("sa.Table", Attempt.__table__)
_NODES: Final = cast("sa.Table", AttemptNode.__table__)
_jobs, _attempts, _nodes = _JOBS.c, _ATTEMPTS.c, _NODES.c
_SHAPE: Final = (  # by paths into the spec: reading all of it takes longer than the rest of a small report
    _jobs.spec[("world", "nodes")].as_integer(),
    _jobs.spec[("world", "ranks_per_node")].as_integer(),
    _jobs.spec[("checkpoint", "uri")].as_string(),
    _jobs.spec[("checkpoint", "keep_best", "metric")].as_string(),
)
_JOB: Final = tuple(_jobs[name] for name in JobRow.__slots__)
_ATTEMPT: Final = tuple(_attempts[name] for name in AttemptRow.__slots__)
_NODE: Final = tuple(_nodes[name] for name in NodeRow.__slots__)
_OF_NODE: Final = (
    (_nodes.job_id == _attempts.job_id) & (_nodes.attempt == _attempts.number) & (_nodes.node == sa.bindparam("node_"))
)
_THIS: Final = (_attempts.job_id == sa.bindparam("job_id_"), _attempts.number == sa.bindparam("epoch_"))
_ATTEMPT_AND_NODE: Final = _ATTEMPTS.outerjoin(_NODES, _OF_NODE)

_SEEN: Final = (
    sa.select(*_ATTEMPT, *_NODE, *_JOB, *_SHAPE)
    .select_from(_ATTEMPT_AND_NODE.join(_JOBS, _jobs.id == _attempts.job_id))
    .where(*_THIS)
)
_HOLD: Final = sa.select(*_JOB, *_SHAPE).where(_jobs.id == sa.bindparam("job_id_")).with_for_update()
_HELD: Final = sa.select(*_ATTEMPT, *_NODE).select_from(_ATTEMPT_AND_NODE).where(*_THIS)
_SHAPE_OF: Final = sa.select(*_SHAPE).where(_jobs.id == sa.bindparam("job_id_"))

_WRITTEN_OF_JOB: Final = ("step", "total_steps", "data_epoch", "steps_per_second", "updated_at")
_WRITTEN_OF_ATTEMPT: Final = ("last_step", "notes", "values_refused")
_WRITTEN_OF_NODE: Final = ("acked", "reported_at")
_WRITE_JOB: Final = sa.update(_JOBS).where(_jobs.id == sa.bindparam("job_id_"))
_WRITE_ATTEMPT: Final = sa.update(_ATTEMPTS).where(*_THIS)
_WRITE_NODE: Final = sa.update(_NODES).where(
    _nodes.job_id == sa.bindparam("job_id_"),
    _nodes.attempt == sa.bindparam("epoch_"),
    _nodes.node == sa.bindparam("node_"),
)


def seen(session: Session, job_id: str, epoch: int, node: int) -> Rows | None:
    """All that a report without news needs, in one query; None: there is no such attempt."""
    found = session.connection().execute(_SEEN, {"job_id_": job_id, "epoch_": epoch, "node_": node}).one_or_none()
    if found is None:
        return None
    behind = len(_ATTEMPT) + len(_NODE)
    return _rows(found[behind:], found[:behind])


def hold(session: Session, job_id: str, epoch: int, node: int) -> Rows | None:
    """The same with the job's row held until the transaction ends. In two statements: what is read in the one that waits for the
    row would, on PostgreSQL, be what the other tables had when the wait began."""
    connection, key = session.connection(), {"job_id_": job_id, "epoch_": epoch, "node_": node}
    job = connection.execute(_HOLD, {"job_id_": job_id}).one_or_none()
    found = None if job is None else connection.execute(_HELD, key).one_or_none()
    if job is None or found is None:
        return None
    return _rows(job, found)


@contextmanager
def written(session: Session, rows: Rows) -> Iterator[None]:
    """What the block changes of these rows is written at its end. The job's row is held."""
    job, attempt, node = replace(rows.job), replace(rows.attempt), None if rows.node is None else replace(rows.node)
    yield
    connection = session.connection()
    key: dict[str, Any] = {"job_id_": rows.job.id}
    if rows.job != job:
        connection.execute(_WRITE_JOB, key | _values(rows.job, _WRITTEN_OF_JOB))
    key["epoch_"] = rows.attempt.number
    if rows.attempt != attempt:
        connection.execute(_WRITE_ATTEMPT, key | _values(rows.attempt, _WRITTEN_OF_ATTEMPT))
    if rows.node is not None and rows.node != node:
        connection.execute(_WRITE_NODE, key | {"node_": rows.node.node} | _values(rows.node, _WRITTEN_OF_NODE))


def shape_of(session: Session, job_id: str) -> Shape:
    return _shape(*session.connection().execute(_SHAPE_OF, {"job_id_": job_id}).one())


def _values(row: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _rows(job: Any, attempt_and_node: Any) -> Rows:
    attempt, node = attempt_and_node[: len(_ATTEMPT)], attempt_and_node[len(_ATTEMPT) :]
    return Rows(
        JobRow(*job[: len(_JOB)]),
        AttemptRow(*attempt),
        None if node[0] is None else NodeRow(*node),
        _shape(*job[len(_JOB) :]),
    )


def _shape(nodes: int, ranks_per_node: int, uri: str | None, best: str | None) -> Shape:
    return Shape(nodes, ranks_per_node, uri is not None, best)
