"""Users' own streams as training data: exact where the stream can give its position, honest where it cannot."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from ratchet_hooks.codec import encode
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.torch_compat import forget_workers
from ratchet_worker.data import points
from ratchet_worker.data.batch_digest import BatchChain, BatchDigest
from ratchet_worker.data.own_generators import StreamGenerators, reachable

_ATOMS: Final = (type(None), bool, int, float, complex, str, bytes)
_DIGESTS: Final = {"state": "last", "skip": "chain"}


class _Earlier(NamedTuple):
    """A point that the stream can be put to: before batch number ``taken`` of the epoch. ``stream``: its own state, if any."""

    taken: int
    stream: Any
    point: points.Point | None


class TrainStream:
    """Batches of this rank from any iterable; fits ``TrainData``. One pass over the iterable is one epoch.

    Batches are taken one by one, in this process, never ahead. What a resume can do depends on the iterable:

    - With ``state_dict()`` and ``load_state_dict(state)`` (what ``ratchet_hooks.codec`` takes: numbers, strings, tensors, arrays,
      lists, dicts ...): exact. Both speak of the point after the last batch that was handed out, so a generator must move its
      position on *before* it yields; this is checked at the first batch. A resume puts the stream a few batches back and reads
      these again, so that what it draws only when it starts (a ``DataLoader``'s base seed, an order) disturbs nothing.
    - Without, but ``repeatable=True``: every ``iter()`` gives the same batches for the same epoch, where all generators stand as
      they did (``set_epoch(epoch)`` is called first if there is such a method). All batches of the epoch that were used are read
      again, from generators that stand as they did when the epoch began: the process-wide ones, and those that the stream holds
      for itself. From its second batch on a stream draws from the process-wide ones apart from the training: they are seeded
      for it, by where they stand behind the first batch. ``epoch`` of samplers and data sets that have ``set_epoch`` comes back.
      Workers of a ``DataLoader`` start anew with every epoch, also persistent ones.
    - Otherwise: the stream starts over. ``exact`` is False, and ``inexact_reason`` says why.

    What is read again must be what was handed out: the last batch, of a repeatable stream all of them, by a digest over at most
    64 KiB of each; otherwise ``exact`` is False. ``reach()`` reads; without it the next ``iter()`` does, and raises
    ``ValueError`` where it is not. Generators stand as before afterwards.

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
        has = [hasattr(stream, name) for name in ("state_dict", "load_state_dict")]
        if any(has) and not all(has):
            raise TypeError(f"{type(stream).__name__} has only one of state_dict and load_state_dict; it needs both")
        self._way = "state" if all(has) else "skip" if repeatable else "anew"
        roots = {} if self._way == "anew" else {"stream": stream}
        self.own_generators = StreamGenerators(roots, followed=self._way == "state")
        self._source: Iterator[Any] | None = None  # reached, and not taken from yet
        self._restored = False
        self._differs: str | None = None
        self._recorded: Any = None  # the stream's state, until it is put back
        # Of the last batch handed out; of a repeatable stream of all of the epoch.
        self._digests: BatchDigest | BatchChain | str | None = None
        self._draws: points.Point | None = None  # where a repeatable stream stands in the process-wide generators
        self._earlier: list[_Earlier] = []
        self._epochs: dict[str, int] = {}
        self._own: dict[str, Any] = {}
        self.endless = True  # an ``iter()`` behind the last batch gives the next epoch
        self.read_again: list[Any] = []  # by the last ``reach``: how many batches, and the last of them

    @property
    def way(self) -> str:
        """``state``, ``skip`` or ``anew``: by which it comes back."""
        return self._way

    @property
    def position(self) -> int:
        """Batches of this epoch that were handed out."""
        return self._taken

    @property
    def exact(self) -> bool:
        return self.inexact_reason is None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report; None where the stream resumes exactly."""
        if self._way != "anew":
            return self._differs
        return (
            f"{type(self.stream).__name__} cannot give its position, so it starts over at a resume; give it state_dict() and "
            "load_state_dict(), or say repeatable=True if it always yields the same batches"
        )

    def data_digest(self) -> str | None:
        """What the caller said names the data."""
        return self._digest

    # --- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._run += 1
        return self._batches(self._run)

    def _batches(self, run: int) -> Iterator[Any]:
        if run != self._run:
            return
        began_at = self._taken
        source = self._from_position()
        while True:
            self._look()
            try:
                batch = self._next(source, self._taken)
            except StopIteration:
                break
            if run != self._run:
                return
            self._taken += 1
            if self._way != "anew":
                self._digests = self._with(self._digests, batch)
                if self._taken == 1:
                    self._insist_moved()
                    self._own = self._found()
            yield batch
            if run != self._run:
                return
        was_at_the_end = self._taken == began_at > 0
        self.end_epoch()
        if was_at_the_end and self.endless:  # restored after the last batch of an epoch, which only now shows
            yield from self._batches(run)

    def end_epoch(self) -> None:
        """The next ``iter()`` begins the next epoch, also where the stream has not ended."""
        self.epoch, self._taken, self._digests = self.epoch + 1, 0, None
        self._earlier = []
        self.own_generators.marks = {}
        self.own_generators.end()

    def _from_position(self) -> Iterator[Any]:
        if self._taken and self._source is None:
            self._restored = True  # begun in the middle of an epoch: from where it stands
        if self._restored:
            self.reach()
            if self._differs is not None:
                raise ValueError(self._differs)
        source, self._source = self._source, None
        return source if source is not None else self._begin()

    def _begin(self) -> Iterator[Any]:
        """The stream at the beginning of an epoch."""
        self._set_epoch()
        if self._way == "anew":
            return iter(self.stream)
        self._epochs = {path: item.epoch for path, item in self._epoch_holders()}
        self._forget_workers()
        self.own_generators.begin(again=False)
        point = points.here(self._found())
        source = iter(self.stream)
        # Behind iter: a stream that begins its epoch there tells of the new one.
        self._earlier = [_Earlier(0, self._stream_state() if self._way == "state" else None, point)]
        self._own = self._found()
        return source

    def _next(self, source: Iterator[Any], taken: int) -> Any:
        """Batch number ``taken`` from 0. What a repeatable stream draws behind its first batch, and what it draws ahead, must not
        depend on what the training draws meanwhile, which no resume repeats."""
        if self._way != "skip":
            return next(source)
        if taken == 0:
            batch = next(source)
            self._draws = points.branch(self.epoch)
            return batch
        assert self._draws is not None
        training = points.here({})
        self._draws.put({})
        try:
            return next(source)
        finally:
            self._draws = points.here({})
            training.put({})

    def _look(self) -> None:
        """Note where the generators and a stream with a state stand before a batch."""
        if self._way != "state":
            return
        point = points.here(self._own)
        self.own_generators.marks["last"] = point
        if self._taken == 0:
            self.own_generators.marks["first"] = point
        else:
            self._earlier = [*self._earlier[-1:], _Earlier(self._taken, self._stream_state(), point)]
            if self._taken > 2:
                self.own_generators.marks.pop("first", None)

    def _with(self, digests: Any, batch: Any) -> BatchDigest | BatchChain:
        if self._way == "state":
            return BatchDigest(batch)
        return (BatchChain() if digests is None else digests).add(BatchDigest(batch))

    def _found(self) -> dict[str, Any]:
        """The stream's own generators to look at; in a repeatable one they follow from the beginning of the epoch."""
        return self.own_generators.find() if self._way == "state" else {}

    def _insist_moved(self) -> None:
        if self._way == "state" and _same(self._stream_state(), self._earlier[0].stream, self._where()):
            raise TypeError(
                f"{type(self.stream).__name__}.state_dict() is the same before and after a batch: move the position on "
                "before the batch is yielded, not after"
            )

    # --- a resume ------------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """After ``load_state_dict`` and ``own_generators.load``: go to where the stream was; ``exact`` then says whether it is
        there. Without effect otherwise. Raises ``ValueError`` for a stream that ends before it is there."""
        if not self._restored:
            return
        self._restored, self._differs = False, None
        with points.kept():
            if self._taken:
                self.own_generators.leave()
                self._source = self._read_again()
            elif self._way == "state":
                self.stream.load_state_dict(self._recorded)  # type: ignore[attr-defined]
            missing = self.own_generators.arrive()
        if missing and self._differs is None:
            self._differs = "; ".join(missing)

    def _read_again(self) -> Iterator[Any]:
        marks, earlier = self.own_generators.marks, self._from_where()
        earlier = earlier._replace(point=earlier.point or marks.get("earlier"))
        self._earlier, last = [earlier], marks.get("last")
        self._set_epoch()
        if self._way == "state":
            self.stream.load_state_dict(_copied(earlier.stream))  # type: ignore[attr-defined]
        for path, item in self._epoch_holders():
            if path in self._epochs:
                item.set_epoch(self._epochs[path])
        self._forget_workers()
        self.own_generators.begin(again=True)
        self._put(earlier.point)
        source, digests = iter(self.stream), None
        at = {0: marks.get("first"), self._taken - 1: last}
        if earlier.taken > 0:
            at[earlier.taken] = earlier.point
        for n in range(earlier.taken, self._taken):
            self._put(at.get(n))
            if self._way == "state" and earlier.taken < n == self._taken - 1:
                self._earlier.append(_Earlier(n, self._stream_state(), last))
            try:
                batch = self._next(source, n)
            except StopIteration:
                raise ValueError(self._ended_early(n)) from None
            digests = self._with(digests, batch)
            self.read_again = [n + 1 - earlier.taken, batch]
        if self._digests is None or digests is None:
            self._differs = (
                "the checkpoint was made by an older version: it has no digest of these batches, so nothing shows whether the "
                "stream is where it was"
            )
        elif digests.hex() != _hex(self._digests):
            self._differs = self._other_batch()
        elif self._recorded is not None and not _same(self._stream_state(), self._recorded, self._where()):
            self._differs = self._other_state()
        self._recorded, self._digests = None, digests
        self._put(marks.get("now"))
        self._own = self._found()
        return source

    def _from_where(self) -> _Earlier:
        """The newest point that is two batches back: what a stream draws when it starts there shifts a batch that is not the
        one compared."""
        fitting = [e for e in self._earlier if e.taken <= max(self._taken - 2, 0)]
        if fitting or self._earlier:
            return fitting[-1] if fitting else self._earlier[0]
        return _Earlier(self._taken if self._way == "state" else 0, self._recorded, None)

    def _put(self, point: points.Point | None) -> None:
        if point is not None:
            point.put(self.own_generators.find() if point.own else {})

    def _set_epoch(self) -> None:
        set_epoch = getattr(self.stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)

    def _epoch_holders(self) -> list[tuple[str, Any]]:
        """Samplers and data sets below the stream that are told the epoch by its caller, by path."""
        found = list(reachable({"stream": self.stream}))[1:]
        return [
            (path, item)
            for path, item in found
            if callable(getattr(type(item), "set_epoch", None)) and type(getattr(item, "epoch", None)) is int
        ]

    def _forget_workers(self) -> None:
        """Persistent workers carry their generators from epoch to epoch, and no new process can begin with such ones."""
        if self._way == "skip":
            for _, item in reachable({"stream": self.stream}):
                if isinstance(item, DataLoader) and item.persistent_workers:
                    forget_workers(item)

    def _ended_early(self, n: int) -> str:
        name = type(self.stream).__name__
        if self._way == "skip":
            return f"{name} was said to be repeatable, but ended after {n} batches where {self._taken} had been used before"
        return f"{name}, put back by load_state_dict() to an earlier batch, ended after {n} where {self._taken} had been used"

    def _other_batch(self) -> str:
        name, which = type(self.stream).__name__, f"batch {self._taken} of epoch {self.epoch}"
        if self._way == "skip":
            return (
                f"{name} was said to be repeatable, but the batches up to {which}, read again, are not those that were used: "
                "give it state_dict() and load_state_dict(), or let its batches depend on nothing but the epoch (set_epoch) and "
                "generators that nothing else draws from"
            )
        return (
            f"{name}, put back by load_state_dict(), gives another {which} than was used: its state_dict() must hold all that "
            "batches depend on; numbers that DataLoader workers draw do not come back, so seed them by sample (TrainLoader does)"
        )

    def _other_state(self) -> str:
        return (
            f"{self._where()} after batch {self._taken} of epoch {self.epoch}, read again, is not what was recorded there: it "
            "must depend on nothing but load_state_dict() and the generators since"
        )

    # --- state ---------------------------------------------------------------------------------------------------------

    def _where(self) -> str:
        return f"{type(self.stream).__name__}.state_dict()"

    def _stream_state(self) -> Any:
        # A copy by value: the stream may hand out a dict that it goes on changing.
        return _copied(self.stream.state_dict())  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches taken in it, and the stream's own state if it has one, now and at an earlier point."""
        state: dict[str, Any] = {"kind": "stream", "way": self._way, "epoch": self.epoch, "taken": self._taken}
        if self._way == "anew":
            return state
        if self._way == "state":
            with points.kept():
                state["stream"] = self._recorded if self._restored else self._stream_state()
            _same(None, state["stream"], self._where())
        if self._taken:
            earlier = self._from_where()
            state |= {"earlier": [earlier.taken, earlier.stream], "epochs": dict(self._epochs)}
            state[_DIGESTS[self._way]] = None if self._digests is None else _hex(self._digests)
            if earlier.point is not None:
                self.own_generators.marks["earlier"] = earlier.point
            if self._way == "skip" and not self._restored:
                self.own_generators.marks["now"] = points.here(self.own_generators.find())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a recorded point, as exactly as the stream allows. Raises ``ValueError`` for the state of something else."""
        if state.get("kind") != "stream" or state.get("way") != self._way:
            raise ValueError(
                f"the data position was recorded for {state.get('kind')!r}/{state.get('way')!r}, this is 'stream'/{self._way!r}"
            )
        self._run += 1
        self.epoch, self._taken = int(state["epoch"]), int(state["taken"])
        if self._way == "anew":
            self._taken = 0
            return
        self._recorded, self._epochs = state.get("stream"), state.get("epochs", {})
        self._digests = state.get(_DIGESTS[self._way])
        self._earlier = [_Earlier(state["earlier"][0], state["earlier"][1], None)] if "earlier" in state else []
        self._source, self._differs, self._restored = None, None, True


def _hex(digests: BatchDigest | BatchChain | str) -> str:
    return digests if isinstance(digests, str) else digests.hex()


def _copied(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if type(value) is dict:
        return {key: item if type(item) in _ATOMS else _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(item if type(item) in _ATOMS else _copied(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if type(value) is np.ndarray else copy.deepcopy(value)


def _same(a: Any, b: Any, where: str) -> bool:
    """Are two states the same? Raises ``TypeError`` for what cannot be stored."""
    try:
        (left, one), (right, other) = encode(a, where=where), encode(b, where=where)
    except HookStateError as error:
        raise TypeError(f"{error.key}: {error.detail}") from error
    return one == other and all(torch.equal(left[name], right[name]) for name in left)
