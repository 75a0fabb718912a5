"""Time limits, in seconds, for ranks without progress, and for an agent's receipt of a desired state.

A limit that is too short costs a healthy job every attempt. So earlier attempts only lengthen a limit, which is shortened only
after many observations.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.spec.policy import PolicySpec

DEFAULT_STARTUP_SECONDS: Final = 300.0
DEFAULT_STEP_SECONDS: Final = 300.0
MIN_DEADLINE_SECONDS: Final = 120.0
"""Disks and networks of clouds have interruptions of half a minute, a failover of a file server takes a minute and a half."""
SILENCE_FACTOR: Final = 10.0
STARTUP_FACTOR: Final = 2.0
MAX_DEADLINE_SECONDS: Final = 1800.0
"""Nothing is learned beyond this: a job that needs more sets it in the spec."""
MIN_OBSERVATIONS: Final = 20
SETTLED_SECONDS: Final = 3600.0
"""Rare events of a job (a validation in the body of a step, the end of an epoch) should be among the observations."""


class Pace(BaseModel):
    """What attempts of a job have shown about its pace. Each figure is the longest duration in seconds that was seen and
    turned out to be no hang."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    startup: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="From the ranks' start to the first step."
    )
    silences: dict[str, float] = Field(
        {}, description="Between two signs of progress of one rank, by stage (training, evaluating, checkpointing)."
    )
    hung: bool = Field(False, description="The newest of these attempts was ended as a hang.")


class Deadlines(NamedTuple):
    """Time limits of one attempt, in seconds. ``startup``: until the first step. ``rendezvous``: until the ranks can start.
    ``step``: for a rank's silence. ``learns``: True if the agent may use a shorter limit than ``step`` after many
    observations."""

    startup: float
    rendezvous: float
    step: float
    learns: bool


def deadlines(policy: PolicySpec, pace: Pace | None) -> Deadlines:
    """Return the time limits of the next attempt. One that ``policy`` sets is used as it is. Any other is the default, or more,
    up to ``MAX_DEADLINE_SECONDS``, if earlier attempts needed it."""
    pace = pace or Pace()
    seen = pace.startup or 0.0
    most = min(MAX_DEADLINE_SECONDS, max(DEFAULT_STARTUP_SECONDS, STARTUP_FACTOR * seen))
    step = min(
        MAX_DEADLINE_SECONDS, max(DEFAULT_STEP_SECONDS, STARTUP_FACTOR * max(pace.silences.values(), default=0.0))
    )
    given = policy.startup_deadline
    return Deadlines(
        startup=most if given is None else given,
        rendezvous=most if given is None else given,
        step=step if policy.step_deadline is None else policy.step_deadline,
        learns=policy.step_deadline is None and not pace.hung,
    )


def learned_deadline(longest: float, ceiling: float) -> float:
    """Return the deadline, in seconds, of a stage with the longest silence ``longest``: at least ``MIN_DEADLINE_SECONDS``, but at
    most ``ceiling``."""
    return min(ceiling, max(MIN_DEADLINE_SECONDS, SILENCE_FACTOR * longest))


def merge_paces(earlier: Pace | None, later: Pace | None) -> Pace | None:
    """Return the combined pace of earlier and later attempts: the longest of each duration, and ``hung`` of the later attempts.
    None means that nothing is known; the other pace is then returned."""
    if earlier is None or later is None:
        return later or earlier
    starts = [s for s in (earlier.startup, later.startup) if s is not None]
    stages = sorted(earlier.silences.keys() | later.silences.keys())
    return Pace(
        startup=max(starts, default=None),
        silences={s: max(earlier.silences.get(s, 0.0), later.silences.get(s, 0.0)) for s in stages},
        hung=later.hung,
    )


MAX_CONTROL_DELAY_SECONDS: Final = 10.0
"""Maximum number of seconds that an agent holds figures back, however busy the service is."""


def max_control_delay(stop_grace: float) -> float:
    """Return the maximum time, in seconds, until an agent receives a changed desired state while the service responds.
    ``stop_grace``: the job's time to stop, in seconds."""
    return min(MAX_CONTROL_DELAY_SECONDS, stop_grace / 4)
