"""When to save: by steps, by time, or as often as a share of the training time allows. If the decision depends on more than the
step, rank 0 makes it, since a rank cannot know the others' clocks."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ratchet_contract.errors import UserError
from ratchet_contract.phases import NoteType
from ratchet_contract.plural import pluralize
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_worker.coordination.reporter import Reason, Reporter
from ratchet_worker.coordination.store_exchange import Exchange

_MAX_STEP_SAMPLES: Final = 32
_MAX_SAVE_SAMPLES: Final = 3
_FIRST_AUTO: Final = 10  # steps before the first save of an automatic schedule, whose cost must be measured first
_LONGEST_AUTO: Final = 3600.0  # seconds: at most an hour's work is at risk, whatever the share of time
_QUICK_SAVE_SECONDS: Final = 2.0  # seconds: a save that is expected to take less is done after the first step
_EARLY_SAVE_FACTOR: Final = 20  # a slower save is done after training for this multiple of its expected duration


class Cost(NamedTuple):
    """What one save has cost, in seconds. ``stall``: how long the loop waited. ``slowdown``: how much longer concurrent steps
    took. ``total``: the duration of the save."""

    stall: float
    slowdown: float
    total: float


def first_due(spec: CheckpointSpec, step: int) -> float:
    """Return the first step after ``step`` at which a scheduled save may be due; infinite: never."""
    if isinstance(spec.every_steps, int):
        due = step + spec.every_steps - step % spec.every_steps
        return due if spec.every_seconds is None else min(due, step + 1)
    if spec.every_steps is None and spec.every_seconds is None:
        return math.inf
    return step + (1 if spec.every_seconds is not None else _FIRST_AUTO)


def early_due(spec: CheckpointSpec, step: int) -> float:
    """Return the first step after ``step`` at which a save before the first scheduled one may be due; infinite: never."""
    if isinstance(spec.first, int):
        return spec.first if spec.first > step else math.inf
    return step + 1 if spec.first == "auto" and first_due(spec, step) != math.inf else math.inf


class Schedule:
    """Decides on rank 0 when to save, from steps and measured durations. ``step``: the last step before the attempt starts.
    ``interval``: steps between two saves under ``every_steps: auto``. It is None under other settings, and as long as the cost
    of a save or the duration of a step is not known."""

    def __init__(self, spec: CheckpointSpec, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._step_durations: deque[float] = deque(
            maxlen=_MAX_STEP_SAMPLES
        )  # seconds of steps without a concurrent save
        self._costs: deque[Cost] = deque(maxlen=_MAX_SAVE_SAMPLES)
        self._saved_at = self._last_boundary_at = clock()
        self._saved_step = step
        self._slowdown = self._trained_seconds = 0.0
        self._first_seconds: float | None = None
        self.interval: int | None = None

    def record_step(self, saving: bool, stall: float) -> None:
        """Record the duration of the step that ends now. ``stall``: seconds for which it waited for a save; they do not count.
        ``saving``: whether a save was in progress."""
        before, self._last_boundary_at = self._last_boundary_at, self._clock()
        seconds = self._last_boundary_at - before - stall
        self._trained_seconds += seconds
        if not saving:
            self._step_durations.append(seconds)
        elif self._step_durations:
            self._slowdown += max(0.0, seconds - self._step_seconds())

    def record_save(self, stall: float, total: float, *, succeeded: bool = True, first: bool = False) -> None:
        """Record a save that has ended. ``stall``: seconds that the loop waited. ``total``: the save's duration in seconds.
        ``first``: whether this is the early save before the first scheduled one, which does not affect the interval. A failed
        save is not measured."""
        # the duration of a failed save may be a deadline, or no time at all
        if succeeded and first:
            self._first_seconds = total
        elif succeeded:
            self._costs.append(Cost(stall, self._slowdown, total))
        self._slowdown = 0.0

    def restart_step_timer(self) -> None:
        """Begin to time the next step now, so that what came before does not count as part of it."""
        self._last_boundary_at = self._clock()

    def save_seconds(self) -> float | None:
        """Return the median seconds of the last successful saves; None: no save has succeeded yet."""
        return statistics.median(c.total for c in self._costs) if self._costs else self._first_seconds

    def is_due(self, step: int) -> bool:
        """True if a scheduled save is due at ``step``."""
        spec, every = self._spec, self._spec.every_steps
        if isinstance(every, int) and step % every == 0:
            return True
        if every == "auto" and step - self._saved_step >= (self.interval or _FIRST_AUTO):
            return True
        return spec.every_seconds is not None and self._remaining_seconds() < self._step_seconds() / 2

    def next_early_check(self, step: int, seconds: float) -> int:
        """Return ``step`` if the early save, before the first scheduled one, is due now; otherwise the step at which to check
        again. ``seconds``: the expected duration of that save."""
        left = _EARLY_SAVE_FACTOR * seconds - self._trained_seconds
        if isinstance(self._spec.first, int) or seconds < _QUICK_SAVE_SECONDS or left < self._step_seconds() / 2:
            return step
        return step + self._steps_within(left)

    def record_save_begin(self, step: int) -> None:
        """Note that the scheduled save of ``step`` begins now: the interval to the next one counts from here."""
        self._saved_step, self._saved_at = step, self._clock()

    def record_skip(self, step: int) -> None:
        """Note that ``step`` was due but is not saved: the next save is due an interval after it."""
        self.record_save_begin(step)

    def next_check(self, step: int) -> float:
        """Return the step after ``step`` at which to check next whether a scheduled save is due; infinite: never. Updates
        ``interval``."""
        spec = self._spec
        steps = math.inf
        if isinstance(spec.every_steps, int):
            steps = spec.every_steps - step % spec.every_steps
        elif spec.every_steps == "auto":
            self.interval = self._allowed_interval()
            steps = max(1, self._saved_step + (self.interval or _FIRST_AUTO) - step)
        if spec.every_seconds is not None:
            steps = min(steps, self._steps_within(self._remaining_seconds()))
        return step + steps

    def _remaining_seconds(self) -> float:
        """Return the seconds until a save is due by time; infinite without ``every_seconds``."""
        return self._saved_at + (self._spec.every_seconds or math.inf) - self._clock()

    def _steps_within(self, available_seconds: float) -> int:
        """Return after how many steps, at least 1, to check again if ``available_seconds`` are left."""
        seconds = self._step_seconds()
        if seconds <= 0:
            return 1
        steps = available_seconds / seconds
        # half of those that fit, since steps may become slower
        return max(1, round(steps) if steps < 4 else int(steps / 2))

    def _allowed_interval(self) -> int | None:
        """Return the number of steps between two saves for ``every_steps: auto``; None without measurements. At this
        interval, saves cost at most about ``max_overhead`` of the time, and each ends before the next one begins. A longer
        interval than an hour is shortened to an hour."""
        step = self._step_seconds()
        if not self._costs or step <= 0:
            return None
        cost = max(c.stall + c.slowdown for c in self._costs)
        total = max(c.total for c in self._costs)
        wanted = max(cost / (self._spec.max_overhead * step), total / step)
        return max(1, min(math.ceil(wanted), math.ceil(_LONGEST_AUTO / step)))

    def _step_seconds(self) -> float:
        """Return the median duration, in seconds, of the last steps without a concurrent save; 0.0 if there are none."""
        return statistics.median(self._step_durations) if self._step_durations else 0.0


_REPORTED_WAIT_SECONDS: Final = 1.0  # seconds of waiting for the previous save from which on it is reported


class Due:
    """Decides whether a save is due at a step boundary, the same on all ranks. ``next``: the first step at which a save may be
    due. ``early``: a save before the first scheduled one is possible, since the attempt starts from no checkpoint of this job."""

    def __init__(
        self, spec: CheckpointSpec, exchange: Exchange, reporter: Reporter, step: int, *, early: bool = False
    ) -> None:
        self._spec, self._exchange, self._reporter = spec, exchange, reporter
        self.schedule = Schedule(spec, step) if exchange.rank == 0 else None
        self._early = early_due(spec, step) if early else math.inf  # like ``next``, before the first scheduled save
        self.next = min(first_due(spec, step), self._early)
        self._plans = 0
        self._plans_read = 0  # by all ranks, once the current save has succeeded
        self._plans_deleted = 0  # deleted from the store
        self._skipped = 0

    def reason_at(
        self, step: int, busy: bool, drain: Callable[[], object], expected_seconds: Callable[[], float | None]
    ) -> Reason | None:
        """Return why ``step`` is saved; None if it is not. Updates ``next``. All ranks must call it, and not before step
        ``next``. ``busy``: whether the previous save is in progress. ``drain``: waits for that save; its errors are raised.
        ``expected_seconds``: returns the expected duration of the save before the first scheduled one; None: do not make it.
        Raises ``UserError`` if rank 0 is at another step."""
        plan: dict[str, Any] = {}
        early = step >= self._early
        if self.schedule is not None:
            plan = self._decide(self.schedule, step, busy, drain, expected_seconds)
        if early or self._needs_broadcast():
            plan = self.broadcast(plan)
            if plan["step"] != step:
                raise UserError(
                    f"rank {self._exchange.rank} has done step {step} while rank 0 has done {plan['step']}: all ranks must do "
                    "the same steps"
                )
        else:
            plan = {"save": "schedule", "due": first_due(self._spec, step), "early": None}
        self._early = math.inf if plan["early"] is None else plan["early"]
        self.next = min(math.inf if plan["due"] is None else plan["due"], self._early)
        reason: Reason | None = plan["save"]
        return reason

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value`` on all ranks. All ranks must call it; the others wait for rank 0."""
        self._plans += 1
        return self._exchange.broadcast(f"plan/{self._plans}", value)

    def on_save_begin(self) -> None:
        """Note that a save begins. Once all ranks have reported for this save, all of them have read the broadcasts made until
        now."""
        self._plans_read = self._plans

    def on_save_success(self) -> None:
        """Note that the save has succeeded. Rank 0 deletes, from the store, the broadcasts that all ranks have read."""
        while self.schedule is not None and self._plans_deleted < self._plans_read:
            self._plans_deleted += 1
            self._exchange.delete_broadcast(f"plan/{self._plans_deleted}")

    def _needs_broadcast(self) -> bool:
        """True if rank 0 has to decide about scheduled saves, since they do not follow from the step alone."""
        by_steps = isinstance(self._spec.every_steps, int) and self._spec.every_seconds is None
        return not by_steps or self._spec.when_busy == "skip"

    def _decide(
        self,
        schedule: Schedule,
        step: int,
        busy: bool,
        drain: Callable[[], object],
        expected_seconds: Callable[[], float | None],
    ) -> dict[str, Any]:
        """Return rank 0's decision at ``step`` as a dict of JSON values. Key ``save``: the reason for a save, or None. Keys
        ``due`` and ``early``: the steps of the next checks, None for never. May wait for the previous save."""
        due, early, reason = schedule.is_due(step), self._early, None
        if due:
            early = math.inf
        elif step >= early:
            wanted = expected_seconds()
            early = math.inf if wanted is None else schedule.next_early_check(step, wanted)
            if early == step:
                early, reason = math.inf, "first"
        if due and busy and self._spec.when_busy == "skip":
            self._skipped += 1
            schedule.record_skip(step)
            due = False
        elif due:
            if busy:
                self._report_waiting(step, drain)
            self._report_skipped(step)
            schedule.record_save_begin(step)
            reason = "schedule"
        following, before = schedule.next_check(step), schedule.interval
        if before is not None and self._spec.every_steps == "auto" and due:
            self._report_interval(schedule)
        return {
            "step": step,
            "save": reason,
            "due": None if following == math.inf else following,
            "early": None if early == math.inf else early,
        }

    def _report_interval(self, schedule: Schedule) -> None:
        """Report the current interval of the automatic schedule as a note."""
        seconds = schedule.save_seconds() or 0.0
        text = f"automatic schedule: every {schedule.interval} steps; a save takes {seconds:.3g} s from begin to end"
        self._reporter.note(NoteType.CHECKPOINT_INTERVAL, text, steps=schedule.interval, seconds=seconds)

    def _report_waiting(self, step: int, drain: Callable[[], object]) -> None:
        """Wait for the previous save by ``drain``, and report a wait of a second or more as a note."""
        begun = time.monotonic()
        drain()
        seconds = time.monotonic() - begun
        if seconds >= _REPORTED_WAIT_SECONDS:
            text = (
                f"training waited {seconds:.1f} s at step {step} for the previous checkpoint: saves take longer than the time "
                "between them. Save less often, or set checkpoint.when_busy to skip"
            )
            self._reporter.note(NoteType.CHECKPOINT_WAITED, text, step=step, seconds=seconds)

    def _report_skipped(self, step: int) -> None:
        """If due saves were skipped since the last report, report their number as a note."""
        if self._skipped:
            left = pluralize(self._skipped, "due checkpoint")
            text = f"{left} before step {step} skipped: the previous one was still being written"
            self._reporter.note(NoteType.CHECKPOINT_SKIPPED, text, step=step, skipped=self._skipped)
            self._skipped = 0
