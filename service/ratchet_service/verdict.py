"""How an attempt ended, from what is known of it, and what that makes of its job's row: pure. ``ending`` gathers and writes.

Nothing here reads a clock, a disk or a database: rows are looked at by their attributes alone, so that a simulation may ask
with rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from ratchet_contract.messages import AttemptResult
from ratchet_contract.outcome import EndSeen, combine
from ratchet_contract.phases import Cause, Desired, Outcome
from ratchet_contract.resume import Base
from ratchet_service import unmanaged
from ratchet_service.decide import decide
from ratchet_service.decision import AttemptEnd, Decision, Limits
from ratchet_service.decision_rows import view_of
from ratchet_service.found_attempt import FOUND
from ratchet_service.leases import NO_LEASE
from ratchet_service.models import Attempt, Checkpoint, Job
from ratchet_service.repeated_error import repeated
from ratchet_service.steady import TOLERANCE
from ratchet_service.storable import when
from ratchet_service.watched import Evidence


@dataclass(frozen=True)
class Facts:
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


class Verdict(NamedTuple):
    """``ended_at``: when the attempt did; ``seconds``: how long it ran."""

    decision: Decision
    ended_at: datetime
    seconds: float


def cause_of(job: Job, evidence: Evidence) -> EndSeen:
    """The agents' own results are the truth, and the engine's word where they are silent; except for what only the service
    knows: why it sent the signal."""
    state = evidence.state
    engine = [EndSeen(end.cause, end.node, message=end.message) for end in state.ends]
    told = [result for result in state.results if result.cause is not Cause.LEASE_LOST]  # of the fence of a kill
    if evidence.forced is not None and len(told) < len(state.nodes):
        return EndSeen(evidence.forced, message=evidence.message)
    found = combine(state.results, len(state.nodes), engine, killed=evidence.killed)
    if found is not None:
        return found._replace(cause=_as_wished(found.cause, job, evidence))
    if not state.seen:
        said = f"the end of its log: {evidence.logs}" if evidence.logs else "its log is empty"
        return EndSeen(Cause.LAUNCHER_ERROR, message=evidence.message or f"the agent ended before it began; {said}")
    return EndSeen(Cause.UNKNOWN, message=evidence.message or "the agent was killed: it left no result.json")


def _as_wished(cause: Cause, job: Job, evidence: Evidence) -> Cause:
    if evidence.forced is Cause.UPGRADE and cause is Cause.UNKNOWN:  # a result in words of another version
        cause = Cause.UPGRADE
    if cause.outcome is not Outcome.PREEMPTED or evidence.forced is None:
        return cause
    if evidence.forced is Cause.TIMEOUT:
        return Cause.TIMEOUT
    if evidence.forced is Cause.UPGRADE:
        cause = Cause.UPGRADE
    return job.desired_cause if job.desired is not Desired.RUN and job.desired_cause is not None else cause


def facts_of(attempt: Attempt, newest: Checkpoint | None, told: int) -> Facts:
    """``newest``: the newest committed checkpoint of its lineage; ``told``: the last step that its ranks finished."""
    if attempt.base_step is None:
        return Facts(None, newest, 0)
    base = Base(step=attempt.base_step, epoch=attempt.base_epoch, digest=attempt.base_digest)
    reached = max(base.step, newest.step if newest is not None else 0)
    return Facts(base, newest, max(attempt.last_step, reached, told))


def verdict(
    job: Job,
    attempt: Attempt,
    limits: Limits,
    cause: EndSeen,
    facts: Facts,
    evidence: Evidence,
    now: datetime,
    before: Attempt | None = None,
) -> Verdict:
    """What becomes of the job, now that nothing of its attempt is alive. ``before``: the attempt before it, which has ended."""
    ended_at = _ended_at(attempt, evidence.state.results, now)
    seconds = _running_seconds(attempt, ended_at, evidence.ran, now)
    end = AttemptEnd(
        cause.cause,
        base_step=facts.start,
        committed_step=facts.own(attempt.number),
        begun=attempt.begun_at is not None,
        finished=facts.newest is not None and facts.newest.finished,
        unmanaged=unmanaged.reported(attempt.resume_report),
        seconds=seconds,
        message=cause.message,
        exit_code=cause.exit_code,
        last_step=facts.last,
        repeated_error=repeated(cause, evidence.state.results, before),
    )
    return Verdict(decide(replace(view_of(job, limits), attempt=end), now), ended_at, seconds)


def _ended_at(attempt: Attempt, results: Sequence[AttemptResult], now: datetime) -> datetime:
    """When the last agent said it ended: a service that was away meanwhile must not count its own absence as running time."""
    said = max((when(result.ended_at, now) for result in results), default=now)
    return max(attempt.begun_at or attempt.created_at, min(said, now))


def _running_seconds(attempt: Attempt, ended_at: datetime, ran: float | None, now: datetime) -> float:
    """Since its first agent began; what came before was a wait in the engine's queue. Both are wall-clock times, between which
    the clock may have been set: then what was counted (``ran``, until now) is believed."""
    if attempt.begun_at is None:
        return 0.0
    told = (ended_at - attempt.begun_at).total_seconds()
    if ran is None:
        return told
    counted = max(0.0, ran - max(0.0, (now - ended_at).total_seconds()))
    return told if abs(told - counted) <= TOLERANCE else counted


def job_values(job: Job, attempt: Attempt, decision: Decision, facts: Facts, seconds: float) -> dict[str, Any]:
    """Columns of the job's row after the end, beside its phase and wish."""
    values: dict[str, Any] = {
        "preemptions": decision.counters.preemptions,
        "failures": decision.counters.failures,
        "no_progress": decision.counters.no_progress,
        "retries": decision.counters.retries,
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


def _took_the_wish(job: Job, attempt: Attempt, base: Base) -> bool:
    """One that was found on the disk may have begun before the checkpoint was asked for."""
    if job.resume_from is None or not attempt.launch.get(FOUND):
        return True
    return (base.step, base.epoch) == (job.resume_from["step"], job.resume_from["epoch"])
