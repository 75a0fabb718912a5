"""The end of an attempt, once nothing of it is alive: what it left on the disk is taken in, then the job's future is decided.

All facts are gathered before the one transaction that ends the attempt's row, moves the job and gives the lease back. A
crash anywhere before it, and the next reconciler gathers them again and comes to the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.counter import finished_step
from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import Manifest
from ratchet_contract.messages import AttemptResult
from ratchet_contract.outcome import EndSeen, combine
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import AttemptPhase, Cause, Desired, Outcome
from ratchet_contract.resume import Base, Segment
from ratchet_service import old_logs, shown
from ratchet_service.ancestry import bases_of, committed_of, fork_of, within
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.decide import decide
from ratchet_service.decision import AttemptEnd, Decision, Limits
from ratchet_service.decision_rows import view_of
from ratchet_service.found_attempt import FOUND
from ratchet_service.ingest_effects import UNMANAGED, tell_left_out
from ratchet_service.launchers.base import AttemptState
from ratchet_service.leases import NO_LEASE, Lease, hold
from ratchet_service.lineage import lineage
from ratchet_service.models import Attempt, AttemptNode, Checkpoint, Job
from ratchet_service.storable import when
from ratchet_service.tidying import tidy
from ratchet_service.transitions import add_event, apply
from ratchet_store.lineage import adoptable

LOG_TAIL: Final = 600


@dataclass(frozen=True)
class Evidence:
    """The launcher's last look, and what the reconciler knows besides. ``forced`` is the cause it killed or stopped the attempt
    for; ``killed``: agents that had their time after the first one's result were ended by force; ``logs`` the end of what was
    printed by agents that never began."""

    state: AttemptState
    forced: Cause | None = None
    message: str | None = None
    killed: bool = False
    logs: str = ""


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
    base = _base(paths)
    found = _lost_reports(database, job_paths, lease, base)
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
        tidy(session, job, job_paths, _lineage(session, job, lease.epoch, base)[0], lease.epoch)
        tell_left_out(session, attempt, bounds)
        old_logs.tell(session, job, lease.epoch, shortened)
        facts = _facts(session, job, attempt, evidence, paths)
        return _end(session, job, attempt, limits, _cause(job, evidence), facts, evidence.state.results)


def _lost_reports(database: Database, job_paths: JobPaths, lease: Lease, base: Base | None) -> list[Manifest]:
    """Valid checkpoints of the lineage whose report never came: committed on disk in the last moment before a kill."""
    with database.read() as session:
        job = session.get_one(Job, lease.job_id)
        segments, root = _lineage(session, job, lease.epoch, base)
        query = sa.select(Checkpoint.step, Checkpoint.epoch).where(Checkpoint.job_id == job.id)
        known = {(step, epoch) for step, epoch in session.execute(query)}
    try:
        return adoptable(job_paths.checkpoints, segments, known, expected_job_id=lease.job_id, root=root)
    except CheckpointError:
        return []  # unreadable or of a newer version: the next attempt meets it, and says so with all its context


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


def _cause(job: Job, evidence: Evidence) -> EndSeen:
    """The agents' own results are the truth, and the engine's word where they are silent; except for what only the service
    knows: why it sent the signal."""
    state = evidence.state
    engine = [EndSeen(end.cause, end.node, message=end.message) for end in state.ends]
    if evidence.forced is not None and len(state.results) < len(state.nodes):
        return EndSeen(evidence.forced, message=evidence.message)
    found = combine(state.results, len(state.nodes), engine, killed=evidence.killed)
    if found is not None:
        return found._replace(cause=_as_wished(found.cause, job, evidence))
    if not state.seen:
        said = f"the end of its log: {evidence.logs}" if evidence.logs else "its log is empty"
        return EndSeen(Cause.LAUNCHER_ERROR, message=evidence.message or f"the agent ended before it began; {said}")
    return EndSeen(Cause.UNKNOWN, message=evidence.message or "the agent was killed: it left no result.json")


def _as_wished(cause: Cause, job: Job, evidence: Evidence) -> Cause:
    if cause.outcome is not Outcome.PREEMPTED or evidence.forced is None:
        return cause
    if evidence.forced is Cause.TIMEOUT:
        return Cause.TIMEOUT
    return job.desired_cause if job.desired is not Desired.RUN and job.desired_cause is not None else cause


@dataclass(frozen=True)
class _Facts:
    """Where the attempt began, got to, and what is safe: the newest committed checkpoint that the next one can start from."""

    base: Base | None
    newest: Checkpoint | None
    last: int

    @property
    def start(self) -> int:
        return self.base.step if self.base is not None else 0

    @property
    def safe(self) -> int:
        return self.newest.step if self.newest is not None else self.start

    @property
    def lost(self) -> int:
        return max(0, self.last - self.safe) if self.base is not None else 0

    def own(self, epoch: int) -> int | None:
        """The newest step that the attempt itself committed."""
        return self.newest.step if self.newest is not None and self.newest.epoch == epoch else None


def _facts(session: Session, job: Job, attempt: Attempt, evidence: Evidence, paths: AttemptPaths) -> _Facts:
    if attempt.base_step is None:
        return _Facts(None, _newest(session, job, attempt.number, None), 0)
    base = Base(step=attempt.base_step, epoch=attempt.base_epoch, digest=attempt.base_digest)
    newest = _newest(session, job, attempt.number, base)
    reached = max(base.step, newest.step if newest is not None else 0)
    return _Facts(base, newest, max(attempt.last_step, reached, _last_step(evidence, paths)))


def _ended_at(attempt: Attempt, results: Sequence[AttemptResult], now: datetime) -> datetime:
    """When the last agent said it ended: a service that was away meanwhile must not count its own absence as running time."""
    said = max((when(result.ended_at, now) for result in results), default=now)
    return max(attempt.begun_at or attempt.created_at, min(said, now))


def _running_seconds(attempt: Attempt, ended_at: datetime) -> float:
    """Since its first agent began; what came before was a wait in the engine's queue."""
    return 0.0 if attempt.begun_at is None else (ended_at - attempt.begun_at).total_seconds()


def _end(
    session: Session,
    job: Job,
    attempt: Attempt,
    limits: Limits,
    cause: EndSeen,
    facts: _Facts,
    results: Sequence[AttemptResult],
) -> Decision:
    now, number = now_in(session), attempt.number
    ended_at = _ended_at(attempt, results, now)
    seconds = _running_seconds(attempt, ended_at)
    end = AttemptEnd(
        cause.cause,
        base_step=facts.start,
        committed_step=facts.own(number),
        begun=attempt.begun_at is not None,
        finished=facts.newest is not None and facts.newest.finished,
        unmanaged=(attempt.resume_report or {}).get("verdict") == UNMANAGED,
        seconds=seconds,
        message=cause.message,
        exit_code=cause.exit_code,
        last_step=facts.last,
    )
    decision = decide(replace(view_of(job, limits), attempt=end), now)
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
        values=_job_values(job, attempt, decision, facts, seconds),
    )
    return decision


def _took_the_wish(job: Job, attempt: Attempt, base: Base) -> bool:
    """One that was found on the disk may have begun before the checkpoint was asked for."""
    if job.resume_from is None or not attempt.launch.get(FOUND):
        return True
    return (base.step, base.epoch) == (job.resume_from["step"], job.resume_from["epoch"])


def _job_values(job: Job, attempt: Attempt, decision: Decision, facts: _Facts, seconds: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "preemptions": decision.counters.preemptions,
        "failures": decision.counters.failures,
        "no_progress": decision.counters.no_progress,
        "not_before": decision.not_before,
        "running_seconds": job.running_seconds + seconds,
        **NO_LEASE,
    }
    if facts.base is not None:  # it took the explicit wish, if there was one, and moved the job
        if _took_the_wish(job, attempt, facts.base):
            values["resume_from"] = None
        values["step"] = facts.last - facts.lost
        values["committed_step"] = facts.safe
        values["committed_epoch"] = facts.newest.epoch if facts.newest is not None else None
    return values


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
    return max([told, *(finished_step(p) for p in folder.glob("rank-*.bin"))]) if folder.is_dir() else told


def _base(paths: AttemptPaths) -> Base | None:
    try:
        return Base.model_validate_json(paths.base_file.read_bytes())
    except (OSError, ValidationError):
        return None
