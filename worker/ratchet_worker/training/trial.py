"""A trial run (``trial`` of the spec, for ``ratchet prove``): where it ends, what it has exercised, its faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_hooks.summary import HookPhase
from ratchet_worker.coordination.stop_agreement import Agreement

_EXTRA_STEPS: Final = 8
"""Steps after the first end of an epoch, evaluation or start of the hook: enough for a kill there and for redoing some steps."""
_STEPS_WITHOUT_EPOCHS: Final = 60
_MAX_WARM_UP_STEPS: Final = 200
"""Maximum number of warm-up steps that a trial waits for; a longer warm-up is reported as not exercised."""
_MAX_STEPS: Final = 1000


@dataclass
class Exercised:
    """What a trial has reached. ``epoch_ends``, ``evaluations``: numbers of the steps at which an epoch ended or an evaluation
    ran. ``phases``: by phase of the hook, its first step. ``batches``: the largest number of batches in one step."""

    epoch_ends: list[int] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)
    batches: int = 0


class Trial:
    """The trial in one rank's attempt, if the job is one. ``expects_evaluation``: the loop itself will evaluate at some time."""

    def __init__(self, launch: LaunchFile, rank: int) -> None:
        self._spec = launch.spec.trial
        self._fault = next((fault for fault in launch.faults if fault.rank == rank), None)
        self.exercised = Exercised()
        self.expects_evaluation = False
        self._epoch: int | None = None
        self._batches = 0

    @property
    def is_active(self) -> bool:
        """True if this job is a trial."""
        return self._spec is not None

    # --- what happens --------------------------------------------------------------------------------------------------

    def count_batches(self, count: int = 1) -> None:
        """Record that the open step has taken ``count`` more batches."""
        self._batches += count

    def record_step(self, step: int, epoch: int | None, phase: HookPhase) -> None:
        """Record a finished step. ``epoch``: the epoch of the data, None without data; ``phase``: the hook's phase in the
        step."""
        seen = self.exercised
        seen.batches, self._batches = max(seen.batches, self._batches), 0
        seen.phases.setdefault(phase, step)
        if epoch is not None and self._epoch is not None and epoch > self._epoch:
            seen.epoch_ends.append(step)
        self._epoch = epoch

    def begin(self, epoch: int | None) -> None:
        """Record that training begins in ``epoch`` of the data; None without data."""
        self._epoch = epoch

    def record_evaluation(self, step: int, drain: Callable[[], object]) -> None:
        """Record an evaluation after ``step`` steps. May kill this process, as planned, after ``drain`` has completed a save."""
        if step and self.exercised.evaluations[-1:] != [
            step
        ]:  # some scripts try out their evaluation before the first step
            self.exercised.evaluations.append(step)
        if self._due(step, "kill-in-evaluation"):
            drain()
            _kill_self()

    def facts(self, step: int, total: int | None, schedulers: dict[str, int]) -> dict[str, Any]:
        """Return the fields of the event on what the trial has exercised. ``schedulers``: by name, how often each was stepped."""
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

    def is_over(self, step: int) -> bool:
        """True if the job is a trial and ends after ``step``. It ends at ``trial.end_at``. If that is ``auto``, it ends some
        steps after everything expected was exercised, and at the latest after ``_MAX_STEPS`` steps."""
        if self._spec is None:
            return False
        if self._spec.end_at != "auto":
            return step >= self._spec.end_at
        # From values that are the same on all ranks: they end after the same step.
        seen = self.exercised
        if step >= _MAX_STEPS:
            return True
        waits = [*seen.epoch_ends[:1], *seen.evaluations[:1], *(s for p, s in seen.phases.items() if p != "warm-up")]
        epochs = 2 if not seen.evaluations else 1  # a user's own loop may evaluate after each second epoch, or never
        ended = step >= _STEPS_WITHOUT_EPOCHS if self._epoch is None else len(seen.epoch_ends) >= epochs
        awaited = self.expects_evaluation and not seen.evaluations
        warm = set(seen.phases) == {"warm-up"} and step < _MAX_WARM_UP_STEPS
        return ended and not awaited and not warm and step >= max(waits, default=0) + _EXTRA_STEPS

    # --- faults --------------------------------------------------------------------------------------------------------

    def inject_fault(
        self, step: int, drain: Callable[[], object], start_step: Callable[[int], None], agreement: Agreement
    ) -> None:
        """Inject the fault that is planned for this rank after ``step`` steps, if any. The fault is a kill of the rank, a kill of
        its agent, or a stop. After a kill, this call never returns."""
        if self._due(step, "kill-rank"):
            drain()
            _kill_self()
        if self._due(step, "kill-agent"):
            drain()
            start_step(step + 1)  # the sign for the agent
            threading.Event().wait()
        if self._due(step, "preempt"):
            self._fault = None
            agreement.request_stop(Cause.SIGTERM)
            agreement.wait_for_decision()

    def _due(self, step: int, kind: str) -> bool:
        """True if a fault of this ``kind`` is planned after ``step``."""
        fault = self._fault
        return fault is not None and fault.kind == kind and fault.step == step


def _kill_self() -> NoReturn:
    """Kill this process by SIGKILL; never returns."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
    raise AssertionError
