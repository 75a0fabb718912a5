"""What ``SamplerPosition`` and ``StreamPosition`` have in common: the facts of a loader whose epochs are trained over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LoaderPosition:
    """Of ``loader``. ``numbers``: what is wrong with the loop's own numbers of batches after a resume."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.numbers: str | None = None
        self._told: str | None = None
        self._other_length: str | None = None  # than recorded

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of an epoch; None where the loader does not know."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def _compare_length(self, state: Mapping[str, Any]) -> None:
        before, now = state.get("length"), self.steps_per_epoch
        differs = before is not None and now is not None and before != now
        self._other_length = (
            f"an epoch had {before} batches, and now has {now}: data, batch size or sampler are others"
            if differs
            else None
        )

    @property
    def exact(self) -> bool:
        return self.inexact_reason is None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report; None where every batch comes again as it was."""
        raise NotImplementedError

    @property
    def told(self) -> str | None:
        """How the last resume came to its position."""
        return self._told
