"""Time limits for ranks without progress: those of the spec, or else those that the job's own history shows to be normal.

A deadline that is too long costs minutes once; one that is too short costs a healthy job an attempt, and again at the next. So
learning only ever shortens a deadline that is clearly too long. These rules are for deadlines that the spec does not set:

- Until an attempt has trained for ``SETTLED_SECONDS`` and shown ``MIN_OBSERVATIONS`` silences of one rank in a stage, that
  stage's deadline is the ceiling: ``DEFAULT_STEP_SECONDS``, or ``STARTUP_FACTOR`` times the longest silence of an earlier
  attempt where that is more, but at most ``MAX_DEADLINE_SECONDS``. An earlier attempt can only lengthen it: another machine,
  world size or hook has another pace.
- After that it is ``SILENCE_FACTOR`` times the longest silence of that stage, of this attempt or an earlier one, but at least
  ``MIN_DEADLINE_SECONDS`` and at most the ceiling. A job whose silences vary by less than ``SILENCE_FACTOR`` never reaches it
  while they are under ``DEFAULT_STEP_SECONDS``/``SILENCE_FACTOR``; longer ones may vary up to the ceiling.
- The first step of an attempt belongs to its start-up, and the first evaluation and the first save are not measured: they
  compile, allocate and fill caches.
- A start always has at least ``DEFAULT_STARTUP_SECONDS``: the first start of a job reads no checkpoint, a later one may read a
  large one from a cold disk.
- The attempt after one that was ended as a hang keeps the ceiling, since the hang may have been a false alarm.

This module computes the deadlines; the agent measures the silences and decides when there are enough. Times are in seconds.

This module also defines how late an agent may receive a desired state, which comes with the answer to a report; agent and
reconciler use the same value.
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
    """Time limits of one attempt, in seconds. ``startup``: from the ranks' start to their first step; ``rendezvous``: from an
    agent's start until all nodes, the code and the checkpoints are ready and the ranks can start, without the time of a fetch
    from the object store, in which it limits the time without progress; ``step``: the longest time that a rank may be silent
    (the time limits of the process group and of saves are based on it). ``learns``: True if the limit for silence may become
    shorter within the attempt."""

    startup: float
    rendezvous: float
    step: float
    learns: bool


def deadlines(policy: PolicySpec, pace: Pace | None) -> Deadlines:
    """Return the time limits of the next attempt. A limit that the spec's ``policy`` sets is used as it is
    (``startup_deadline`` also for ``rendezvous``); any other is the default, or a multiple of what earlier attempts needed if
    that is longer, up to ``MAX_DEADLINE_SECONDS``. ``pace``: that of earlier attempts; None: there were none, or they gave no
    information."""
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
    """Return the deadline in seconds of a stage with enough observations: ``SILENCE_FACTOR`` times ``longest``, its longest
    silence in seconds; at least ``MIN_DEADLINE_SECONDS``, but never more than ``ceiling``."""
    return min(ceiling, max(MIN_DEADLINE_SECONDS, SILENCE_FACTOR * longest))


def merge_paces(earlier: Pace | None, later: Pace | None) -> Pace | None:
    """Return the pace of two attempts together: the longer of each figure, and ``hung`` of the later one. None stands for an
    attempt without information: the other pace is returned, or None if both are None."""
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
    """Return the seconds within which an agent receives a desired state: a quarter of ``stop_grace`` (``policy.stop_grace``,
    in seconds), at most ``MAX_CONTROL_DELAY_SECONDS``. While the service responds, an agent waits no longer than this between
    two reports."""
    return min(MAX_CONTROL_DELAY_SECONDS, stop_grace / 4)
