"""Reports of agents: fenced by epoch, stored exactly once by (attempt, rank, sequence number).

``ingest`` is the door for agents; ``ingest_batches`` is used by the reconciler as well, for what an agent that died left in
its spools. A result that a report brings ends nothing by itself: it is kept on the attempt for the reconciler, which decides.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session, defer

from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.messages import (
    AGENT_RANK,
    AgentReport,
    AttemptResult,
    CheckpointCommitted,
    Control,
    Group,
    RankBatch,
    RankMessage,
    ReportAck,
    node_rank,
)
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_contract.phases import AttemptPhase, Cause, Outcome
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.fencing import fence, refusals
from ratchet_service.ingest_effects import MAX_NUMBER, Effects, saved_iteration
from ratchet_service.ingest_series import look_is_due
from ratchet_service.launchers.results import cut
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.storable import storable_json
from ratchet_service.transitions import add_event, lock_job

UNREAD: Final = (defer(Job.spec), defer(Job.resolved), defer(Job.warnings), defer(Job.fork_source))
"""Columns that a report has no use for, and that are most of the row."""
UNREAD_OF_ATTEMPT: Final = (defer(Attempt.launch), defer(Attempt.resume_report))

_ORDER = [AttemptPhase.LAUNCHING, AttemptPhase.RUNNING, AttemptPhase.STOPPING, AttemptPhase.ENDED]


class Shape(NamedTuple):
    """What a report needs to know of the job's spec."""

    nodes: int
    ranks_per_node: int
    copies: bool  # are there any in an object store, of which node 0's agent tells
    best: str | None  # the metric that ``keep_best`` judges by


def shape_of(session: Session, job: Job) -> Shape:
    """Asked of the database by paths into the spec: reading all of it takes longer than the rest of a small report."""
    return _shape(*session.execute(sa.select(*_SHAPE).where(Job.id == job.id)).one())


def _shape(nodes: int, ranks_per_node: int, uri: str | None, best: str | None) -> Shape:
    return Shape(nodes, ranks_per_node, uri is not None, best)


_SHAPE: Final = (
    Job.spec[("world", "nodes")].as_integer(),
    Job.spec[("world", "ranks_per_node")].as_integer(),
    Job.spec[("checkpoint", "uri")].as_string(),
    Job.spec[("checkpoint", "keep_best", "metric")].as_string(),
)


def hash_token(token: str) -> str:
    """What is stored of a report token."""
    return hashlib.sha256(token.encode()).hexdigest()


def ingest(
    database: Database,
    report: AgentReport,
    token: str | None,
    homes: HomePaths,
    bounds: Bounds = DEFAULT_BOUNDS,
) -> ReportAck:
    """Store what is new of a report and answer what is stored and wanted. An empty report only reads.

    Raises ``Refused`` (``protocol-mismatch``, ``token-missing``, ``token-wrong``), ``NotFound``, and ``Stale``
    (409 ``stale-epoch``) for an attempt that is not the newest one or has ended.
    """
    if report.protocol != PROTOCOL_VERSION:
        raise Refused(
            f"this service speaks protocol {PROTOCOL_VERSION}, the agent {report.protocol}: install the same version of Ratchet",
            code="protocol-mismatch",
        )
    with refusals(database, report.job_id, report.epoch, "a report"):
        return _ingest(database, report, token, homes, bounds)


def _ingest(database: Database, report: AgentReport, token: str | None, homes: HomePaths, bounds: Bounds) -> ReportAck:
    with database.read() as session:
        attempt, job, shape, node = _seen(session, report.job_id, report.epoch, token, report.node)
        if not 0 <= report.node < shape.nodes:
            raise Refused(f"there is no node {report.node} in this job", code="invalid-report")
        fence(job, attempt)
        if node is not None and not _news(report, attempt, node):
            return _ack(session, job, attempt, node, shape)
    iterations = hook_iterations(report.batches, homes.job(report.job_id))
    with database.write() as session:
        job = lock_job(session, report.job_id, UNREAD)
        held = session.get(Attempt, (report.job_id, report.epoch), populate_existing=True, options=UNREAD_OF_ATTEMPT)
        if held is None:
            raise _no_attempt(report.job_id, report.epoch)
        fence(job, held)
        node = _node(session, report)
        ended = _advance(held, node, report)
        ingest_batches(session, job, held, node, report.batches, iterations, bounds, shape)
        if ended is not None:
            _tell_end(session, held, ended)  # behind what it has told before
        session.flush()
        return _ack(session, job, held, node, shape)


def ingest_batches(
    session: Session,
    job: Job,
    attempt: Attempt,
    node: AttemptNode,
    batches: Sequence[RankBatch],
    hook_iterations: dict[tuple[int, int], int] | None = None,
    bounds: Bounds = DEFAULT_BOUNDS,
    shape: Shape | None = None,
) -> int:
    """Store every message that is not stored yet; returns their number. The caller holds the job's row.

    Sequence numbers that leave a gap after what is stored are left alone: they come again. Effects on the job itself happen
    only while the attempt is its newest one.
    """
    acked = dict(node.acked)
    shape = shape or shape_of(session, job)
    effects = Effects(session, job, attempt, hook_iterations or {}, bounds, shape.best)
    world, agent_speaks = shape.nodes * shape.ranks_per_node, node.node == 0 and shape.copies
    stored, to_count = 0, set[int]()
    for batch in sorted(batches, key=lambda batch: batch.rank < 0):  # agents speak of what ranks have said
        of_agent = batch.rank == node_rank(node.node) or (batch.rank == AGENT_RANK and agent_speaks)
        if not (0 <= batch.rank < world or of_agent):
            raise Refused(f"there is no rank {batch.rank} in a group of {world}", code="invalid-report")
        done = acked.get(str(batch.rank), 0)
        fresh = unstored(batch, done)
        for message in fresh:
            effects.apply(batch.rank, message)
        if fresh:
            acked[str(batch.rank)] = done + len(fresh)
            stored += len(fresh)
            if look_is_due(done, done + len(fresh)):
                to_count.add(batch.rank)
    if stored:
        effects.finish(to_count)
        node.acked = acked
        node.reported_at = now_in(session)
    return stored


def unstored(batch: RankBatch, done: int) -> list[RankMessage]:
    """Its messages behind number ``done``; none where numbers are missing in between: they come again."""
    return [] if batch.from_seq > done + 1 else batch.messages[done + 1 - batch.from_seq :]


def hook_iterations(batches: Sequence[RankBatch], job: JobPaths) -> dict[tuple[int, int], int]:
    """Iteration of the hook in each checkpoint that the batches report, from its manifest. Read outside of transactions."""
    out = {}
    for batch in batches:
        for message in batch.messages:
            if isinstance(message, CheckpointCommitted):
                found = saved_iteration(job, message)
                if found is not None:
                    out[message.step, message.epoch] = found
    return out


def authorised(session: Session, job_id: str, epoch: int, token: str | None) -> tuple[Attempt, Job]:
    """The attempt whose token this is, and its job. Raises ``Refused`` (``token-missing``, ``token-wrong``), ``NotFound``."""
    return _seen(session, job_id, epoch, token, 0)[:2]


def _seen(
    session: Session, job_id: str, epoch: int, token: str | None, node: int
) -> tuple[Attempt, Job, Shape, AttemptNode | None]:
    """All that a report without news needs, in one query. Raises like ``authorised``."""
    if not token:
        raise Refused("agents give the attempt's token: Authorization: Bearer ...", code="token-missing")
    if not is_job_id(job_id) or not 0 < epoch <= MAX_NUMBER:
        raise _no_attempt(job_id, epoch)
    node = node if 0 <= node <= MAX_NUMBER else -1  # none; the caller says so
    here = (AttemptNode.job_id == Attempt.job_id) & (AttemptNode.attempt == Attempt.number) & (AttemptNode.node == node)
    query = (
        sa.select(Attempt, Job, AttemptNode, *_SHAPE).join(Job, Job.id == Attempt.job_id).outerjoin(AttemptNode, here)
    )
    query = query.where(Attempt.job_id == job_id, Attempt.number == epoch).options(*UNREAD, *UNREAD_OF_ATTEMPT)
    found = session.execute(query).one_or_none()
    if found is None:
        raise _no_attempt(job_id, epoch)
    attempt, job, row, *shape = found
    if not hmac.compare_digest(hash_token(token), attempt.report_token_hash):
        raise Refused("this is not the token of that attempt", code="token-wrong")
    return attempt, job, _shape(*shape), row


def _no_attempt(job_id: str, epoch: int) -> NotFound:
    return NotFound(f"job {job_id} has no attempt {epoch}", code="attempt-not-found")


def _news(report: AgentReport, attempt: Attempt, node: AttemptNode) -> bool:
    fresh = any(b.from_seq + len(b.messages) - 1 > node.acked.get(str(b.rank), 0) for b in report.batches)
    result = report.result is not None and str(report.node) not in attempt.results
    return fresh or result or _later(report.phase, node.phase) or report.address not in (None, node.address)


def _later(new: AttemptPhase, old: AttemptPhase) -> bool:
    return _ORDER.index(new) > _ORDER.index(old)


def _node(session: Session, report: AgentReport) -> AttemptNode:
    """The launcher makes the row; an agent that reports before that makes it itself."""
    key = (report.job_id, report.epoch, report.node)
    node = session.get(AttemptNode, key, populate_existing=True)
    if node is None:
        node = AttemptNode(job_id=key[0], attempt=key[1], node=key[2], gpus=[], cpu_slots=[], acked={})
        node.phase = AttemptPhase.LAUNCHING
        session.add(node)
    return node


def _advance(attempt: Attempt, node: AttemptNode, report: AgentReport) -> AttemptResult | None:
    """Phases only go forward, and only the reconciler ends an attempt. Returns the result, where it is new."""
    if _later(report.phase, node.phase):
        node.phase = report.phase
    if report.address is not None:
        node.address = report.address
    if report.phase is not AttemptPhase.ENDED and _later(report.phase, attempt.phase):
        attempt.phase = report.phase
    attempt.last_step = max(attempt.last_step, min(report.last_step, MAX_NUMBER))
    if report.result is None or str(report.node) in attempt.results:
        return None
    attempt.results = attempt.results | {str(report.node): storable_json(cut(report.result).model_dump(mode="json"))}
    return report.result


def _tell_end(session: Session, attempt: Attempt, result: AttemptResult) -> None:
    facts = {"cause": result.cause.value, "rank": result.rank, "last_step": result.last_step}
    text = f"the agent ended: {result.cause.value}"
    add_event(session, attempt.job_id, "result", text, epoch=attempt.number, data=facts)


def _ack(session: Session, job: Job, attempt: Attempt, node: AttemptNode, shape: Shape) -> ReportAck:
    several = shape.nodes > 1
    peer = _peer_end(attempt, node.node) if several else None
    control = Control(
        desired=job.desired,
        cause=job.desired_cause,
        checkpoint_request=job.checkpoint_request,
        peer_end=None if peer is None else peer[1],
        peer_cause=Cause.HANG if peer is not None and peer[0] is Cause.HANG else None,
    )
    acked = {int(rank): seq for rank, seq in node.acked.items()}
    return ReportAck(acked=acked, control=control, group=_group(session, attempt) if several else None)


def _peer_end(attempt: Attempt, node: int) -> tuple[Cause, str] | None:
    """What another node's agent ended with, if it failed or was stopped before it had started any rank: this node's ranks can
    only wait for those."""
    for other, result in sorted(attempt.results.items()):
        cause = Cause(result["cause"])
        failed = cause.outcome in (Outcome.FAILED, Outcome.LOST)
        if int(other) != node and (failed or not result["ranks"]):
            return cause, f"node {other} has ended with {cause}: {result['message'] or 'no message'}"
    return None


def _group(session: Session, attempt: Attempt) -> Group:
    """Which nodes have told where they are. Ranks start once all have, so nobody waits for an address that comes late."""
    query = sa.select(AttemptNode.node, AttemptNode.address).where(
        AttemptNode.job_id == attempt.job_id, AttemptNode.attempt == attempt.number, AttemptNode.address.is_not(None)
    )
    addresses = {node: address for node, address in session.execute(query.order_by(AttemptNode.node))}  # noqa: C416
    return Group(present=list(addresses), rendezvous=addresses.get(0))
