"""What ``decide`` is told of a job and its attempt, and what it answers: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ratchet_contract.phases import Cause, Desired, Event, JobPhase, Outcome
from ratchet_contract.spec_policy import ExitRule


class Action(StrEnum):
    """What the reconciler is to do."""

    NOTHING = "nothing"
    WAIT = "wait"  # until ``not_before``
    LAUNCH = "launch"
    STOP = "stop"  # ask the agent to end, with ``cause``
    KILL = "kill"  # end it by force, with ``cause``
    END = "end"  # the attempt is over: apply ``event`` and ``counters``


@dataclass(frozen=True)
class Counters:
    """What was used up of the budgets; ``no_progress`` and ``retries`` (ended by a rule ``retry``, or refused by an interpreter
    that was not upgraded) count attempts in a row."""

    preemptions: int = 0
    failures: int = 0
    no_progress: int = 0
    retries: int = 0


@dataclass(frozen=True)
class Limits:
    """The spec's policy; seconds. ``exit_rules``: what exit codes of the job's own code mean; ``other_code``: the job can be
    resumed with other code; ``script``: more of it follows the last step, and a stop there leaves that to the next attempt."""

    max_preemptions: int | None = None
    max_failures: int = 3
    backoff: float = 1.0
    timeout: float | None = None
    stop_grace: float = 120.0
    exit_rules: tuple[ExitRule, ...] = ()
    other_code: bool = True
    script: bool = False


@dataclass(frozen=True)
class AttemptEnd:
    """How the newest attempt ended, once nothing of it is alive.

    ``exit_code`` is that of the rank that the cause comes from; ``base_step`` where it started (None: it never got that far),
    ``committed_step`` the newest step it committed, ``last_step`` the last one it did; ``begun`` whether any agent began;
    ``finished`` whether that is the job's final checkpoint; ``unmanaged`` whether it was a script without a Session; ``seconds``
    how long it ran; ``repeated_error``: an exception ended it that had ended the attempt before, at the same line and after this
    step, the last one of the rank that raised it.
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
    def unsaved(self) -> int:
        """Steps that it did and did not commit."""
        return max(0, self.last_step - max(self.base_step or 0, self.committed_step or 0))

    @property
    def progress(self) -> bool:
        """A new step was committed."""
        return self.committed_step is not None and self.committed_step > (self.base_step or 0)


@dataclass(frozen=True)
class Alive:
    """What is seen of an attempt that has not ended. Times in seconds.

    ``age`` is how long an attempt without any agent has been out of its engine's queue; ``waiting`` whether it is still in that
    queue, where nobody hears a wish; ``running`` how long since its first agent began; ``wished`` how long its end has been
    wanted; ``asked`` how long ago the agent was told to stop by signal (None: it was not); ``killable_after`` how long it then
    gets; ``launch_deadline`` how long the agent may take to show its first sign of life; ``other_protocol``: it cannot report to
    this service; ``unmanaged``: it is known to be a script without a Session.
    """

    age: float
    seen: bool
    running: float = 0.0
    wished: float = 0.0
    waiting: bool = False
    asked: float | None = None
    asked_cause: Cause | None = None
    killable_after: float = 10.0
    launch_deadline: float = 60.0
    other_protocol: bool = False
    unmanaged: bool = False


@dataclass(frozen=True)
class JobView:
    """What ``decide`` knows. ``running_seconds`` is the time of earlier attempts; ``attempt`` None: none is under way."""

    job_id: str
    phase: JobPhase
    desired: Desired = Desired.RUN
    desired_cause: Cause | None = None
    epoch: int = 0
    counters: Counters = Counters()
    limits: Limits = Limits()
    not_before: datetime | None = None
    running_seconds: float = 0.0
    attempt: Alive | AttemptEnd | None = None


@dataclass(frozen=True)
class Decision:
    """``cause`` is the attempt's, for STOP, KILL and END; ``outcome`` and ``rule`` (a sentence: which rule of
    ``policy.exit_codes`` applied) are, too, for END. The rest describes the job after an END."""

    action: Action
    event: Event | None = None
    cause: Cause | None = None
    counters: Counters = Counters()
    not_before: datetime | None = None
    reason: str | None = None
    message: str | None = None
    outcome: Outcome | None = None
    rule: str | None = None
