"""Stores agent reports: fenced by attempt, each message exactly once by attempt, rank and sequence number. A result in a report
does not end the attempt: it is stored, and the reconciler decides."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session, defer

from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths, is_job_id
from ratchet_contract.phases import AttemptPhase, Cause, EventType
from ratchet_contract.protocol.messages import (
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
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.agent_reports import fast_rows
from ratchet_service.agent_reports.checkpoint_effects import hook_iterations, reported_iterations
from ratchet_service.agent_reports.deduplicate import (
    AcknowledgedReports,
    changes_only_figures,
    has_news,
    is_later_phase,
)
from ratchet_service.agent_reports.fast_rows import AttemptRow, JobRow, NodeRow, Rows, Shape
from ratchet_service.agent_reports.fencing import count_stale_requests, raise_if_stale
from ratchet_service.agent_reports.message_effects import Effects
from ratchet_service.agent_reports.metric_series import is_count_due
from ratchet_service.agent_reports.rank_times import add_straggler_events, store_times
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.db.api_tokens import hash_token
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, AttemptNode, Job
from ratchet_service.db.sanitize import sanitize_json
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.db.types import MAX_NUMBER
from ratchet_service.launchers.attempt_files import cut

DEFERRED_JOB_COLUMNS: Final = (defer(Job.spec), defer(Job.resolved), defer(Job.warnings), defer(Job.fork_source))
"""Columns that few reports need and that make up most of the row."""
DEFERRED_ATTEMPT_COLUMNS: Final = (defer(Attempt.launch), defer(Attempt.resume_report))


def check_protocol(report: Any) -> None:
    """Raise ``Refused`` (``protocol-mismatch``) if a report states another protocol version. ``report``: the decoded body, not
    validated yet."""
    protocol = report.get("protocol") if isinstance(report, dict) else None
    if isinstance(protocol, int) and protocol != PROTOCOL_VERSION:
        raise Refused(
            f"this service uses protocol {PROTOCOL_VERSION}, the agent {protocol}: the attempt is stopped with a checkpoint, "
            "and the next attempt uses this version; install the same version of Ratchet everywhere",
            code="protocol-mismatch",
        )


def ingest(
    database: Database,
    report: AgentReport,
    token: str | None,
    homes: HomePaths,
    bounds: Bounds = DEFAULT_BOUNDS,
    acknowledged: AcknowledgedReports | None = None,
) -> ReportAck:
    """Store what is new in a report, and return the answer. Raises ``Stale`` for an attempt that is over, ``Refused`` and
    ``NotFound``."""
    with count_stale_requests(database, report.job_id, report.attempt, "a report"):
        ack = _ingest(database, report, token, homes, bounds, acknowledged)
    if acknowledged is not None:
        acknowledged.record(report, ack.acked)
    return ack


def _ingest(
    database: Database,
    report: AgentReport,
    token: str | None,
    homes: HomePaths,
    bounds: Bounds,
    acknowledged: AcknowledgedReports | None,
) -> ReportAck:
    """Like ``ingest``, without counting stale reports and without updating ``acknowledged``."""
    iterations, unknown = reported_iterations(report.batches)
    if unknown or acknowledged is None or not acknowledged.is_behind(report):
        with database.read() as session:
            rows = _read_report_rows(session, report, token)
            raise_if_stale(rows.job, rows.attempt)
            if rows.node is not None and not has_news(report, rows.attempt, rows.node):
                return _ack(session, rows.job, rows.attempt, rows.node, rows.shape)
        iterations = hook_iterations(report.batches, homes.job(report.job_id))
    with database.write() as session:
        held = _read_report_rows(session, report, token, lock=True)
        raise_if_stale(held.job, held.attempt)
        if held.node is None or not changes_only_figures(report, held.attempt, held.node):
            return _ingest_full(session, report, iterations, bounds, held.shape)
        # These rows have all the columns that figures change, under the same names.
        job, attempt, node = cast("Job", held.job), cast("Attempt", held.attempt), cast("AttemptNode", held.node)
        with fast_rows.write_changes(session, held):
            attempt.last_step = max(attempt.last_step, min(report.last_step, MAX_NUMBER))
            ingest_batches(session, job, attempt, node, report.batches, iterations, bounds, held.shape)
        return _ack(session, job, attempt, node, held.shape)


def _ingest_full(
    session: Session, report: AgentReport, iterations: dict[tuple[int, int], int], bounds: Bounds, shape: Shape
) -> ReportAck:
    """Store a report that may change any column, with the ORM classes. The caller has locked the job's row."""
    job = lock_job(session, report.job_id, DEFERRED_JOB_COLUMNS)
    attempt = session.get_one(Attempt, (report.job_id, report.attempt), options=DEFERRED_ATTEMPT_COLUMNS)
    node = _get_or_create_node(session, report)
    ended = _advance(attempt, node, report)
    ingest_batches(session, job, attempt, node, report.batches, iterations, bounds, shape)
    if ended is not None:
        _add_result_event(session, attempt, ended)  # after the events of what it reported before
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
    """Apply the messages that follow the stored ones, and return their number. The caller has locked the job's row. Raises
    ``Refused`` for a wrong rank; the caller must then roll back."""
    acked = dict(node.acked)
    shape = shape or fast_rows.read_shape(session, job.id)
    effects = Effects(session, job, attempt, hook_iterations or {}, bounds, shape)
    world, reports_uploads = shape.nodes * shape.ranks_per_node, node.node == 0 and shape.uploads_checkpoints
    stored, to_count = 0, set[int]()
    for batch in sorted(batches, key=lambda batch: batch.rank < 0):  # agents' messages refer to earlier ones of ranks
        of_agent = batch.rank == node_rank(node.node) or (batch.rank == AGENT_RANK and reports_uploads)
        if not (0 <= batch.rank < world or of_agent):
            raise Refused(f"there is no rank {batch.rank} in a group of {world}", code="invalid-report")
        done = acked.get(str(batch.rank), 0)
        fresh = unstored_messages(batch, done)
        effects.prefetch(fresh)
        for message in fresh:
            effects.apply(batch.rank, message)
        store_times(node, batch.rank, fresh)
        if fresh:
            acked[str(batch.rank)] = done + len(fresh)
            stored += len(fresh)
            if is_count_due(done, done + len(fresh)):
                to_count.add(batch.rank)
    if stored:
        effects.finish(to_count)
        if node.node == 0 and world > 1:  # the reports of one node are often enough
            add_straggler_events(session, attempt, node, shape)
        node.acked = acked
        node.reported_at = now_in(session)
    return stored


def unstored_messages(batch: RankBatch, last_stored: int) -> list[RankMessage]:
    """Return the batch's messages after ``last_stored``. If messages between ``last_stored`` and the batch are missing, return
    none: the agent will send all of them again."""
    return [] if batch.from_seq > last_stored + 1 else batch.messages[last_stored + 1 - batch.from_seq :]


def read_authorised_rows(session: Session, job_id: str, attempt: int, token: str | None) -> Rows:
    """Return the rows of the attempt, its job and its node 0. Raises ``Refused`` for a missing or wrong token,
    and ``NotFound``."""
    return _read_authorised_rows(fast_rows.read_rows, session, (job_id, attempt, 0), token)


def _read_report_rows(session: Session, report: AgentReport, token: str | None, *, lock: bool = False) -> Rows:
    """Return the rows that the report refers to. Raises as ``read_authorised_rows``, and ``Refused`` for an unknown node."""
    node = report.node if 0 <= report.node <= MAX_NUMBER else -1
    read = fast_rows.lock_rows if lock else fast_rows.read_rows
    found = _read_authorised_rows(read, session, (report.job_id, report.attempt, node), token)
    if not 0 <= node < found.shape.nodes:
        raise Refused(f"there is no node {report.node} in this job", code="invalid-report")
    return found


def _read_authorised_rows(
    read: Callable[[Session, str, int, int], Rows | None],
    session: Session,
    key: tuple[str, int, int],
    token: str | None,
) -> Rows:
    """Read the rows with ``read``, and check the token. ``key``: job id, attempt, node. Raises like ``read_authorised_rows``."""
    job_id, attempt, _ = key
    if not token:
        raise Refused("agents authenticate with the attempt's token: Authorization: Bearer ...", code="token-missing")
    if not is_job_id(job_id) or not 0 < attempt <= MAX_NUMBER:
        raise _attempt_not_found(job_id, attempt)
    found = read(session, *key)
    if found is None:
        raise _attempt_not_found(job_id, attempt)
    if not hmac.compare_digest(hash_token(token), found.attempt.report_token_hash):
        raise Refused("the token does not belong to this attempt", code="token-wrong")
    return found


def _attempt_not_found(job_id: str, attempt: int) -> NotFound:
    """Return the error for an attempt that does not exist."""
    return NotFound(f"job {job_id} has no attempt {attempt}", code="attempt-not-found")


def _get_or_create_node(session: Session, report: AgentReport) -> AttemptNode:
    """Return the row of the report's node, created if it is missing."""
    key = (report.job_id, report.attempt, report.node)
    node = session.get(AttemptNode, key, populate_existing=True)
    if node is None:
        node = AttemptNode(job_id=key[0], attempt=key[1], node=key[2], gpus=[], cpu_slots=[], acked={})
        node.phase = AttemptPhase.LAUNCHING
        session.add(node)
    return node


def _advance(attempt: Attempt, node: AttemptNode, report: AgentReport) -> AttemptResult | None:
    """Store the report's address, last step, result and, if it is later, phase; the attempt itself never becomes ended. Return
    the result if it was not stored before, otherwise None."""
    if is_later_phase(report.phase, node.phase):
        node.phase = report.phase
    if report.address is not None:
        node.address = report.address
    # the reconciler ends the attempt
    if report.phase is not AttemptPhase.ENDED and is_later_phase(report.phase, attempt.phase):
        attempt.phase = report.phase
    attempt.last_step = max(attempt.last_step, min(report.last_step, MAX_NUMBER))
    if report.result is None or str(report.node) in attempt.results:
        return None
    attempt.results = attempt.results | {str(report.node): sanitize_json(cut(report.result).model_dump(mode="json"))}
    return report.result


def _add_result_event(session: Session, attempt: Attempt, result: AttemptResult) -> None:
    """Add the event for a node's result."""
    facts = {"cause": result.cause.value, "rank": result.rank, "last_step": result.last_step}
    text = f"the agent ended: {result.cause.value}"
    add_event(session, attempt.job_id, EventType.RESULT, text, attempt=attempt.number, data=facts)


def _ack(
    session: Session, job: Job | JobRow, attempt: Attempt | AttemptRow, node: AttemptNode | NodeRow, shape: Shape
) -> ReportAck:
    """Return the answer to a report: acknowledged sequence numbers and requests such as the desired state. For an attempt on
    several nodes, the answer also says which nodes have an address, and how another node has ended."""
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
    """Return cause and description of the end of another node, for which this node's ranks would wait in vain. That is a node
    that failed, or whose result has no ranks. None if there is no such node."""
    for other, result in sorted(attempt.results.items()):
        cause = Cause(result["cause"])
        if int(other) != node and (cause.is_failure or not result["ranks"]):
            return cause, f"node {other} has ended with {cause}: {result['message'] or 'no message'}"
    return None


def _group(session: Session, attempt: Attempt | AttemptRow) -> Group:
    """Return which nodes have reported their address, and the address of node 0, if known."""
    query = sa.select(AttemptNode.node, AttemptNode.address).where(
        AttemptNode.job_id == attempt.job_id, AttemptNode.attempt == attempt.number, AttemptNode.address.is_not(None)
    )
    addresses = {node: address for node, address in session.execute(query.order_by(AttemptNode.node))}  # noqa: C416
    return Group(present=list(addresses), rendezvous=addresses.get(0))
