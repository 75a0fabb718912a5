"""How long ranks may go without progress: what the spec says, or else what the job itself has shown to be normal.

A deadline that is too long costs minutes once; one that is too short costs a healthy job an attempt, and again at the next. So
what is learned only ever takes away what is plainly too much:

- Until an attempt has trained for ``SETTLED_SECONDS`` and shown ``ENOUGH`` silences of one rank in a stage, that stage's
  deadline is the ceiling: ``DEFAULT_STEP``, or ``ROOM`` times the longest silence of an earlier attempt where that is more. An
  earlier attempt can only lengthen it: another machine, world size or hook has another pace.
- After that it is ``FACTOR`` times the longest silence of that stage, of this attempt or an earlier one, but not less than
  ``FLOOR`` nor more than the ceiling. A job whose silences vary by less than ``FACTOR`` never meets it while they are under
  ``DEFAULT_STEP``/``FACTOR``; longer ones may vary up to the ceiling.
- The first step of an attempt belongs to its start-up, and the first evaluation and the first save are not measured: they
  compile, allocate and fill caches.
- A start is never given less than ``DEFAULT_STARTUP``: the first of a job reads no checkpoint, a later one may read a large
  one from a cold disk.
- The attempt after one that was ended as a hang keeps to the ceiling. Was that a false alarm, it does not come again.

Times are in seconds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.spec_policy import PolicySpec

DEFAULT_STARTUP: Final = 300.0
DEFAULT_STEP: Final = 300.0
FLOOR: Final = 120.0
"""Disks and networks of clouds have hiccups of half a minute, a failover of a file server takes a minute and a half."""
FACTOR: Final = 10.0
ROOM: Final = 2.0
CEILING: Final = 1800.0
"""Nothing is learned beyond this: who needs more says so in the spec."""
ENOUGH: Final = 20
SETTLED_SECONDS: Final = 3600.0
"""What a job does seldom (a validation in the body of a step, the end of an epoch) is to be among what was seen."""


class Pace(BaseModel):
    """What attempts of a job have shown. Each figure is the longest that was seen and turned out to be no hang."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    startup: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="From the ranks' start to the first step."
    )
    silences: dict[str, float] = Field(
        {}, description="Between two signs of progress of one rank, by stage (training, evaluating, checkpointing)."
    )
    hung: bool = Field(False, description="The newest of these attempts was ended as a hang.")


class Deadlines(NamedTuple):
    """Of one attempt. ``startup``: from the ranks' start to their first step; ``meeting``: what nodes, code and checkpoints have
    to be there before that; ``step``: the most that a rank may be silent whatever is learned meanwhile (the time limits of the
    process group and of saves stand on it). ``learns``: within the attempt it may become less."""

    startup: float
    meeting: float
    step: float
    learns: bool


def deadlines(policy: PolicySpec, pace: Pace | None) -> Deadlines:
    """Those of the attempt that follows on attempts with ``pace`` (None: there was none, or it told nothing)."""
    pace = pace or Pace()
    seen = pace.startup or 0.0
    most = min(CEILING, max(DEFAULT_STARTUP, ROOM * seen))
    step = min(CEILING, max(DEFAULT_STEP, ROOM * max(pace.silences.values(), default=0.0)))
    given = policy.startup_deadline
    return Deadlines(
        startup=most if given is None else given,
        meeting=most if given is None else given,
        step=step if policy.step_deadline is None else policy.step_deadline,
        learns=policy.step_deadline is None and not pace.hung,
    )


def learned(longest: float, ceiling: float) -> float:
    """The deadline of a stage whose longest silence was ``longest``, once enough was seen."""
    return min(ceiling, max(FLOOR, FACTOR * longest))


def joined(before: Pace | None, after: Pace | None) -> Pace | None:
    """Two attempts' paces as one: the longer of each figure; ``hung`` is the later one's."""
    if before is None or after is None:
        return after or before
    starts = [s for s in (before.startup, after.startup) if s is not None]
    stages = sorted(before.silences.keys() | after.silences.keys())
    return Pace(
        startup=max(starts, default=None),
        silences={s: max(before.silences.get(s, 0.0), after.silences.get(s, 0.0)) for s in stages},
        hung=after.hung,
    )
