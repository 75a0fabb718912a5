"""Does anything but ``optimizer.step()`` change the parameters? Tried once, before the first overlapped copy of an attempt.

Torch counts in-place changes of a tensor, but not those through ``tensor.data``. So behind an attempt's first step the
parameters' digest is taken, and again when the next step is about to change them. Where the two differ the state is copied
before a step begins, not beside it. Code that changes them now and then only passes: that is what ``checkpoint.staging:
blocking`` is for.
"""

from __future__ import annotations

from ratchet_worker.snapshot import Until, digest, flat
from ratchet_worker.sources import Source


class Audit:
    """``begin`` at a boundary, ``end`` before the next ``optimizer.step()``; ``changed`` is then known."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = [s for s in sources if s.until is Until.STEP]
        self._before = [_digest(s) for s in self._sources]

    def changed(self) -> str | None:
        """The first tensor that is not what it was; None: all are."""
        for source, before in zip(self._sources, self._before, strict=True):
            if _digest(source) != before:
                return source.name
        return None


def _digest(source: Source) -> str:
    return digest([flat(source.tensor)[source.start : source.stop]])
