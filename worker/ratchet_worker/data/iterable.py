"""Users' own streams as training data: exact where the stream can give its position, honest where it cannot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ratchet_worker.data.augment import process_generators_kept
from ratchet_worker.data.own_generators import OwnGenerators


class TrainStream:
    """Batches of this rank from any iterable; fits ``TrainData``. One pass over the iterable is one epoch.

    Batches are taken one by one, in this process, never ahead. What a resume can do depends on the iterable:

    - With ``state_dict()`` and ``load_state_dict(state)`` (JSON values): exact. Both speak of the point after the last batch that
      was handed out, so a generator must move its position on *before* it yields; this is checked at the first batch.
    - Without, but ``repeatable=True``: the caller promises that every ``iter()`` gives the same batches for the same epoch,
      whatever the random generators stand at (``set_epoch(epoch)`` is called first if there is such a method). Batches already
      used are read and thrown away; the rank's generators are as before afterwards, and those that the stream holds for itself
      (a ``DataLoader``'s ``generator``) begin the epoch as they did. Exact, at the price of reading them again.
    - Otherwise: the stream starts over. ``exact`` is False, and ``inexact_reason`` says why.

    Splitting the stream over ranks, and ending after the same number of batches on each, is the iterable's affair.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        repeatable: bool = False,
        steps_per_epoch: int | None = None,
        digest: str | None = None,
    ) -> None:
        self.stream, self.steps_per_epoch = stream, steps_per_epoch
        self.epoch = 0
        self._taken = 0
        self._digest = digest
        self._run = 0
        self._restored = False
        has = [hasattr(stream, name) for name in ("state_dict", "load_state_dict")]
        if any(has) and not all(has):
            raise TypeError(f"{type(stream).__name__} has only one of state_dict and load_state_dict; it needs both")
        self._way = "state" if all(has) else "skip" if repeatable else "anew"
        self.own_generators = OwnGenerators({"stream": stream} if self._way == "skip" else {})

    @property
    def exact(self) -> bool:
        return self._way != "anew"

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report; None where the stream resumes exactly."""
        if self.exact:
            return None
        return (
            f"{type(self.stream).__name__} cannot give its position, so it starts over at a resume; give it state_dict() and "
            "load_state_dict(), or say repeatable=True if it always yields the same batches"
        )

    def data_digest(self) -> str | None:
        """What the caller said names the data."""
        return self._digest

    def __iter__(self) -> Iterator[Any]:
        self._run += 1
        return self._batches(self._run)

    def _batches(self, run: int) -> Iterator[Any]:
        if run != self._run:
            return
        began_at = self._taken
        before = self._stream_state() if self._way == "state" and began_at == 0 else None
        for batch in self._from_position():
            if run != self._run:
                return
            self._taken += 1
            if before is not None and self._taken == 1 and self._stream_state() == before:
                raise TypeError(
                    f"{type(self.stream).__name__}.state_dict() is the same before and after a batch: move the position on "
                    "before the batch is yielded, not after"
                )
            yield batch
        if run != self._run:
            return
        was_at_the_end = self._taken == began_at > 0
        self.epoch, self._taken = self.epoch + 1, 0
        self.own_generators.end()
        if was_at_the_end:  # restored after the last batch of an epoch, which only now shows
            yield from self._batches(run)

    def _from_position(self) -> Iterator[Any]:
        set_epoch = getattr(self.stream, "set_epoch", None)
        if set_epoch is not None and not (self._way == "state" and self._restored):
            set_epoch(self.epoch)
        self._restored = False
        self.own_generators.begin(again=self._taken > 0)
        if self._way != "skip" or self._taken == 0:
            return iter(self.stream)
        with process_generators_kept():
            source = iter(self.stream)
            for n in range(self._taken):
                try:
                    next(source)
                except StopIteration:
                    raise ValueError(
                        f"{type(self.stream).__name__} was said to be repeatable, but ended after {n} batches where "
                        f"{self._taken} had been used before"
                    ) from None
        return source

    def _stream_state(self) -> Any:
        state = self.stream.state_dict()  # type: ignore[attr-defined]
        try:
            # A copy by value: the stream may hand out a dict that it goes on changing.
            return json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{type(self.stream).__name__}.state_dict() must be made of JSON values: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """JSON: epoch, batches taken in it, and the stream's own state if it has one."""
        state: dict[str, Any] = {"kind": "stream", "way": self._way, "epoch": self.epoch, "taken": self._taken}
        if self._way == "state":
            state["stream"] = self._stream_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a recorded point, as exactly as the stream allows. Raises ``ValueError`` for the state of something else."""
        if state.get("kind") != "stream" or state.get("way") != self._way:
            raise ValueError(
                f"the data position was recorded for {state.get('kind')!r}/{state.get('way')!r}, this is 'stream'/{self._way!r}"
            )
        self._run += 1
        self.epoch, self._taken = int(state["epoch"]), int(state["taken"])
        if self._way == "state":
            self.stream.load_state_dict(state["stream"])  # type: ignore[attr-defined]
            self._restored = True
        elif self._way == "anew":
            self._taken = 0
