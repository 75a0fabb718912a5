"""The base class of ``SamplerPosition`` and ``StreamPosition``: the length of an epoch, and whether a resume is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LoaderPosition:
    """Base class for this rank's position in the training's ``loader``. ``numbering_problem``: a sentence if the loop's batch
    numbers would be wrong after a resume."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.numbering_problem: str | None = None
        self._resume_note: str | None = None
        self._other_length: str | None = None  # a sentence if it differs from the recorded length

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of an epoch; None if the loader has no length."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def _compare_length(self, state: Mapping[str, Any]) -> None:
        """Compare the length of an epoch in ``state`` with the loader's. If they differ, keep a sentence for
        ``inexact_reason``."""
        before, now = state.get("length"), self.steps_per_epoch
        differs = before is not None and now is not None and before != now
        self._other_length = (
            f"an epoch had {before} batches, and now has {now}: data, batch size or sampler differ" if differs else None
        )

    @property
    def exact(self) -> bool:
        """True unless ``inexact_reason`` has a reason."""
        return self.inexact_reason is None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report on why a resume may not repeat every batch exactly; None if no reason is known.
        Implemented by the subclasses."""
        raise NotImplementedError

    @property
    def resume_note(self) -> str | None:
        """How the last resume reached its position, for a message; None if there is nothing to report."""
        return self._resume_note
