"""The end of an attempt, once nothing of it is alive: what it left on the disk is taken in, then the job's future is decided.

All facts are gathered before the one transaction that ends the attempt's row, moves the job and gives the lease back. A
crash anywhere before it, and the next reconciler gathers them again and comes to the same end. What follows from them is
``verdict``'s to say.
"""

from __future__ import annotations

import re
from datetime import datetime
from itertools import islice
from typing import Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.counter import finished_step
from ratchet_contract.errors import CheckpointError
from ratchet_contract.lineage import lineage
from ratchet_contract.manifest import Manifest
from ratchet_contract.outcome import EndSeen
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import AttemptPhase
from ratchet_contract.resume import Base, Segment
from ratchet_service import old_logs, shown, tidying
from ratchet_service.ancestry import bases_of, committed_of, fork_of, within
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.decision import Decision, Limits
from ratchet_service.file_owner import as_owner, names_in, open_read
from ratchet_service.ingest_effects import tell_left_out
from ratchet_service.leases import Lease, hold
from ratchet_service.models import Attempt, AttemptNode, Checkpoint, Job
from ratchet_service.transitions import add_event, apply
from ratchet_service.verdict import Facts, cause_of, facts_of, job_values, verdict
from ratchet_service.watched import Evidence
from ratchet_store.lineage import adoptable

LOG_TAIL: Final = 600
_MOST_BASE: Final = 64 << 10  # bytes; it has three values
_MOST_COUNTERS: Final = 4096
_COUNTER: Final = re.compile(r"rank-\d{5,6}\.bin", re.ASCII)


def settle(
    database: Database,
    job_paths: JobPaths,
    lease: Lease,
    limits: Limits,
    evidence: Evidence,
    bounds: Bounds = DEFAULT_BOUNDS,
) -> Decision:
    """End attempt ``lease.epoch``. Its processes are gone and its spools are ingested. Raises ``LeaseLost``."""
    paths = job_paths.attempt(lease.epoch)
    base, last = _base(paths), _last_step(evidence, paths)
    segments, found = _lost_reports(database, job_paths, lease, base)
    on_disk = tidying.look(job_paths, segments, lease.epoch)
    shortened = old_logs.shorten(job_paths, lease.epoch, bounds)
    old_logs.drop_spools(job_paths, lease.epoch, bounds)
    with database.write() as session:
        job = hold(session, lease)
        attempt = session.get_one(Attempt, (job.id, lease.epoch))
        if attempt.base_step is None and base is not None:
            attempt.base_step, attempt.base_epoch, attempt.base_digest = base.step, base.epoch, base.digest
            session.flush()
        for manifest in found:
            _adopt(session, job, manifest)
        tidying.mark(session, job, job_paths, segments, on_disk, lease.epoch)
        tell_left_out(session, attempt, bounds)
        old_logs.tell(session, job, lease.epoch, shortened)
        began = (
            None
            if attempt.base_step is None
            else Base(step=attempt.base_step, epoch=attempt.base_epoch, digest=attempt.base_digest)
        )
        facts = facts_of(attempt, _newest(session, job, attempt.number, began), last)
        return _end(session, job, attempt, limits, cause_of(job, evidence), facts, evidence)


def _lost_reports(
    database: Database, job_paths: JobPaths, lease: Lease, base: Base | None
) -> tuple[list[Segment], list[Manifest]]:
    """The lineage, and valid checkpoints of it whose report never came: committed on disk in the last moment before a kill."""
    with database.read() as session:
        job = session.get_one(Job, lease.job_id)
        segments, root = _lineage(session, job, lease.epoch, base)
        query = sa.select(Checkpoint.step, Checkpoint.epoch).where(Checkpoint.job_id == job.id)
        known = {(step, epoch) for step, epoch in session.execute(query)}
    try:
        with as_owner(job_paths.root):
            found = adoptable(job_paths.checkpoints, segments, known, expected_job_id=lease.job_id, root=root)
    except CheckpointError:
        found = []  # unreadable or of a newer version: the next attempt meets it, and says so with all its context
    return segments, found


def _lineage(session: Session, job: Job, epoch: int, base: Base | None) -> tuple[list[Segment], Base | None]:
    """The lineage that ends in this attempt (or, without a base, where the job stood before it), and what it began from."""
    bases = bases_of(session, job.id)
    if base is not None:
        bases.setdefault(epoch, base)
    wish = None
    if job.resume_from is not None and epoch not in bases:
        wish = Base(step=job.resume_from["step"], epoch=job.resume_from["epoch"])
    segments = lineage(bases, resume_from=wish, fork=fork_of(job))
    return segments, bases.get(segments[-1].epoch) if segments else None


def _adopt(session: Session, job: Job, manifest: Manifest) -> None:
    if session.get(Checkpoint, (job.id, manifest.step, manifest.epoch)) is not None:
        return
    now = now_in(session)
    session.add(
        Checkpoint(
            job_id=job.id,
            step=manifest.step,
            epoch=manifest.epoch,
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
            created_at=datetime.fromisoformat(manifest.created),
        )
    )
    text = f"checkpoint {manifest.id} was found valid on disk; its report was lost"
    data = {"checkpoint": manifest.id, "step": manifest.step}
    add_event(session, job.id, "checkpoint-adopted", text, epoch=manifest.epoch, data=data)
    session.flush()


def _end(
    session: Session,
    job: Job,
    attempt: Attempt,
    limits: Limits,
    cause: EndSeen,
    facts: Facts,
    evidence: Evidence,
) -> Decision:
    number, results = attempt.number, evidence.state.results
    before = session.get(Attempt, (job.id, number - 1))
    decision, ended_at, seconds = verdict(job, attempt, limits, cause, facts, evidence, now_in(session), before)
    assert decision.event is not None and decision.cause is not None
    attempt.phase, attempt.outcome, attempt.cause = AttemptPhase.ENDED, decision.outcome, decision.cause
    attempt.rank, attempt.exit_code, attempt.message = cause.rank, cause.exit_code, cause.message
    attempt.last_step, attempt.steps_lost, attempt.ended_at = facts.last, facts.lost, ended_at
    attempt.stop_at, attempt.over_at = shown.stop_at(results), shown.over_at(results)
    pace = shown.pace_until(session, job.id, number, results)
    attempt.pace = None if pace is None else pace.model_dump(mode="json")
    if facts.own(number) is not None:
        attempt.committed_step = facts.own(number)
    nodes = sa.update(AttemptNode).where(AttemptNode.job_id == job.id, AttemptNode.attempt == number)
    session.execute(nodes.values(phase=AttemptPhase.ENDED).execution_options(synchronize_session=False))
    data = {"cause": decision.cause.value, "rank": cause.rank, "steps_lost": facts.lost, "last_step": facts.last}
    text = f"attempt {number} ended: {decision.cause.value}" + (f": {cause.message}" if cause.message else "")
    if decision.rule is not None:
        data["rule"], text = decision.rule, f"{text} ({decision.rule})"
    add_event(session, job.id, "attempt-ended", text, epoch=number, data=data)
    session.flush()
    apply(
        session,
        job.id,
        decision.event,
        expected_epoch=number,
        reason=decision.reason,
        message=decision.message,
        values=job_values(job, attempt, decision, facts, seconds),
    )
    return decision


def _newest(session: Session, job: Job, epoch: int, base: Base | None) -> Checkpoint | None:
    """The newest committed checkpoint of the lineage: what the next attempt starts from."""
    segments, _ = _lineage(session, job, epoch, base)
    return next(iter(within(segments, committed_of(session, job.id))), None)


def _last_step(evidence: Evidence, paths: AttemptPaths) -> int:
    """The last step that any rank finished: the result's, or where there is none the counters', which outlive the ranks."""
    results = evidence.state.results
    told = max((result.last_step for result in results), default=0)
    if len(results) == len(evidence.state.nodes):
        return told
    folder = paths.counter(0).parent
    with as_owner(folder):
        counters = (folder / name for name in names_in(folder) if _COUNTER.fullmatch(name))
        return max([told, *map(finished_step, islice(counters, _MOST_COUNTERS))])


def _base(paths: AttemptPaths) -> Base | None:
    try:
        with open_read(paths.base_file) as file:
            return Base.model_validate_json(file.read(_MOST_BASE))
    except (OSError, ValidationError):
        return None
