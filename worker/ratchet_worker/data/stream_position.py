"""Epochs over a loader that is read through a ``TrainStream``, one batch ahead, to know whether an epoch has another batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ratchet_worker.data.loader_position import LoaderPosition
from ratchet_worker.data.streams import TrainStream


class StreamPosition(LoaderPosition):
    """The position of ``loader``, with the methods of ``SamplerPosition``. A loader without ``state_dict`` is restored by reading
    the used batches again."""

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
        """The number of the current epoch, from 0."""
        return self.stream.epoch

    @property
    def position(self) -> int:
        """Number of batches of the epoch that were handed out. A batch that was read ahead does not count. After
        ``load_state_dict``, valid once ``reach`` has run."""
        return self.stream.position - len(self._ahead)

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report that says why a resume is not exact; None if no reason is known."""
        return (
            self.stream.inexact_reason
            or (self.numbering_problem if self._resumed_within_epoch else None)
            or self._other_length
        )

    def data_digest(self) -> str | None:
        """Return None: no digest identifies the data of a loader that is read as a stream."""
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
        """True if the pass that ``begin`` or ``reach`` has begun has another batch; this batch is then read ahead. If the result
        is False, the epoch has ended, and ``end`` must not be called."""
        if not self._ahead:
            self._ahead = list(islice(self._source, 1))
        return bool(self._ahead)

    def take(self) -> Any:
        """Return the batch that ``has_more`` has read ahead, and count it as handed out. Call ``has_more`` before each call."""
        return self._ahead.pop()

    def end(self) -> None:
        """End the pass, even if batches are left. Do not call it after ``has_more`` has returned False."""
        self._ahead = []
        if self.stream.position:
            self.stream.end_epoch()
        else:
            # After has_more() was False, the epoch has ended already, and this would skip one.
            self.stream.epoch += 1

    def reach(self) -> None:
        """Move to the recorded position; within an epoch, by reading batches again. If a difference is found, ``inexact_reason``
        says so. Raises ``ValueError`` if the stream ends too early."""
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
        """Return the stream's state with three more values. ``ahead``: whether the state counts a batch that was only read ahead.
        ``numbers``: ``numbering_problem``. ``length``: the number of batches in an epoch, None if not known."""
        ahead = bool(self._ahead) or self._ahead_recorded
        return {
            **self.stream.state_dict(),
            "ahead": ahead,
            "numbers": self.numbering_problem,
            "length": self.steps_per_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a recorded position; the caller then calls ``reach`` to move to it. Raises ``ValueError`` for another kind of
        state."""
        self.check_kind(state)
        own = ("ahead", "numbers", "length")
        self.stream.load_state_dict({name: value for name, value in state.items() if name not in own})
        self._compare_length(state)
        self._ahead, self._ahead_recorded = [], bool(state["ahead"]) and self.stream.position > 0
        self.numbering_problem, self._resumed_within_epoch = state["numbers"], False

    def check_kind(self, state: dict[str, Any]) -> None:
        """Raise ``ValueError`` unless ``state`` was recorded for this kind of data."""
        if state.get("kind") != "stream" or "ahead" not in state:
            raise ValueError(
                f"the data position was recorded for {state.get('kind')!r}, this is a loader that is read ahead"
            )

    def restart_epoch(self, state: dict[str, Any]) -> bool:
        """Make the epoch in ``state`` the current one; the position must be 0. Returns True if batches of that epoch had been
        read."""
        self.stream.epoch = state["epoch"]
        return bool(state.get("taken"))
