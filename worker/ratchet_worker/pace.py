"""What an attempt's own pace makes of its step deadline, while it runs (``ratchet_contract.deadlines`` has the rule and its
reasons). Times are in seconds."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ratchet_contract.deadlines import ENOUGH, SETTLED_SECONDS, Deadlines, Pace, learned
from ratchet_worker.counter import Stage

_LEARNED: Final = (Stage.TRAINING, Stage.EVALUATING, Stage.CHECKPOINTING)


class Learner:
    """Of one node's ranks. ``before``: what earlier attempts have shown."""

    def __init__(self, deadlines: Deadlines, before: Pace | None = None) -> None:
        self.deadlines = deadlines
        earlier = before.silences if before is not None else {}
        self._longest = {stage: earlier.get(stage.name.lower(), 0.0) for stage in _LEARNED}
        self._own: dict[Stage, float] = {}
        self._count: dict[Stage, Counter[int]] = {
            stage: Counter() for stage in _LEARNED
        }  # by rank: they are silent together
        self._visits: dict[tuple[int, Stage], int] = {}
        self._startup: float | None = None
        self._trained_since: float | None = None
        self._trained = 0.0  # until the last sign of progress: a silence that lasts is no training

    def started(self, seconds: float, now: float) -> None:
        """All ranks have finished a first step, ``seconds`` after their start."""
        self._startup = max(self._startup or 0.0, seconds)
        self._trained_since, self._trained = now, 0.0

    def enters(self, rank: int, stage: Stage) -> None:
        self._visits[rank, stage] = self._visits.get((rank, stage), 0) + 1

    def heard(self, rank: int, stage: Stage, silence: float, now: float) -> None:
        """``rank`` gets on after it was silent in ``stage``. Who was silent for longer than its deadline and was not ended waited
        for others that moved: that tells nothing of a hang."""
        first = stage is not Stage.TRAINING and self._visits.get((rank, stage), 0) < 2
        usual = silence <= self.deadline(stage)
        if self._trained_since is not None:
            self._trained = max(self._trained, now - self._trained_since)
        if stage not in self._count or first or not usual:
            return
        self._count[stage][rank] += 1
        self._own[stage] = max(self._own.get(stage, 0.0), silence)
        self._longest[stage] = max(self._longest[stage], silence)

    def deadline(self, stage: Stage) -> float:
        """How long a rank may be silent in ``stage``."""
        ceiling, settled = self.deadlines.step, self._trained >= SETTLED_SECONDS
        seen = max(self._count[stage].values(), default=0) if stage in self._count else 0
        if not self.deadlines.learns or not settled or seen < ENOUGH:
            return ceiling
        return learned(self._longest[stage], ceiling)

    def why(self, stage: Stage) -> str:
        """Where the deadline of ``stage`` comes from, for people."""
        seconds = self.deadline(stage)
        if seconds < self.deadlines.step:
            return (
                f"step_deadline ({seconds:.3g} s, learned: the longest silence before was {self._longest[stage]:.2g} s)"
            )
        return f"step_deadline ({seconds:g} s)"

    def pace(self, *, hung: bool) -> Pace | None:
        """What this attempt has shown; None where that is nothing at all."""
        if self._startup is None and not self._own and not hung:
            return None
        silences = {stage.name.lower(): round(seconds, 3) for stage, seconds in self._own.items()}
        startup = None if self._startup is None else round(self._startup, 3)
        return Pace(startup=startup, silences=silences, hung=hung)
