"""A training loop's passes over a loader that is no DataLoader over a map-style data set: by a ``TrainStream``, one batch ahead.

Whether an epoch has a further batch is known only when that is read. So one is read before the step of the batch before it ends;
it counts as handed out when it is, and is read again after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ratchet_worker.data.iterable import TrainStream
from ratchet_worker.data.loader_position import LoaderPosition


class StreamPosition(LoaderPosition):
    """Of ``loader``; fits ``TrainData``, and has the methods of ``SamplerPosition``. ``loader``: with ``state_dict`` and
    ``load_state_dict`` exact by these, else by skipping what was used, if it then gives the same."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.stream = TrainStream(loader, repeatable=not hasattr(loader, "state_dict"))
        self.stream.endless = False
        self.own_generators = self.stream.own_generators
        self._source: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self._ahead_recorded = False
        self._numbered = False

    @property
    def epoch(self) -> int:
        return self.stream.epoch

    @property
    def position(self) -> int:
        """Batches of the epoch that were handed out."""
        return self.stream.position - len(self._ahead)

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report."""
        return self.stream.inexact_reason or (self.numbers if self._numbered else None) or self._other_length

    def data_digest(self) -> str | None:
        return self.stream.data_digest()

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch, or the next one."""
        if not self.position:
            self.begin(self.epoch)
        while self.more():
            yield self.take()

    def begin(self, epoch: int) -> None:
        """A pass over the loader begins; the one before is given up, if it has not ended."""
        if self.stream.position:
            self.stream.end_epoch()
        self.stream.epoch, self._ahead = epoch, []
        self._source = iter(self.stream)

    def more(self) -> bool:
        """Is there a batch that was not handed out?"""
        if not self._ahead:
            self._ahead = list(islice(self._source, 1))
        return bool(self._ahead)

    def take(self) -> Any:
        """The next batch, behind ``more``."""
        return self._ahead.pop()

    def end(self) -> None:
        """The pass is over: from here on the position is the beginning of the next epoch."""
        self._ahead = []
        if self.stream.position:
            self.stream.end_epoch()
        else:
            self.stream.epoch += 1

    def reach(self) -> None:
        """After ``load_state_dict`` and ``own_generators.load``: go to the recorded position. Raises as the stream's."""
        self.stream.reach()
        if not self.stream.position:
            return
        self._numbered = True
        self._source = iter(self.stream)
        count, last = self.stream.read_again
        if self._ahead_recorded:
            self._ahead, self._ahead_recorded = [last], False
        used = f"{count - len(self._ahead)} batches"
        self._told = f"skipped {used}" if self.stream.way == "skip" else f"position restored, {used} replayed"

    def state_dict(self) -> dict[str, Any]:
        """The stream's, with the batch that was read ahead counted."""
        ahead = bool(self._ahead) or self._ahead_recorded
        return {**self.stream.state_dict(), "ahead": ahead, "numbers": self.numbers, "length": self.steps_per_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` for the state of something else."""
        if "ahead" not in state:
            raise ValueError(
                f"the data position was recorded for {state.get('kind')!r}, this is a loader that is read ahead"
            )
        own = ("ahead", "numbers", "length")
        self.stream.load_state_dict({name: value for name, value in state.items() if name not in own})
        self._compare_length(state)
        self._ahead, self._ahead_recorded = [], bool(state["ahead"]) and self.stream.position > 0
        self.numbers, self._numbered = state["numbers"], False

    def begin_again(self, state: dict[str, Any]) -> bool:
        """For another number of ranks: the beginning of the epoch of ``state``. True: batches of it were taken."""
        self.stream.epoch = state["epoch"]
        return bool(state.get("taken"))
