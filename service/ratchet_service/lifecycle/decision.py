"""Input and output of ``decide``: plain data. Pure.

A job's view is made from its row and its spec. The end of an attempt counts as its cause's outcome and budget, or as what the
spec specifies for its exit code (``treatment``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from ratchet_contract.phases import Budget, Cause, Desired, Event, JobPhase, Outcome
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
    """How much of the budgets is used up, as ``update_counters`` counts. ``failures`` are those since the last progress.
    ``attempts_without_progress`` and ``retries`` count attempts in a row; ``retries`` are those that ended by a rule ``retry`` or
    were refused by an interpreter that was not upgraded."""

    preemptions: int = 0
    failures: int = 0
    attempts_without_progress: int = 0
    retries: int = 0


@dataclass(frozen=True)
class Limits:
    """What the spec allows; times in seconds. ``max_preemptions`` and ``timeout`` None: no limit. ``timeout`` limits the time of
    all attempts together. ``backoff``: the delay before the first retry that waits. ``exit_rules``: what exit codes of the job's
    own code mean. ``can_change_code``: the job can be resumed with other code. ``is_script``: the job is a script, so that code
    may follow its last step; a stop after the last step leaves that code to the next attempt."""

    max_preemptions: int | None = None
    max_failures: int = 3
    backoff: float = 1.0
    timeout: float | None = None
    stop_grace: float = 120.0
    exit_rules: tuple[ExitRule, ...] = ()
    can_change_code: bool = True
    is_script: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    """How the newest attempt ended, once no process of it is alive.

    ``exit_code``: of the rank that the cause comes from. ``base_step``: the step of the checkpoint that the attempt started from
    (0: from scratch; None: it did not get that far). ``committed_step``: the step of the lineage's newest checkpoint, if this
    attempt committed it; otherwise None.
    ``last_step``: the last step that it did. ``begun``: an agent began. ``finished``: the newest committed checkpoint is the
    job's final one. ``unmanaged``: it was a script without a Session. ``seconds``: how long it ran. ``repeated_error``: the last
    step that the rank which raised the exception had finished, if the same exception, at the same line and step, had ended the
    previous attempt, too; otherwise, and for errors that may pass, None (``repeated_error_step``).
    """

    cause: Cause
    base_step: int | None = None
    committed_step: int | None = None
    begun: bool = True
    finished: bool = False
    unmanaged: bool = False
    seconds: float = 0.0
    message: str | None = None
    exit_code: int | None = None
    last_step: int = 0
    repeated_error: int | None = None

    @property
    def unsaved_steps(self) -> int:
        """Number of steps that the attempt did after its newest commit (or its base), and which are lost."""
        return max(0, self.last_step - max(self.base_step or 0, self.committed_step or 0))

    @property
    def made_progress(self) -> bool:
        """True if the attempt committed a step after its base."""
        return self.committed_step is not None and self.committed_step > (self.base_step or 0)


@dataclass(frozen=True)
class Alive:
    """What is known of an attempt that has not ended. Times in seconds.

    ``age``: time for which the launch deadline has run: since the attempt was last seen in its engine's queue, or else was
    created or submitted again; 0 once an agent has begun. ``seen``: an agent has begun. ``waiting``: the attempt is still in that
    queue, where no stop request reaches it. ``running_seconds``: time since its first agent began; 0: none did.
    ``stop_requested_seconds``: time since a poll first saw the request to end it; 0: none did.
    ``signalled_seconds``: time since SIGTERM was sent to its agents; None: it was not. ``signal_cause``: the cause for which it
    was sent. ``killable_after``: how long after SIGTERM the agents are killed. ``launch_deadline``: how long the first agent may
    take to begin. ``other_protocol``: its agents use another protocol version and cannot report to this service. ``unmanaged``:
    it is known to be a script without a Session.
    """

    age: float
    seen: bool
    running_seconds: float = 0.0
    stop_requested_seconds: float = 0.0
    waiting: bool = False
    signalled_seconds: float | None = None
    signal_cause: Cause | None = None
    killable_after: float = 10.0
    launch_deadline: float = 60.0
    other_protocol: bool = False
    unmanaged: bool = False


@dataclass(frozen=True)
class JobView:
    """Input of ``decide``: what it needs of a job. ``running_seconds``: how long the job's earlier attempts ran together;
    ``attempt`` None: no attempt is active."""

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
    """What to do with a job.

    ``cause``: the attempt's cause, for STOP, KILL and END. ``outcome`` and ``rule``: the attempt's, for END; ``rule`` is a
    sentence that says which rule of ``policy.exit_codes`` applied (None: none). For the END of a queued job, which has no
    attempt, ``cause`` and ``outcome`` are None. ``not_before``: when a back-off ends, for WAIT and END; None: there is no
    back-off. ``event``, ``counters``, ``reason`` and ``message``: for END, the event to apply to the job, and its new counters,
    reason and message. For other actions ``counters`` are those of the view.
    """

    action: Action
    event: Event | None = None
    cause: Cause | None = None
    counters: Counters = Counters()
    not_before: datetime | None = None
    reason: str | None = None
    message: str | None = None
    outcome: Outcome | None = None
    rule: str | None = None


def limits_of(spec: JobSpec) -> Limits:
    """Return the limits that the spec sets: those of its policy, whether the job's code can be changed, and whether it is a
    script."""
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
    """What an attempt's end counts as. ``rule``: a sentence about the rule of ``policy.exit_codes`` that applied; None: none
    did."""

    cause: Cause
    outcome: Outcome
    budget: Budget
    rule: str | None = None


def treatment(cause: Cause, end: AttemptEnd, rules: Sequence[ExitRule]) -> Treatment:
    """Return what an attempt's end with ``cause`` counts as. If the cause is an exception with an exit code, the job's own code
    ended the attempt: then the first of ``rules`` that matches the exit code decides. Every other end, and one that no rule
    matches, counts as its cause says."""
    if cause is Cause.EXCEPTION and end.exit_code is not None:
        for i, rule in enumerate(rules):
            if rule.matches(end.exit_code):
                text = f"exit code {end.exit_code}: {rule.action}, by policy.exit_codes[{i}]"
                return Treatment(cause, *_RULE_EFFECTS[rule.action], text)
    return Treatment(cause, cause.outcome, cause.budget)
