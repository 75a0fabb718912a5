"""Reports of agents: fenced by epoch, stored exactly once by (attempt, rank, sequence number).

``ingest`` is the door for agents; ``ingest_batches`` is used by the reconciler as well, for what an agent that died left in
its spools. A result that a report brings ends nothing by itself: it is kept on the attempt for the reconciler, which decides.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session, defer

from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.messages import (
    AGENT_RANK,
    AgentReport,
    AttemptResult,
    Control,
    Group,
    RankBatch,
    RankMessage,
    ReportAck,
    node_rank,
)
from ratchet_contract.paths import HomePaths, is_job_id
from ratchet_contract.phases import AttemptPhase, Cause, Outcome
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service import ingest_rows
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.clock import now_in
from ratchet_service.columns import MAX_NUMBER
from ratchet_service.database import Database
from ratchet_service.fencing import fence, refusals
from ratchet_service.ingest_checkpoints import hook_iterations, told_iterations
from ratchet_service.ingest_effects import Effects
from ratchet_service.ingest_news import Told, figures_alone, has_news, later
from ratchet_service.ingest_rows import AttemptRow, JobRow, NodeRow, Rows, Shape
from ratchet_service.ingest_series import look_is_due
from ratchet_service.launchers.results import cut
from ratchet_service.models import Attempt, AttemptNode, Job
from ratchet_service.storable import storable_json
from ratchet_service.transitions import add_event, lock_job

UNREAD: Final = (defer(Job.spec), defer(Job.resolved), defer(Job.warnings), defer(Job.fork_source))
"""Columns that a report has no use for, and that are most of the row."""
UNREAD_OF_ATTEMPT: Final = (defer(Attempt.launch), defer(Attempt.resume_report))


def hash_token(token: str) -> str:
    """What is stored of a report token."""
    return hashlib.sha256(token.encode()).hexdigest()


def insist_on_protocol(report: Any) -> None:
    """``report``: a body, not looked at yet. Raises ``Refused`` (``protocol-mismatch``). The agent goes on training: its attempt
    is asked by a signal to end (``decide``)."""
    protocol = report.get("protocol") if isinstance(report, dict) else None
    if isinstance(protocol, int) and protocol != PROTOCOL_VERSION:
        raise Refused(
            f"this service speaks protocol {PROTOCOL_VERSION}, the agent {protocol}: its attempt is stopped with a checkpoint, "
            "and the next one is of this version; install the same version of Ratchet everywhere",
            code="protocol-mismatch",
        )


def ingest(
    database: Database,
    report: AgentReport,
    token: str | None,
    homes: HomePaths,
    bounds: Bounds = DEFAULT_BOUNDS,
    told: Told | None = None,
) -> ReportAck:
    """Store what is new of a report and answer what is stored and wanted. An empty report only reads. ``told``: what answers
    before this one have told; with it, a look is saved where they show that there is news.

    Raises ``Refused`` (``token-missing``, ``token-wrong``), ``NotFound``, and ``Stale`` (409 ``stale-epoch``) for an attempt that
    is not the newest one or has ended.
    """
    with refusals(database, report.job_id, report.epoch, "a report"):
        ack = _ingest(database, report, token, homes, bounds, told)
    if told is not None:
        told.keep(report, ack.acked)
    return ack


def _ingest(
    database: Database, report: AgentReport, token: str | None, homes: HomePaths, bounds: Bounds, told: Told | None
) -> ReportAck:
    iterations, unknown = told_iterations(report.batches)
    if unknown or told is None or not told.less_than(report):
        with database.read() as session:
            rows = _seen(session, report, token)
            fence(rows.job, rows.attempt)
            if rows.node is not None and not has_news(report, rows.attempt, rows.node):
                return _ack(session, rows.job, rows.attempt, rows.node, rows.shape)
        iterations = hook_iterations(report.batches, homes.job(report.job_id))
    with database.write() as session:
        held = _seen(session, report, token, hold=True)
        fence(held.job, held.attempt)
        if held.node is None or not figures_alone(report, held.attempt, held.node):
            return _whole(session, report, iterations, bounds, held.shape)
        # These rows have all the columns that figures touch, by the same names.
        job, attempt, node = cast("Job", held.job), cast("Attempt", held.attempt), cast("AttemptNode", held.node)
        with ingest_rows.written(session, held):
            attempt.last_step = max(attempt.last_step, min(report.last_step, MAX_NUMBER))
            ingest_batches(session, job, attempt, node, report.batches, iterations, bounds, held.shape)
        return _ack(session, job, attempt, node, held.shape)


def _whole(
    session: Session, report: AgentReport, iterations: dict[tuple[int, int], int], bounds: Bounds, shape: Shape
) -> ReportAck:
    """A report that may change anything. The job's row is held."""
    job = lock_job(session, report.job_id, UNREAD)
    attempt = session.get_one(Attempt, (report.job_id, report.epoch), options=UNREAD_OF_ATTEMPT)
    node = _node(session, report)
    ended = _advance(attempt, node, report)
    ingest_batches(session, job, attempt, node, report.batches, iterations, bounds, shape)
    if ended is not None:
        _tell_end(session, attempt, ended)  # behind what it has told before
    session.flush()
    return _ack(session, job, attempt, node, shape)


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
    shape = shape or ingest_rows.shape_of(session, job.id)
    effects = Effects(session, job, attempt, hook_iterations or {}, bounds, shape.best)
    world, agent_speaks = shape.nodes * shape.ranks_per_node, node.node == 0 and shape.copies
    stored, to_count = 0, set[int]()
    for batch in sorted(batches, key=lambda batch: batch.rank < 0):  # agents speak of what ranks have said
        of_agent = batch.rank == node_rank(node.node) or (batch.rank == AGENT_RANK and agent_speaks)
        if not (0 <= batch.rank < world or of_agent):
            raise Refused(f"there is no rank {batch.rank} in a group of {world}", code="invalid-report")
        done = acked.get(str(batch.rank), 0)
        fresh = unstored(batch, done)
        effects.foresee(fresh)
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


def authorised(session: Session, job_id: str, epoch: int, token: str | None) -> Rows:
    """The attempt whose token this is, its job, and its first node. Raises ``Refused`` (``token-missing``, ``token-wrong``),
    ``NotFound``."""
    return _authorised(ingest_rows.seen, session, (job_id, epoch, 0), token)


def _seen(session: Session, report: AgentReport, token: str | None, *, hold: bool = False) -> Rows:
    """What a report is judged by; ``hold``: with the job's row held. Raises like ``authorised``, and ``Refused``
    (``invalid-report``) for a node that the job does not have."""
    node = report.node if 0 <= report.node <= MAX_NUMBER else -1
    read = ingest_rows.hold if hold else ingest_rows.seen
    found = _authorised(read, session, (report.job_id, report.epoch, node), token)
    if not 0 <= node < found.shape.nodes:
        raise Refused(f"there is no node {report.node} in this job", code="invalid-report")
    return found


def _authorised(
    read: Callable[[Session, str, int, int], Rows | None],
    session: Session,
    key: tuple[str, int, int],
    token: str | None,
) -> Rows:
    job_id, epoch, _ = key
    if not token:
        raise Refused("agents give the attempt's token: Authorization: Bearer ...", code="token-missing")
    if not is_job_id(job_id) or not 0 < epoch <= MAX_NUMBER:
        raise _no_attempt(job_id, epoch)
    found = read(session, *key)
    if found is None:
        raise _no_attempt(job_id, epoch)
    if not hmac.compare_digest(hash_token(token), found.attempt.report_token_hash):
        raise Refused("this is not the token of that attempt", code="token-wrong")
    return found


def _no_attempt(job_id: str, epoch: int) -> NotFound:
    return NotFound(f"job {job_id} has no attempt {epoch}", code="attempt-not-found")


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
    if later(report.phase, node.phase):
        node.phase = report.phase
    if report.address is not None:
        node.address = report.address
    if report.phase is not AttemptPhase.ENDED and later(report.phase, attempt.phase):
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


def _ack(
    session: Session, job: Job | JobRow, attempt: Attempt | AttemptRow, node: AttemptNode | NodeRow, shape: Shape
) -> ReportAck:
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


def _peer_end(attempt: Attempt | AttemptRow, node: int) -> tuple[Cause, str] | None:
    """What another node's agent ended with, if it failed or was stopped before it had started any rank: this node's ranks can
    only wait for those."""
    for other, result in sorted(attempt.results.items()):
        cause = Cause(result["cause"])
        failed = cause.outcome in (Outcome.FAILED, Outcome.LOST)
        if int(other) != node and (failed or not result["ranks"]):
            return cause, f"node {other} has ended with {cause}: {result['message'] or 'no message'}"
    return None


def _group(session: Session, attempt: Attempt | AttemptRow) -> Group:
    """Which nodes have told where they are. Ranks start once all have, so nobody waits for an address that comes late."""
    query = sa.select(AttemptNode.node, AttemptNode.address).where(
        AttemptNode.job_id == attempt.job_id, AttemptNode.attempt == attempt.number, AttemptNode.address.is_not(None)
    )
    addresses = {node: address for node, address in session.execute(query.order_by(AttemptNode.node))}  # noqa: C416
    return Group(present=list(addresses), rendezvous=addresses.get(0))
