"""Input and output of ``decide``: plain data. A job's row and spec give a part of the input; the caller adds what is known of the
attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from ratchet_contract.phases import Budget, Cause, Desired, Event, JobPhase, JobReason, Outcome
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.policy import ExitRule
from ratchet_service.db.models import Job


class Action(StrEnum):
    """What the reconciler does next with a job."""

    NOTHING = "nothing"
    WAIT = "wait"  # until ``not_before``
    LAUNCH = "launch"
    STOP = "stop"  # stop the agent gracefully, with ``cause``
    KILL = "kill"  # kill the agent, with ``cause``
    END = "end"  # the attempt is over: apply ``event`` and ``counters``


@dataclass(frozen=True)
class Counters:
    """How much of the budgets is used up, as ``update_counters`` counts."""

    preemptions: int = 0
    failures: int = 0  # since the last progress
    attempts_without_progress: int = 0  # in a row
    retries: int = 0  # in a row: ends that need spacing


@dataclass(frozen=True)
class Limits:
    """What the spec allows; times in seconds. None: no limit. ``timeout`` limits the time of all attempts together."""

    max_preemptions: int | None = None
    max_failures: int = 3
    backoff: float = 1.0  # delay before the first retry that waits
    timeout: float | None = None
    stop_grace: float = 120.0
    exit_rules: tuple[ExitRule, ...] = ()  # meaning of exit codes of the job's own code
    can_change_code: bool = True  # the job can be resumed with other code
    is_script: bool = False  # code may follow its last step, and is left to the next attempt after a stop


@dataclass(frozen=True)
class AttemptEnd:
    """How the newest attempt ended, once no process of it is alive."""

    cause: Cause
    base_step: int | None = None  # that it started from; 0: from scratch; None: it did not get that far
    committed_step: int | None = None  # of the lineage's newest checkpoint, if this attempt committed it
    begun: bool = True  # an agent began
    finished: bool = False  # the newest committed checkpoint is the job's final one
    unmanaged: bool = False  # a script without a Session
    seconds: float = 0.0  # how long it ran
    message: str | None = None
    exit_code: int | None = None  # of the rank that the cause comes from
    last_step: int = 0  # the last step that it did
    repeated_error: int | None = None  # ``repeated_error_step``

    @property
    def unsaved_steps(self) -> int:
        """Number of steps that are lost: those that the attempt did after its newest committed checkpoint, or after its base if
        it committed none."""
        return max(0, self.last_step - max(self.base_step or 0, self.committed_step or 0))

    @property
    def made_progress(self) -> bool:
        """True if the attempt committed a step after its base."""
        return self.committed_step is not None and self.committed_step > (self.base_step or 0)


@dataclass(frozen=True)
class Alive:
    """What is known of an attempt that has not ended. Times in seconds."""

    age: float  # for which the launch deadline has run; 0 once an agent has begun
    seen: bool  # an agent has begun
    running_seconds: float = 0.0  # since its first agent began; 0: none did
    stop_requested_seconds: float = 0.0  # since a poll first saw the request; 0: none did
    waiting: bool = False  # in its engine's queue, where no stop request reaches it
    signalled_seconds: float | None = None  # since SIGTERM was sent; None: it was not
    signal_cause: Cause | None = None
    killable_after: float = 10.0  # seconds after SIGTERM until the kill
    launch_deadline: float = 60.0  # for the first agent to begin
    other_protocol: bool = False  # its agents cannot report to this service
    unmanaged: bool = False  # known to be a script without a Session


@dataclass(frozen=True)
class JobView:
    """What ``decide`` needs to know about a job. ``running_seconds``: how long all earlier attempts ran, together. ``attempt``:
    the newest attempt, alive or just ended; None: no attempt is active."""

    job_id: str
    phase: JobPhase
    desired: Desired = Desired.RUN
    desired_cause: Cause | None = None
    attempt_number: int = 0
    counters: Counters = Counters()
    limits: Limits = Limits()
    not_before: datetime | None = None
    running_seconds: float = 0.0
    attempt: Alive | AttemptEnd | None = None


@dataclass(frozen=True)
class Decision:
    """What to do with a job. ``cause``, ``outcome`` and ``rule`` are for its attempt. ``event``, ``counters``, ``reason`` and
    ``message`` are for the job itself. ``not_before``: when the job's back-off ends; None: there is no back-off."""

    action: Action
    event: Event | None = None
    cause: Cause | None = None
    counters: Counters = Counters()
    not_before: datetime | None = None
    reason: JobReason | None = None
    message: str | None = None
    outcome: Outcome | None = None
    rule: str | None = None


def limits_of(spec: JobSpec) -> Limits:
    """Return the limits that the spec sets."""
    policy = spec.policy
    return Limits(
        policy.max_preemptions,
        policy.max_failures,
        policy.backoff,
        policy.timeout,
        policy.stop_grace,
        tuple(policy.exit_codes),
        can_change_code=spec.snapshot_code is not None,
        is_script=spec.script is not None,
    )


def view_of(job: Job, limits: Limits) -> JobView:
    """Return what ``decide`` needs of the job's row. Its ``attempt`` is None: the caller adds it."""
    return JobView(
        job_id=job.id,
        phase=job.phase,
        desired=job.desired,
        desired_cause=job.desired_cause,
        attempt_number=job.attempt,
        counters=Counters(job.preemptions, job.failures, job.attempts_without_progress, job.retries),
        limits=limits,
        not_before=job.not_before,
        running_seconds=job.running_seconds,
    )


_RULE_EFFECTS: Final[dict[str, tuple[Outcome, Budget]]] = {
    "retry": (Outcome.FAILED, Budget.NONE),
    "fail": (Outcome.FAILED, Budget.FATAL),
    "preempted": (Outcome.PREEMPTED, Budget.PREEMPTIONS),
}


class Treatment(NamedTuple):
    """What an attempt's end counts as. ``rule``: a note on the rule of ``policy.exit_codes`` that applied, if one did."""

    cause: Cause
    outcome: Outcome
    budget: Budget
    rule: str | None = None


def treatment(cause: Cause, end: AttemptEnd, rules: Sequence[ExitRule]) -> Treatment:
    """Return what an attempt's end with ``cause`` counts as. For an exit code of the job's own code, the first of ``rules`` that
    matches decides."""
    if cause is Cause.EXCEPTION and end.exit_code is not None:
        for i, rule in enumerate(rules):
            if rule.matches(end.exit_code):
                text = f"exit code {end.exit_code}: {rule.action}, by policy.exit_codes[{i}]"
                return Treatment(cause, *_RULE_EFFECTS[rule.action], text)
    return Treatment(cause, cause.outcome, cause.budget)
