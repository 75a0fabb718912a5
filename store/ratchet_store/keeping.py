"""Which checkpoints stay: the rule of ``checkpoint.keep_last``, ``keep_every`` and ``keep_best``, without a disk.

What it says, and ``retain`` and ``keeper`` carry out:

- The newest ``keep_last`` (never fewer than two) stay. What is pinned stays too, and is not counted among them.
- Steps that are multiples of ``keep_every`` stay for good.
- The ``keep_best.count`` best values of the metric stay. A checkpoint's value is the one that was logged at exactly its step,
  by the attempt that wrote it, or by one that started from it (an evaluation may follow the save, and runs again after a stop
  cut it short). No value, or NaN: never among the best. Of equal values the newer checkpoint is the better one.
- One saved before any scheduled one (``first``) is counted among none of these, and goes when two others are there, unless
  it is pinned or its step a multiple of ``keep_every``.
- The three do not take from one another: each keeps its own, and what two of them keep is kept once.
- Nothing goes before what took its place is committed: the rule is asked after a commit, or once nothing runs any more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.spec_checkpoint import BestSpec, CheckpointSpec

Id = tuple[int, int]
"""Step and epoch."""
MIN_KEEP: Final = 2


@dataclass(frozen=True)
class Rules:
    """What a spec asks to keep."""

    last: int
    every: int | None = None
    best: BestSpec | None = None

    @classmethod
    def of(cls, spec: CheckpointSpec) -> Rules:
        return cls(spec.keep_last, spec.keep_every, spec.keep_best)

    def surplus(
        self,
        found: Sequence[Id],
        values: Mapping[Id, float],
        pinned: Collection[Id] = (),
        first: Collection[Id] = (),
    ) -> list[Id]:
        """Those of ``found`` (newest first) that nothing keeps, in their order. ``first``: saved before any scheduled one."""
        free = [one for one in found if one not in pinned and one not in first]
        best = self.best_of([one for one in found if one not in first], values)
        gone = {*free[max(self.last, MIN_KEEP) :], *(first if len(free) >= MIN_KEEP else ())}
        return [
            one for one in found if one in gone and one not in pinned and not self.for_good(one) and one not in best
        ]

    def best_of(self, found: Sequence[Id], values: Mapping[Id, float]) -> list[Id]:
        """The best of ``found``, best first; empty where none is asked for or none has a value."""
        if self.best is None:
            return []
        sign = 1.0 if self.best.mode == "min" else -1.0
        ranked = [(sign * values[one], -one[0], -one[1], one) for one in found if _counts(values.get(one))]
        return [one for *_, one in sorted(ranked)[: self.best.count]]

    def for_good(self, one: Id) -> bool:
        """Is its step a multiple of ``keep_every``?"""
        return self.every is not None and one[0] % self.every == 0


def _counts(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
