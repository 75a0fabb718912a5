"""A trial run (``trial`` of the spec, as ``ratchet prove`` submits it): where it ends, what it has exercised, and its faults.

Everything here follows from step numbers and from what all ranks see alike, so that all ranks end after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from ratchet_contract.messages import LaunchFile
from ratchet_contract.phases import Cause
from ratchet_hooks.summary import HookPhase
from ratchet_worker.agreement import Agreement

_BEHIND: Final = 8
"""Steps behind the first end of an epoch, evaluation or start of the hook: enough to be killed there and to do some again."""
_WITHOUT_EPOCHS: Final = 60
_HOOK_STARTS: Final = 200
"""Steps of a warm-up that a trial waits for; a longer one is told as not exercised."""
_MOST: Final = 1000


@dataclass
class Exercised:
    """What a run has come by, in numbers of steps that were done then. ``batches``: the most that one step has used."""

    epoch_ends: list[int] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)
    batches: int = 0


class Trial:
    """Of one rank's attempt. ``expects_evaluation``: the loop has an evaluation that comes by itself, sooner or later."""

    def __init__(self, launch: LaunchFile, rank: int) -> None:
        self._spec = launch.spec.trial
        self._fault = next((fault for fault in launch.faults if fault.rank == rank), None)
        self.exercised = Exercised()
        self.expects_evaluation = False
        self._epoch: int | None = None
        self._batches = 0

    @property
    def under_way(self) -> bool:
        """Is this job a trial?"""
        return self._spec is not None

    # --- what happens --------------------------------------------------------------------------------------------------

    def batch(self, count: int = 1) -> None:
        """The open step has taken ``count`` batches more."""
        self._batches += count

    def step_done(self, step: int, epoch: int | None, phase: HookPhase) -> None:
        """``epoch``: of the data, None where there are none."""
        seen = self.exercised
        seen.batches, self._batches = max(seen.batches, self._batches), 0
        seen.phases.setdefault(phase, step)
        if epoch is not None and self._epoch is not None and epoch > self._epoch:
            seen.epoch_ends.append(step)
        self._epoch = epoch

    def begins(self, epoch: int | None) -> None:
        """Training begins in this epoch of the data."""
        self._epoch = epoch

    def evaluates(self, step: int, drain: Callable[[], object]) -> None:
        """An evaluation begins when so many steps are done; asked for with each of its batches, too."""
        if step and self.exercised.evaluations[-1:] != [step]:  # before the first step some try their evaluation out
            self.exercised.evaluations.append(step)
        if self._due(step, "kill-in-evaluation"):
            drain()
            _die()

    def facts(self, step: int, total: int | None, schedulers: dict[str, int]) -> dict[str, Any]:
        """For an event of the job. ``schedulers``: how often each was stepped."""
        seen = self.exercised
        return {
            "step": step,
            "total": total,
            "phases": seen.phases,
            "epoch_ends": seen.epoch_ends[:100],
            "evaluations": seen.evaluations[:100],
            "expects_evaluation": self.expects_evaluation,
            "batches": seen.batches,
            "schedulers": schedulers,
            "epochs": self._epoch is not None,
        }

    # --- the end -------------------------------------------------------------------------------------------------------

    def over(self, step: int) -> bool:
        """Does the job end after this step? The same on all ranks."""
        if self._spec is None:
            return False
        if self._spec.end_at != "auto":
            return step >= self._spec.end_at
        seen = self.exercised
        if step >= _MOST:
            return True
        waits = [*seen.epoch_ends[:1], *seen.evaluations[:1], *(s for p, s in seen.phases.items() if p != "warm-up")]
        epochs = (
            2 if not seen.evaluations else 1
        )  # a loop of the user's own may evaluate after each second epoch, or never
        ended = step >= _WITHOUT_EPOCHS if self._epoch is None else len(seen.epoch_ends) >= epochs
        awaited = self.expects_evaluation and not seen.evaluations
        warm = set(seen.phases) == {"warm-up"} and step < _HOOK_STARTS
        return ended and not awaited and not warm and step >= max(waits, default=0) + _BEHIND

    # --- faults --------------------------------------------------------------------------------------------------------

    def strike(
        self, step: int, drain: Callable[[], object], start_step: Callable[[int], None], agreement: Agreement
    ) -> None:
        """Between two steps, when ``step`` steps are done. ``drain``: what is being saved is saved before."""
        if self._due(step, "kill-rank"):
            drain()
            _die()
        if self._due(step, "kill-agent"):
            drain()
            start_step(step + 1)  # by which the agent knows
            threading.Event().wait()
        if self._due(step, "preempt"):
            self._fault = None
            agreement.ask(Cause.SIGTERM)
            agreement.wait_decided()

    def _due(self, step: int, kind: str) -> bool:
        fault = self._fault
        return fault is not None and fault.kind == kind and fault.step == step


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
    raise AssertionError
