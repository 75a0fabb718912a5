"""Ends an attempt once no process of it is alive. First the disk is read, remains of saves and old spools are deleted, and logs
are shortened; then one transaction ends the attempt and releases the lease. After a crash before that, the next reconciler
starts again."""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import AttemptPhase, EventType
from ratchet_contract.protocol.attempt_cause import EndSeen
from ratchet_contract.protocol.counter_layout import finished_step
from ratchet_contract.protocol.lineage import lineage
from ratchet_service.agent_reports.message_effects import add_left_out_event
from ratchet_service.checkpoints import cleanup
from ratchet_service.checkpoints.lineage import bases_of, committed_of, filter_lineage, fork_of
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database
from ratchet_service.db.leases import Lease, lock_leased_job
from ratchet_service.db.models import Attempt, AttemptNode, Checkpoint, Job
from ratchet_service.db.sanitize import parse_time
from ratchet_service.db.transitions import add_event, apply
from ratchet_service.isolation.file_access import as_owner, names_in, open_read
from ratchet_service.job_files import trim_logs
from ratchet_service.lifecycle.attempt_result import Evidence, Facts, cause_of, facts_of, job_values, verdict
from ratchet_service.lifecycle.bad_nodes import blamed_node
from ratchet_service.lifecycle.decision import Decision, Limits
from ratchet_service.reconciler import attempt_facts
from ratchet_store.read.find_base import find_adoptable

LOG_TAIL: Final = 600
_MAX_BASE_BYTES: Final = 64 << 10  # bytes; it has three values
_MAX_COUNTERS: Final = 4096
_COUNTER: Final = re.compile(r"rank-\d{5,6}\.bin", re.ASCII)


def finalise_attempt(
    database: Database,
    job_paths: JobPaths,
    lease: Lease,
    limits: Limits,
    evidence: Evidence,
    bounds: Bounds = DEFAULT_BOUNDS,
) -> Decision:
    """End attempt ``lease.attempt``, whose spools are ingested, and move its job to the next phase; return the decision. Before
    that, remains of saves and old spools are deleted and logs shortened. Raise ``LeaseLost``."""
    paths = job_paths.attempt(lease.attempt)
    base, last = _read_base(paths), _last_step(evidence, paths)
    segments, found = _unreported_checkpoints(database, job_paths, lease, base)
    on_disk = cleanup.scan_disk(job_paths, segments, lease.attempt)
    shortened = trim_logs.shorten(job_paths, lease.attempt, bounds)
    trim_logs.drop_spools(job_paths, lease.attempt, bounds)
    with database.write() as session:
        job = lock_leased_job(session, lease)
        attempt = session.get_one(Attempt, (job.id, lease.attempt))
        if attempt.base_step is None and base is not None:
            attempt.base_step, attempt.base_attempt, attempt.base_digest = base.step, base.attempt, base.digest
            session.flush()
        for manifest in found:
            _adopt_checkpoint(session, job, manifest)
        cleanup.mark_surplus(session, job, job_paths, segments, on_disk, lease.attempt)
        add_left_out_event(session, attempt, bounds)
        trim_logs.record_event(session, job, lease.attempt, shortened)
        began = (
            None
            if attempt.base_step is None
            else Base(step=attempt.base_step, attempt=attempt.base_attempt, digest=attempt.base_digest)
        )
        facts = facts_of(attempt, _newest_checkpoint(session, job, attempt.number, began), last)
        return _end_attempt(session, job, attempt, limits, cause_of(job, evidence), facts, evidence)


def _unreported_checkpoints(
    database: Database, job_paths: JobPaths, lease: Lease, base: Base | None
) -> tuple[list[Segment], list[Manifest]]:
    """Return the attempt's lineage, and the manifests of valid checkpoints on the disk whose report was lost; no
    manifests if one cannot be read."""
    with database.read() as session:
        job = session.get_one(Job, lease.job_id)
        segments, root = _lineage(session, job, lease.attempt, base)
        query = sa.select(Checkpoint.step, Checkpoint.attempt).where(Checkpoint.job_id == job.id)
        known = {(step, attempt) for step, attempt in session.execute(query)}
    try:
        with as_owner(job_paths.root):
            found = find_adoptable(job_paths.checkpoints, segments, known, expected_job_id=lease.job_id, root=root)
    except CheckpointError:
        found = []  # unreadable or of a newer version: the next attempt finds it, and reports it with its context
    return segments, found


def _lineage(session: Session, job: Job, attempt: int, base: Base | None) -> tuple[list[Segment], Base | None]:
    """Return the segments of the job's lineage up to the attempt, and the checkpoint from which the last one began, if any.
    ``base``: used if the attempt's row has none."""
    bases = bases_of(session, job.id)
    if base is not None:
        bases.setdefault(attempt, base)
    resume_from = None
    # the attempt never began to train: its lineage is the one that it was to continue
    if job.resume_from is not None and attempt not in bases:
        resume_from = Base(step=job.resume_from["step"], attempt=job.resume_from["attempt"])
    segments = lineage(bases, resume_from=resume_from, fork=fork_of(job))
    return segments, bases.get(segments[-1].attempt) if segments else None


def _adopt_checkpoint(session: Session, job: Job, manifest: Manifest) -> None:
    """Add the row and the event ``checkpoint-adopted`` of a valid checkpoint on the disk, if it has no row."""
    if session.get(Checkpoint, (job.id, manifest.step, manifest.attempt)) is not None:
        return
    now = now_in(session)
    session.add(
        Checkpoint(
            job_id=job.id,
            step=manifest.step,
            attempt=manifest.attempt,
            digest=manifest.digest,
            parent=manifest.parent.model_dump(mode="json"),
            size=manifest.size,
            files=len(manifest.files),
            reason=manifest.reason,
            finished=manifest.finished,
            adopted=True,
            verified_at=now,
            verification="ok",
            hook_iteration=max((s.iteration for s in manifest.hook_summaries), default=None),
            created_at=parse_time(manifest.created, now),
        )
    )
    text = f"checkpoint {manifest.id} was found valid on disk; its report was lost"
    data = {"checkpoint": manifest.id, "step": manifest.step}
    add_event(session, job.id, EventType.CHECKPOINT_ADOPTED, text, attempt=manifest.attempt, data=data)
    session.flush()


def _end_attempt(
    session: Session,
    job: Job,
    attempt: Attempt,
    limits: Limits,
    cause: EndSeen,
    facts: Facts,
    evidence: Evidence,
) -> Decision:
    """Write the attempt's end in this transaction, apply the decision to the job and return the decision."""
    number, results = attempt.number, evidence.state.results
    previous = session.get(Attempt, (job.id, number - 1))
    decision, ended_at, seconds = verdict(job, attempt, limits, cause, facts, evidence, now_in(session), previous)
    assert decision.event is not None and decision.cause is not None
    attempt.phase, attempt.outcome, attempt.cause = AttemptPhase.ENDED, decision.outcome, decision.cause
    attempt.rank, attempt.exit_code, attempt.message = cause.rank, cause.exit_code, cause.message
    attempt.node = blamed_node(cause.cause, cause.node, len(evidence.state.nodes))
    attempt.last_step, attempt.steps_lost, attempt.ended_at = facts.last_step, facts.lost_steps, ended_at
    attempt.stop_at, attempt.end_began_at = attempt_facts.stop_received_at(results), attempt_facts.end_began_at(results)
    pace = attempt_facts.pace_until(session, job.id, number, results)
    attempt.pace = None if pace is None else pace.model_dump(mode="json")
    if facts.own_committed_step(number) is not None:
        attempt.committed_step = facts.own_committed_step(number)
    nodes = sa.update(AttemptNode).where(AttemptNode.job_id == job.id, AttemptNode.attempt == number)
    session.execute(nodes.values(phase=AttemptPhase.ENDED).execution_options(synchronize_session=False))
    data = {
        "cause": decision.cause.value,
        "rank": cause.rank,
        "steps_lost": facts.lost_steps,
        "last_step": facts.last_step,
    }
    text = f"attempt {number} ended: {decision.cause.value}" + (f": {cause.message}" if cause.message else "")
    if decision.rule is not None:
        data["rule"], text = decision.rule, f"{text} ({decision.rule})"
    add_event(session, job.id, EventType.ATTEMPT_ENDED, text, attempt=number, data=data)
    session.flush()
    apply(
        session,
        job.id,
        decision.event,
        expected_attempt=number,
        reason=decision.reason,
        message=decision.message,
        values=job_values(job, attempt, decision, facts, seconds),
    )
    return decision


def _newest_checkpoint(session: Session, job: Job, attempt: int, base: Base | None) -> Checkpoint | None:
    """Return the row of the newest committed checkpoint of the job's lineage up to the attempt; None: there is none."""
    segments, _ = _lineage(session, job, attempt, base)
    return next(iter(filter_lineage(segments, committed_of(session, job.id))), None)


def _last_step(evidence: Evidence, paths: AttemptPaths) -> int:
    """Return the last step that a rank has finished, by the results and, if one is missing, the ranks' counter files; 0: none."""
    results = evidence.state.results
    reported = max((result.last_step for result in results), default=0)
    if len(results) == len(evidence.state.nodes):
        return reported
    # a result is missing: the counter files of the ranks remain
    folder = paths.counter(0).parent
    with as_owner(folder):
        counters = (folder / name for name in names_in(folder) if _COUNTER.fullmatch(name))
        return max([reported, *map(finished_step, islice(counters, _MAX_COUNTERS))])


def _read_base(paths: AttemptPaths) -> Base | None:
    """Return the checkpoint that the attempt started from, by its base file; None: that cannot be read."""
    try:
        with open_read(paths.base_file) as file:
            return Base.model_validate_json(file.read(_MAX_BASE_BYTES))
    except (OSError, ValidationError):
        return None
