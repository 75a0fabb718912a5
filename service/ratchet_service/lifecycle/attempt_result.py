"""Determines how an attempt ended, and the column values of its job's row that follow. Pure; rows are only read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.phases import Cause, Desired, Outcome
from ratchet_contract.protocol.attempt_cause import EndSeen, combine_ends
from ratchet_contract.protocol.messages import AttemptResult
from ratchet_service.db.leases import NO_LEASE
from ratchet_service.db.models import RECOVERED_FROM_DISK, Attempt, Checkpoint, Job
from ratchet_service.db.sanitize import parse_time
from ratchet_service.launchers.base import AttemptState
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.lifecycle.decide import decide
from ratchet_service.lifecycle.decision import AttemptEnd, Decision, Limits, view_of
from ratchet_service.lifecycle.repeated_error import repeated_error_step

_CLOCK_TOLERANCE: Final = 5.0
"""Seconds. The wall clock was set while an attempt ran if its measure differs from the monotonic clock's by more."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt's end. ``state``: the launcher's last poll. ``forced_cause``: the cause that the reconciler
    recorded, as for its own stop or kill; None: it recorded none. ``message``: what the reconciler recorded about the cause or
    the kill. ``killed``: the reconciler kills what is left of the attempt. ``logs``: output of the launch, if no agent began.
    ``ran_seconds``: how long the attempt ran, by a monotonic clock; None: no agent began."""

    state: AttemptState
    forced_cause: Cause | None = None
    message: str | None = None
    killed: bool = False
    logs: str = ""
    ran_seconds: float | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of an attempt's steps. ``base``: the checkpoint, or step 0, from which the attempt began to train; None: it
    did not begin to train. ``newest_checkpoint``: the checkpoint from which the next attempt can start; None: there is none.
    ``last_step``: the last step that the attempt reached; 0 without ``base``."""

    base: Base | None
    newest_checkpoint: Checkpoint | None
    last_step: int

    @property
    def start_step(self) -> int:
        """The step at which the attempt began to train; 0 without ``base``."""
        return self.base.step if self.base is not None else 0

    @property
    def safe_step(self) -> int:
        """The step from which the next attempt can start: the newest checkpoint's, or ``start_step`` without one."""
        return self.newest_checkpoint.step if self.newest_checkpoint is not None else self.start_step

    @property
    def lost_steps(self) -> int:
        """Number of steps that the attempt did after ``safe_step``. These steps are in no checkpoint. 0 without ``base``."""
        return max(0, self.last_step - self.safe_step) if self.base is not None else 0

    def own_committed_step(self, attempt: int) -> int | None:
        """Return the step of ``newest_checkpoint`` if the attempt with number ``attempt`` committed it; otherwise None."""
        return (
            self.newest_checkpoint.step
            if self.newest_checkpoint is not None and self.newest_checkpoint.attempt == attempt
            else None
        )


class Verdict(NamedTuple):
    """``decision``: what becomes of the job. ``ended_at``: when the attempt ended. ``seconds``: how long it ran."""

    decision: Decision
    ended_at: datetime
    seconds: float


def cause_of(job: Job, evidence: Evidence) -> EndSeen:
    """Return the cause of the attempt's end, with its rank, exit code and message, from the agents' results, the engine's reports
    and the service's own action."""
    state = evidence.state
    engine = [EndSeen(end.cause, end.node, message=end.message) for end in state.ends]
    valid_results = [
        result for result in state.results if result.cause is not Cause.LEASE_LOST
    ]  # from agents that a kill has fenced
    if evidence.forced_cause is not None and len(valid_results) < len(state.nodes):
        return EndSeen(evidence.forced_cause, message=evidence.message)
    found = combine_ends(state.results, len(state.nodes), engine, killed=evidence.killed)
    if found is not None:
        return found._replace(cause=_requested_cause(found.cause, job, evidence))
    if not state.seen:
        log_text = f"the end of its log: {evidence.logs}" if evidence.logs else "its log is empty"
        return EndSeen(
            Cause.LAUNCHER_ERROR, message=evidence.message or f"the agent ended before it started the ranks; {log_text}"
        )
    return EndSeen(Cause.UNKNOWN, message=evidence.message or "the agent was killed: it left no result.json")


def _requested_cause(cause: Cause, job: Job, evidence: Evidence) -> Cause:
    """Return the cause of the attempt's end that counts for the job. ``cause`` itself counts, unless ``forced_cause`` of
    ``evidence`` is set. In that case the reason of the stop, such as a timeout or the user's request, may replace it."""
    if (
        evidence.forced_cause is Cause.UPGRADE and cause is Cause.UNKNOWN
    ):  # another version's result, with a cause unknown here
        cause = Cause.UPGRADE
    if cause.outcome is not Outcome.PREEMPTED or evidence.forced_cause is None:
        return cause
    if evidence.forced_cause is Cause.TIMEOUT:
        return Cause.TIMEOUT
    if evidence.forced_cause is Cause.UPGRADE:
        cause = Cause.UPGRADE
    return job.desired_cause if job.desired is not Desired.RUN and job.desired_cause is not None else cause


def facts_of(attempt: Attempt, newest_checkpoint: Checkpoint | None, reported_step: int) -> Facts:
    """Return the attempt's facts. ``newest_checkpoint``: the newest committed checkpoint of its lineage. ``reported_step``: the
    last step that its ranks reported."""
    if attempt.base_step is None:
        return Facts(None, newest_checkpoint, 0)
    base = Base(step=attempt.base_step, attempt=attempt.base_attempt, digest=attempt.base_digest)
    reached = max(base.step, newest_checkpoint.step if newest_checkpoint is not None else 0)
    return Facts(base, newest_checkpoint, max(attempt.last_step, reached, reported_step))


def verdict(
    job: Job,
    attempt: Attempt,
    limits: Limits,
    cause: EndSeen,
    facts: Facts,
    evidence: Evidence,
    now: datetime,
    previous: Attempt | None = None,
) -> Verdict:
    """Decide what becomes of the job, once its attempt is dead. ``cause``: from ``cause_of``. ``previous``: the attempt before,
    if any."""
    ended_at = _ended_at(attempt, evidence.state.results, now)
    seconds = _running_seconds(attempt, ended_at, evidence.ran_seconds, now)
    end = AttemptEnd(
        cause.cause,
        base_step=None if facts.base is None else facts.base.step,
        committed_step=facts.own_committed_step(attempt.number),
        begun=attempt.begun_at is not None,
        finished=facts.newest_checkpoint is not None and facts.newest_checkpoint.finished,
        unmanaged=unmanaged_script.is_reported_unmanaged(attempt.resume_report),
        seconds=seconds,
        message=cause.message,
        exit_code=cause.exit_code,
        last_step=facts.last_step,
        repeated_error=repeated_error_step(cause, evidence.state.results, previous),
    )
    return Verdict(decide(replace(view_of(job, limits), attempt=end), now), ended_at, seconds)


def _ended_at(attempt: Attempt, results: Sequence[AttemptResult], now: datetime) -> datetime:
    """Return when the attempt ended: the latest end in the agents' results, or ``now`` without a result. A time after ``now``
    counts as ``now``. A time before the attempt's beginning counts as the beginning."""
    reported_end = max((parse_time(result.ended_at, now) for result in results), default=now)
    return max(attempt.begun_at or attempt.created_at, min(reported_end, now))


def _running_seconds(attempt: Attempt, ended_at: datetime, ran_seconds: float | None, now: datetime) -> float:
    """Return the seconds from the first agent's beginning to ``ended_at``; 0.0 if none began. ``ran_seconds``: the monotonic
    count, used if the wall clock differs much."""
    if attempt.begun_at is None:
        return 0.0
    wall_seconds = (ended_at - attempt.begun_at).total_seconds()
    if ran_seconds is None:
        return wall_seconds
    counted = max(0.0, ran_seconds - max(0.0, (now - ended_at).total_seconds()))
    return wall_seconds if abs(wall_seconds - counted) <= _CLOCK_TOLERANCE else counted


def job_values(job: Job, attempt: Attempt, decision: Decision, facts: Facts, seconds: float) -> dict[str, Any]:
    """Return columns of the job's row that the attempt's end changes: counters, steps, the lease (released), but not the phase.
    ``seconds``: how long the attempt ran."""
    values: dict[str, Any] = {
        "preemptions": decision.counters.preemptions,
        "failures": decision.counters.failures,
        "attempts_without_progress": decision.counters.attempts_without_progress,
        "retries": decision.counters.retries,
        "not_before": decision.not_before,
        "running_seconds": job.running_seconds + seconds,
        **NO_LEASE,
    }
    if facts.base is not None:  # it served the explicit resume request, if any, and moved the job
        if _served_resume_request(job, attempt, facts.base):
            values["resume_from"] = None
        values["step"] = facts.last_step - facts.lost_steps
        values["committed_step"] = facts.safe_step
        values["committed_attempt"] = facts.newest_checkpoint.attempt if facts.newest_checkpoint is not None else None
    return values


def _served_resume_request(job: Job, attempt: Attempt, base: Base) -> bool:
    """True unless the attempt was recovered from the disk and began at another checkpoint than the job's request to resume names.
    True also without such a request."""
    if job.resume_from is None or not attempt.launch.get(RECOVERED_FROM_DISK):
        return True
    # an attempt found on the disk may have begun before the request was made
    return (base.step, base.attempt) == (job.resume_from["step"], job.resume_from["attempt"])
