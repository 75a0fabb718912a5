"""Epochs over a loader other than a DataLoader over a map-style data set, read through a ``TrainStream``, one batch ahead.

Whether an epoch has another batch is known only once that batch is read. So it is read before the step of the previous batch
ends; it counts as handed out only when it is handed out, and a resume reads it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ratchet_worker.data.loader_position import LoaderPosition
from ratchet_worker.data.streams import TrainStream


class StreamPosition(LoaderPosition):
    """The position of ``loader``; implements ``TrainData`` and has the methods of ``SamplerPosition``. A ``loader`` with
    ``state_dict`` and ``load_state_dict`` is restored by these methods. Any other is restored by skipping the used batches, which
    is exact if these are the same again."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.stream = TrainStream(loader, repeatable=not hasattr(loader, "state_dict"))
        self.stream.endless = False
        self.own_generators = self.stream.own_generators
        self._source: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self._ahead_recorded = False
        self._resumed_within_epoch = False

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.stream.epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that were handed out."""
        return self.stream.position - len(self._ahead)

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report; None if a resume repeats every batch exactly."""
        return (
            self.stream.inexact_reason
            or (self.numbering_problem if self._resumed_within_epoch else None)
            or self._other_length
        )

    def data_digest(self) -> str | None:
        """The digest that identifies the stream's data, None without one."""
        return self.stream.data_digest()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the epoch; at position 0, first begin a pass."""
        if not self.position:
            self.begin(self.epoch)
        while self.has_more():
            yield self.take()

    def begin(self, epoch: int) -> None:
        """Begin a pass over the loader, which counts as epoch number ``epoch``; a pass that has not ended is abandoned."""
        if self.stream.position:
            self.stream.end_epoch()
        self.stream.epoch, self._ahead = epoch, []
        self._source = iter(self.stream)

    def has_more(self) -> bool:
        """True if the epoch has another batch. Reads that batch ahead, unless it is read already."""
        if not self._ahead:
            self._ahead = list(islice(self._source, 1))
        return bool(self._ahead)

    def take(self) -> Any:
        """Return the next batch; call ``has_more`` first."""
        return self._ahead.pop()

    def end(self) -> None:
        """End the pass: the position is then the beginning of the next epoch."""
        self._ahead = []
        if self.stream.position:
            self.stream.end_epoch()
        else:
            self.stream.epoch += 1

    def reach(self) -> None:
        """Move to the recorded position, after ``load_state_dict`` and ``own_generators.load``; reads batches again. Raises as
        ``TrainStream.reach`` does."""
        self.stream.reach()
        if not self.stream.position:
            return
        self._resumed_within_epoch = True
        self._source = iter(self.stream)
        count, last = self.stream.replayed
        if self._ahead_recorded:
            self._ahead, self._ahead_recorded = [last], False
        used = f"{count - len(self._ahead)} batches"
        self._resume_note = (
            f"skipped {used}" if self.stream.resume_mode == "skip" else f"position restored, {used} replayed"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state: that of the stream, which counts the batch read ahead as taken, whether there is such a batch
        (``ahead``), ``numbering_problem`` (``numbers``) and ``length``."""
        ahead = bool(self._ahead) or self._ahead_recorded
        return {
            **self.stream.state_dict(),
            "ahead": ahead,
            "numbers": self.numbering_problem,
            "length": self.steps_per_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a recorded position, which ``reach`` moves to. Raises ``ValueError`` for another kind of state."""
        if "ahead" not in state:
            raise ValueError(
                f"the data position was recorded for {state.get('kind')!r}, this is a loader that is read ahead"
            )
        own = ("ahead", "numbers", "length")
        self.stream.load_state_dict({name: value for name, value in state.items() if name not in own})
        self._compare_length(state)
        self._ahead, self._ahead_recorded = [], bool(state["ahead"]) and self.stream.position > 0
        self.numbering_problem, self._resumed_within_epoch = state["numbers"], False

    def restart_epoch(self, state: dict[str, Any]) -> bool:
        """Move to the beginning of the epoch of ``state``, for another number of ranks. Returns True if batches of that epoch had
        been taken."""
        self.stream.epoch = state["epoch"]
        return bool(state.get("taken"))
