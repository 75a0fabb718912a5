"""Which checkpoints are kept by ``checkpoint.keep_last``, ``keep_every`` and ``keep_best``; without disk access.

- The newest ``keep_last``, at least two, are kept, and pinned ones in addition.
- Steps that are multiples of ``keep_every`` are kept permanently.
- The ``keep_best.count`` best values of the metric are kept.
- A checkpoint saved before any scheduled one (``first``) counts neither among the newest nor among the best. Once two other
  unpinned ones exist, only a pin or ``keep_every`` keeps it.
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
    """The retention rules of one job's spec; the module describes them."""

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
        """Return the checkpoints to delete, in the order of ``checkpoints``, which is newest first. ``values``: the metric's
        value of each checkpoint, where known. ``pinned``: checkpoints that are kept in any case. ``first``: checkpoints saved
        before any scheduled one."""
        free = [one for one in checkpoints if one not in pinned and one not in first]
        best = self.best_of([one for one in checkpoints if one not in first], values)
        gone = {*free[max(self.keep_last, MIN_KEEP) :], *(first if len(free) >= MIN_KEEP else ())}
        return [
            one
            for one in checkpoints
            if one in gone and one not in pinned and not self.is_permanent(one) and one not in best
        ]

    def best_of(self, checkpoints: Sequence[Id], values: Mapping[Id, float]) -> list[Id]:
        """Return up to ``keep_best.count`` checkpoints with the best values, best first. Those without a value or with NaN are
        left out."""
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
