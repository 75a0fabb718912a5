"""When to save: by steps, by time, or as often as a share of the training time allows. Rank 0 decides, for all.

A rank cannot know the others' clocks, so rank 0 names the next step at which something is due each time one is: by time, that
is a step before the moment at which the time will be up, where it looks again. What is due is a function of steps alone where
only ``every_steps`` is given.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from ratchet_contract.spec_checkpoint import CheckpointSpec

_STEPS_KEPT: Final = 32
_SAVES_KEPT: Final = 3
_FIRST_AUTO: Final = 10  # steps before the first save of an automatic schedule: it must be measured to be known
_LONGEST_AUTO: Final = 3600.0  # seconds: no share of time is worth more than an hour's work
_QUICK: Final = 2.0  # seconds: what is expected to take less is saved after the first step
_TIMES: Final = 20  # of what a slower one is expected to take are trained before it


class Cost(NamedTuple):
    """Of one save, in seconds: that the loop stood still, that steps took longer beside it, and from its begin to its end."""

    stall: float
    beside: float
    total: float


def first_due(spec: CheckpointSpec, step: int) -> float:
    """The first step behind ``step`` at which rank 0 is asked; infinite: never. The same on every rank."""
    if isinstance(spec.every_steps, int):
        due = step + spec.every_steps - step % spec.every_steps
        return due if spec.every_seconds is None else min(due, step + 1)
    if spec.every_steps is None and spec.every_seconds is None:
        return math.inf
    return step + (1 if spec.every_seconds is not None else _FIRST_AUTO)


def early_due(spec: CheckpointSpec, step: int) -> float:
    """The first step behind ``step`` at which rank 0 is asked for a save before the first scheduled one; infinite: never. The
    same on every rank."""
    if isinstance(spec.first, int):
        return spec.first if spec.first > step else math.inf
    return step + 1 if spec.first == "auto" and first_due(spec, step) != math.inf else math.inf


class Schedule:
    """Rank 0's. ``interval``: of the automatic schedule, in steps; None before it is known."""

    def __init__(self, spec: CheckpointSpec, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)  # seconds of steps with no save beside them
        self._costs: deque[Cost] = deque(maxlen=_SAVES_KEPT)
        self._saved_at = self._now = clock()
        self._saved_step = step
        self._beside = self._trained = 0.0
        self._first_seconds: float | None = None
        self.interval: int | None = None

    def boundary(self, saving: bool, stall: float) -> None:
        """After every step; ``saving``: a save was under way; ``stall``: seconds of this step that were its."""
        before, self._now = self._now, self._clock()
        seconds = self._now - before - stall
        self._trained += seconds
        if not saving:
            self._steps.append(seconds)
        elif self._steps:
            self._beside += max(0.0, seconds - self._step_seconds())

    def saved(self, stall: float, total: float, *, well: bool = True, first: bool = False) -> None:
        """A save has ended. What one took that did not end ``well`` (a deadline, no time at all) says nothing of others, and
        ``first``, the one before the first scheduled, moves none of these."""
        if well and first:
            self._first_seconds = total
        elif well:
            self._costs.append(Cost(stall, self._beside, total))
        self._beside = 0.0

    def resumed(self) -> None:
        """The step that begins now is timed from here: what came before, an evaluation or a save, is not its."""
        self._now = self._clock()

    def save_seconds(self) -> float | None:
        """What a save takes from its begin to its end, by the last ones; None: not known."""
        return statistics.median(c.total for c in self._costs) if self._costs else self._first_seconds

    def due(self, step: int) -> bool:
        """Is ``step`` saved?"""
        spec, every = self._spec, self._spec.every_steps
        if isinstance(every, int) and step % every == 0:
            return True
        if every == "auto" and step - self._saved_step >= (self.interval or _FIRST_AUTO):
            return True
        return spec.every_seconds is not None and self._left() < self._step_seconds() / 2

    def early(self, step: int, seconds: float) -> int:
        """The step to ask again at for the save before the first scheduled one, which is expected to take ``seconds``; ``step``:
        it is due."""
        left = _TIMES * seconds - self._trained
        if isinstance(self._spec.first, int) or seconds < _QUICK or left < self._step_seconds() / 2:
            return step
        return step + self._steps_within(left)

    def began(self, step: int) -> None:
        """The save of ``step`` begins: intervals count from here."""
        self._saved_step, self._saved_at = step, self._clock()

    def left_out(self, step: int) -> None:
        """``step`` was due, and is not saved: the next is due an interval later."""
        self.began(step)

    def following(self, step: int) -> float:
        """The step to ask again at; infinite: never. Tells ``interval`` anew."""
        spec = self._spec
        steps = math.inf
        if isinstance(spec.every_steps, int):
            steps = spec.every_steps - step % spec.every_steps
        elif spec.every_steps == "auto":
            self.interval = self._allowed()
            steps = max(1, self._saved_step + (self.interval or _FIRST_AUTO) - step)
        if spec.every_seconds is not None:
            steps = min(steps, self._steps_within(self._left()))
        return step + steps

    def _left(self) -> float:
        return self._saved_at + (self._spec.every_seconds or math.inf) - self._clock()

    def _steps_within(self, left: float) -> int:
        """Half-way to the step before which ``left`` seconds are up, since steps may become slower; at the end that very step."""
        seconds = self._step_seconds()
        if seconds <= 0:
            return 1
        steps = left / seconds
        return max(1, round(steps) if steps < 4 else int(steps / 2))

    def _allowed(self) -> int | None:
        """Steps between two saves whose cost is ``max_overhead`` of the time; never so few that one waits for the other."""
        step = self._step_seconds()
        if not self._costs or step <= 0:
            return None
        cost = max(c.stall + c.beside for c in self._costs)
        total = max(c.total for c in self._costs)
        wanted = max(cost / (self._spec.max_overhead * step), total / step)
        return max(1, min(math.ceil(wanted), math.ceil(_LONGEST_AUTO / step)))

    def _step_seconds(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0
