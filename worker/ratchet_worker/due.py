"""What is due at a step boundary, the same on all ranks: by the step alone, or as rank 0's schedule decides and tells."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

from ratchet_contract.errors import UserError
from ratchet_contract.plural import counted
from ratchet_contract.spec_checkpoint import CheckpointSpec
from ratchet_worker.exchange import Exchange
from ratchet_worker.reporter import Reason, Reporter
from ratchet_worker.schedule import Schedule, early_due, first_due

_TOLD: Final = 1.0  # seconds of waiting for the save before, from which on it is told


class Due:
    """``next``: the first step at which something may be due. ``schedule``: rank 0's, else None. ``early``: there is nothing to
    resume from yet, so that a save may be due before the first scheduled one."""

    def __init__(
        self, spec: CheckpointSpec, exchange: Exchange, reporter: Reporter, step: int, *, early: bool = False
    ) -> None:
        self._spec, self._exchange, self._reporter = spec, exchange, reporter
        self.schedule = Schedule(spec, step) if exchange.rank == 0 else None
        self._early = early_due(spec, step) if early else math.inf  # as ``next``, before the first scheduled save
        self.next = min(first_due(spec, step), self._early)
        self._plans = 0
        self._plans_read = 0  # by all ranks, once the present save has succeeded
        self._plans_gone = 0  # from the store
        self._skipped = 0

    def at(
        self, step: int, busy: bool, drain: Callable[[], object], seconds: Callable[[], float | None]
    ) -> Reason | None:
        """Why ``step``, which is not before ``next``, is saved; None: it is not. ``busy``: the save before is under way;
        ``drain`` waits for it; ``seconds``: what the save before the first scheduled one is expected to take, None: it is not
        wanted any more.

        Raises ``UserError`` where the ranks are not at the same step.
        """
        plan: dict[str, Any] = {}
        early = step >= self._early
        if self.schedule is not None:
            plan = self._decide(self.schedule, step, busy, drain, seconds)
        if early or self._agreed():
            plan = self.told(plan)
            if plan["step"] != step:
                raise UserError(
                    f"rank {self._exchange.rank} has done step {step} when rank 0 has done {plan['step']}: all ranks do the same "
                    "steps"
                )
        else:
            plan = {"save": "schedule", "due": first_due(self._spec, step), "early": None}
        self._early = math.inf if plan["early"] is None else plan["early"]
        self.next = min(math.inf if plan["due"] is None else plan["due"], self._early)
        reason: Reason | None = plan["save"]
        return reason

    def told(self, value: Any) -> Any:
        """Rank 0's ``value``, on all ranks."""
        self._plans += 1
        return self._exchange.broadcast(f"plan/{self._plans}", value)

    def save_begins(self) -> None:
        """All ranks will tell of a save: by then they have read what was told until now."""
        self._plans_read = self._plans

    def save_succeeded(self) -> None:
        """All have told of it. What they have read may go from the store, which is rank 0's work."""
        while self.schedule is not None and self._plans_gone < self._plans_read:
            self._plans_gone += 1
            self._exchange.forget_broadcast(f"plan/{self._plans_gone}")

    def _agreed(self) -> bool:
        """Must rank 0 be asked? Not where what is due follows from the step alone."""
        by_steps = isinstance(self._spec.every_steps, int) and self._spec.every_seconds is None
        return not by_steps or self._spec.when_busy == "skip"

    def _decide(
        self,
        schedule: Schedule,
        step: int,
        busy: bool,
        drain: Callable[[], object],
        seconds: Callable[[], float | None],
    ) -> dict[str, Any]:
        due, early, reason = schedule.due(step), self._early, None
        if due:
            early = math.inf
        elif step >= early:
            wanted = seconds()
            early = math.inf if wanted is None else schedule.early(step, wanted)
            if early == step:
                early, reason = math.inf, "first"
        if due and busy and self._spec.when_busy == "skip":
            self._skipped += 1
            schedule.left_out(step)
            due = False
        elif due:
            if busy:
                self._tell_waiting(step, drain)
            self._tell_skipped(step)
            schedule.began(step)
            reason = "schedule"
        following, before = schedule.following(step), schedule.interval
        if before is not None and self._spec.every_steps == "auto" and due:
            self._tell_interval(schedule)
        return {
            "step": step,
            "save": reason,
            "due": None if following == math.inf else following,
            "early": None if early == math.inf else early,
        }

    def _tell_interval(self, schedule: Schedule) -> None:
        seconds = schedule.save_seconds() or 0.0
        text = f"automatic schedule: every {schedule.interval} steps; a save takes {seconds:.3g} s from begin to end"
        self._reporter.note("checkpoint-interval", text, steps=schedule.interval, seconds=seconds)

    def _tell_waiting(self, step: int, drain: Callable[[], object]) -> None:
        begun = time.monotonic()
        drain()
        seconds = time.monotonic() - begun
        if seconds >= _TOLD:
            text = (
                f"training waited {seconds:.1f} s at step {step} for the checkpoint before: saves take longer than the time "
                "between them. Save less often, or set checkpoint.when_busy to skip"
            )
            self._reporter.note("checkpoint-waited", text, step=step, seconds=seconds)

    def _tell_skipped(self, step: int) -> None:
        if self._skipped:
            left = counted(self._skipped, "due checkpoint")
            text = f"{left} before step {step} left out: the one before was still being written"
            self._reporter.note("checkpoint-skipped", text, step=step, skipped=self._skipped)
            self._skipped = 0
