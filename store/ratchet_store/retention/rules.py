"""Which checkpoints are kept: the rules of ``checkpoint.keep_last``, ``keep_every`` and ``keep_best``, without disk access.

The rules, which ``retention.attempt_retention``, the service's ``checkpoints.cleanup`` and runs without a service apply:

- The newest ``keep_last`` (never fewer than two) are kept. Pinned checkpoints are kept, too, and are not counted among them.
- Steps that are multiples of ``keep_every`` are kept permanently.
- The ``keep_best.count`` best values of the metric are kept. A checkpoint's value is the one that was logged at exactly its step,
  by the attempt that wrote it, or by one that started from it (an evaluation may follow the save, and runs again after a stop
  cut it short). No value, or NaN: never among the best. Of equal values the newer checkpoint is the better one.
- One saved before any scheduled one (``first``) is counted among none of these, and is deleted when two unpinned others exist,
  unless it is pinned or its step is a multiple of ``keep_every``.
- The three rules are independent: each selects its own checkpoints, and one that two of them select is kept once.
- Nothing is deleted before its replacement is committed: the rules are applied after a commit, or once nothing runs any more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.spec.checkpoint import BestSpec, CheckpointSpec

Id = tuple[int, int]
"""Step and attempt."""
MIN_KEEP: Final = 2


@dataclass(frozen=True)
class Rules:
    """The retention rules of one job's spec: ``checkpoint.keep_last``, ``keep_every`` and ``keep_best`` decide which
    checkpoints are kept. The module describes each rule."""

    keep_last: int
    keep_every: int | None = None
    keep_best: BestSpec | None = None

    @classmethod
    def from_spec(cls, spec: CheckpointSpec) -> Rules:
        return cls(spec.keep_last, spec.keep_every, spec.keep_best)

    def surplus(
        self,
        checkpoints: Sequence[Id],
        values: Mapping[Id, float],
        pinned: Collection[Id] = (),
        first: Collection[Id] = (),
    ) -> list[Id]:
        """Return the checkpoints that no rule keeps, in the order of ``checkpoints``, which is newest first. Nothing is
        deleted.

        ``values``: the metric's value by checkpoint, where it is known. ``pinned``: checkpoints that are kept and not counted
        among the newest ``keep_last``. ``first``: checkpoints that were saved before any scheduled one; they count neither
        among the newest nor among the best. They are returned once two unpinned others exist, unless they are pinned or
        permanent.
        """
        free = [one for one in checkpoints if one not in pinned and one not in first]
        best = self.best_of([one for one in checkpoints if one not in first], values)
        gone = {*free[max(self.keep_last, MIN_KEEP) :], *(first if len(free) >= MIN_KEEP else ())}
        return [
            one
            for one in checkpoints
            if one in gone and one not in pinned and not self.is_permanent(one) and one not in best
        ]

    def best_of(self, checkpoints: Sequence[Id], values: Mapping[Id, float]) -> list[Id]:
        """Return up to ``keep_best.count`` of ``checkpoints``, those with the best values by ``keep_best.mode``, best first.
        Checkpoints without a value, or with NaN, are left out. Empty if the spec has no ``keep_best``."""
        if self.keep_best is None:
            return []
        sign = 1.0 if self.keep_best.mode == "min" else -1.0
        ranked = [(sign * values[one], -one[0], -one[1], one) for one in checkpoints if _is_comparable(values.get(one))]
        return [one for *_, one in sorted(ranked)[: self.keep_best.count]]

    def is_permanent(self, checkpoint: Id) -> bool:
        """True if the checkpoint's step is a multiple of ``keep_every``, so that no rule ever deletes it."""
        return self.keep_every is not None and checkpoint[0] % self.keep_every == 0


def _is_comparable(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
