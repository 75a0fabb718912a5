"""Users' own streams as training data, resumed exactly if the stream allows it, else reported as not exact."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from ratchet_hooks.algorithms.state_version import same_bits
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import encode
from ratchet_hooks.torch_compat import forget_workers
from ratchet_worker.data import generator_positions
from ratchet_worker.data.batch_digest import BatchChain, BatchDigest
from ratchet_worker.data.data_generators import StreamGenerators, reachable

_ATOMS: Final = (type(None), bool, int, float, complex, str, bytes)
_DIGESTS: Final = {"state": "last", "skip": "chain"}


class _Earlier(NamedTuple):
    """A point from which a resume can read batches again. ``taken``: the number (from 0) of the first of these batches.
    ``stream``, ``point``: the states of the stream and of the generators before that batch, as far as recorded."""

    taken: int
    stream: Any
    point: generator_positions.Point | None


class TrainStream:
    """Batches of this rank from any iterable; implements ``TrainData``. One pass over the iterable is one epoch. The iterable
    itself must split the stream over the ranks, and end after the same number of batches on each.

    What a resume does depends on the iterable:

    - With ``state_dict()`` and ``load_state_dict(state)``: it restores the position. A generator must advance its position
      *before* it yields, which is checked at the first batch.
    - Without these, but with ``repeatable=True``: it reads the used batches of the epoch again, with the generators as they were
      when the epoch began. Every ``iter()`` must then return the same batches.
    - Otherwise the stream starts over. ``exact`` is False, and ``inexact_reason`` gives the reason.

    A resume compares digests of batches that it reads again (of large batches a sample); if one differs, ``exact`` is False.
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
        self._resume_mode = "state" if all(has) else "skip" if repeatable else "restart"
        roots = {} if self._resume_mode == "restart" else {"stream": stream}
        self.own_generators = StreamGenerators(roots, restores_itself=self._resume_mode == "state")
        self._source: Iterator[Any] | None = None  # at the position, with no batch taken from it yet
        self._restored = False
        self._difference: str | None = None
        self._recorded: Any = None  # the stream's state, until it is restored
        # Of the last batch handed out; for a repeatable stream, of all batches of the epoch.
        self._digests: BatchDigest | BatchChain | str | None = None
        self._draws: generator_positions.Point | None = (
            None  # the process-wide generators as a repeatable stream sees them
        )
        self._earlier: list[_Earlier] = []
        self._epochs: dict[str, int] = {}
        self._own: dict[str, Any] = {}
        self.endless = True  # an ``iter()`` after the last batch yields the next epoch
        self.replayed: list[Any] = []  # by the last ``reach``: the number of batches, and the last of them

    @property
    def resume_mode(self) -> str:
        """How a resume restores the stream: ``state`` (by ``load_state_dict``), ``skip`` (by reading batches again) or
        ``restart`` (not at all)."""
        return self._resume_mode

    @property
    def position(self) -> int:
        """Number of batches of this epoch that were handed out."""
        return self._taken

    @property
    def exact(self) -> bool:
        """True unless ``inexact_reason`` gives a reason why a resume is not exact."""
        return self.inexact_reason is None

    @property
    def inexact_reason(self) -> str | None:
        """A sentence for the resume report that says why a resume is not exact; None if no reason is known."""
        if self._resume_mode != "restart":
            return self._difference
        return (
            f"{type(self.stream).__name__} cannot report its position, so it starts over at a resume; add state_dict() and "
            "load_state_dict(), or pass repeatable=True if it always yields the same batches"
        )

    def data_digest(self) -> str | None:
        """Return the argument ``digest``, by which the caller identifies the data; None if there was none."""
        return self._digest

    # --- batches -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches from the position to the epoch's end; if none is left and ``endless`` is True, over
        the next epoch. It ends an earlier iterator."""
        self._run += 1
        return self._batches(self._run)

    def _batches(self, run: int) -> Iterator[Any]:
        """Yield the batches from the position on. ``run``: the number of this iterator. Raises ``ValueError`` as
        ``_from_position`` does."""
        if run != self._run:
            return
        source = self._from_position()
        began_at = self._taken
        while True:
            self._record_points()
            try:
                batch = self._next(source, self._taken)
            except StopIteration:
                break
            if run != self._run:
                return
            self._taken += 1
            if self._resume_mode != "restart":
                self._digests = self._add_digest(self._digests, batch)
                if self._taken == 1:
                    self._check_moved()
                    self._own = self._generators_to_record()
            else:
                self._source = source  # for the next iter(): the stream has no other way to the position
            yield batch
            if run != self._run:
                return
            self._source = None
        was_at_the_end = self._taken == began_at > 0
        self.end_epoch()
        if was_at_the_end and self.endless:  # restored after the last batch of an epoch, which is only known now
            yield from self._batches(run)

    def end_epoch(self) -> None:
        """End the epoch: the next ``iter()`` begins the next one, even if the stream has not ended."""
        self.epoch, self._taken, self._digests = self.epoch + 1, 0, None
        self._source, self._earlier = None, []
        self.own_generators.marks = {}
        self.own_generators.end()

    def _from_position(self) -> Iterator[Any]:
        """Return an iterator over the stream from the position. If the stream must be moved there first, raises ``ValueError`` as
        ``reach`` does, and also if ``reach`` finds a difference."""
        if self._taken and self._source is None:  # begun in the middle of an epoch
            if self._resume_mode == "restart":
                self._taken = 0  # its iterator has raised an error
            else:
                self._restored = True  # continue from the current position
        if self._restored:
            self.reach()
            if self._difference is not None:
                raise ValueError(self._difference)
        source, self._source = self._source, None
        return source if source is not None else self._begin()

    def _begin(self) -> Iterator[Any]:
        """Return an iterator over the stream from the beginning of an epoch, and record the states that a resume needs."""
        self._set_epoch()
        if self._resume_mode == "restart":
            return iter(self.stream)
        self._epochs = {path: item.epoch for path, item in self._epoch_holders()}
        self._forget_workers()
        self.own_generators.begin(is_repeat=False)
        point = generator_positions.current_point(self._generators_to_record())
        source = iter(self.stream)
        # After iter(): a stream that begins its epoch there returns the state of the new epoch.
        self._earlier = [_Earlier(0, self._stream_state() if self._resume_mode == "state" else None, point)]
        self._own = self._generators_to_record()
        return source

    def _next(self, source: Iterator[Any], taken: int) -> Any:
        """Return batch number ``taken`` (from 0) of ``source``. From the epoch's second batch on, a repeatable stream draws from
        states of the process-wide generators that are separate from the training's."""
        if self._resume_mode != "skip":
            return next(source)
        if taken == 0:
            batch = next(source)
            self._draws = generator_positions.branch(self.epoch)
            return batch
        assert self._draws is not None
        # What the stream draws must not depend on what the training draws meanwhile, which no resume repeats.
        training = generator_positions.current_point({})
        self._draws.restore({})
        try:
            return next(source)
        finally:
            self._draws = generator_positions.current_point({})
            training.restore({})

    def _record_points(self) -> None:
        """Record the generators' states before a batch is read; except for the epoch's first batch, also record the stream's
        state. Does nothing for a stream without ``state_dict``."""
        if self._resume_mode != "state":
            return
        point = generator_positions.current_point(self._own)
        self.own_generators.marks["last"] = point
        if self._taken == 0:
            self.own_generators.marks["first"] = point
        else:
            self._earlier = [*self._earlier[-1:], _Earlier(self._taken, self._stream_state(), point)]
            if self._taken > 2:
                self.own_generators.marks.pop("first", None)

    def _add_digest(self, digests: Any, batch: Any) -> BatchDigest | BatchChain:
        """Return ``digests`` with the digest of ``batch`` added for a repeatable stream, else the digest of ``batch`` alone."""
        if self._resume_mode == "state":
            return BatchDigest(batch)
        return (BatchChain() if digests is None else digests).add(BatchDigest(batch))

    def _generators_to_record(self) -> dict[str, Any]:
        """Return the stream's own generators to record, by path; none for a stream without ``state_dict``."""
        # A repeatable stream's follow from the beginning of its epoch.
        return self.own_generators.find() if self._resume_mode == "state" else {}

    def _check_moved(self) -> None:
        """Raise ``TypeError`` if the state of a stream with ``state_dict`` is the same before and after the first batch."""
        if self._resume_mode == "state" and _is_same(self._stream_state(), self._earlier[0].stream, self._state_name()):
            raise TypeError(
                f"{type(self.stream).__name__}.state_dict() is the same before and after a batch: advance the position "
                "before the batch is yielded, not after"
            )

    # --- a resume ------------------------------------------------------------------------------------------------------

    def reach(self) -> None:
        """Move the stream to the recorded position. If a difference is found, ``exact`` is False. Raises ``ValueError`` if the
        stream ends too early."""
        if not self._restored:
            return
        self._restored, self._difference = False, None
        with generator_positions.preserved():
            if self._taken:
                self.own_generators.before_move()
                self._source = self._replay()
            elif self._resume_mode == "state":
                self.stream.load_state_dict(self._recorded)  # type: ignore[attr-defined]
            missing = self.own_generators.after_move()
        if missing and self._difference is None:
            self._difference = "; ".join(missing)

    def _replay(self) -> Iterator[Any]:
        """Read batches before the position again and compare digests. Returns an iterator that continues at the position."""
        marks, earlier = self.own_generators.marks, self._replay_start()
        earlier = earlier._replace(point=earlier.point or marks.get("earlier"))
        self._earlier, last = [earlier], marks.get("last")
        self._set_epoch()
        if self._resume_mode == "state":
            self.stream.load_state_dict(_copy_value(earlier.stream))  # type: ignore[attr-defined]
        for path, item in self._epoch_holders():
            if path in self._epochs:
                item.set_epoch(self._epochs[path])
        self._forget_workers()
        self.own_generators.begin(is_repeat=True)
        self._restore_point(earlier.point)
        source, digests = iter(self.stream), None
        at = {0: marks.get("first"), self._taken - 1: last}
        if earlier.taken > 0:
            at[earlier.taken] = earlier.point
        for n in range(earlier.taken, self._taken):
            self._restore_point(at.get(n))
            if self._resume_mode == "state" and earlier.taken < n == self._taken - 1:
                self._earlier.append(_Earlier(n, self._stream_state(), last))
            try:
                batch = self._next(source, n)
            except StopIteration:
                raise ValueError(self._ended_early_message(n)) from None
            digests = self._add_digest(digests, batch)
            self.replayed = [n + 1 - earlier.taken, batch]
        if self._digests is None or digests is None:
            self._difference = (
                "the checkpoint was made by an older version: it has no digest of these batches, so it is not known whether the "
                "stream is at the same position"
            )
        elif digests.hex() != _hex(self._digests):
            self._difference = self._other_batch_message()
        elif self._recorded is not None and not _is_same(self._stream_state(), self._recorded, self._state_name()):
            self._difference = self._other_state_message()
        self._recorded, self._digests = None, digests
        self._restore_point(marks.get("now"))
        self._own = self._generators_to_record()
        return source

    def _replay_start(self) -> _Earlier:
        """Return the point from which a resume reads batches again: if possible, at least two batches before the position."""
        # What the stream draws when it starts there then does not affect the batch that is compared.
        fitting = [e for e in self._earlier if e.taken <= max(self._taken - 2, 0)]
        if fitting or self._earlier:
            return fitting[-1] if fitting else self._earlier[0]
        return _Earlier(self._taken if self._resume_mode == "state" else 0, self._recorded, None)

    def _restore_point(self, point: generator_positions.Point | None) -> None:
        """Set the generators to ``point``; None: do nothing."""
        if point is not None:
            point.restore(self.own_generators.find() if point.own else {})

    def _set_epoch(self) -> None:
        """Call the stream's ``set_epoch`` with the current epoch, if it has that method."""
        set_epoch = getattr(self.stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)

    def _epoch_holders(self) -> list[tuple[str, Any]]:
        """Return objects inside the stream that have ``set_epoch`` and an integer ``epoch``, such as samplers, as (path,
        object)."""
        found = list(reachable({"stream": self.stream}))[1:]
        return [
            (path, item)
            for path, item in found
            if callable(getattr(type(item), "set_epoch", None)) and type(getattr(item, "epoch", None)) is int
        ]

    def _forget_workers(self) -> None:
        """Discard persistent workers of a repeatable stream."""
        if self._resume_mode == "skip":
            for _, item in reachable({"stream": self.stream}):
                # They carry generators from epoch to epoch, and no new process can start with those.
                if isinstance(item, DataLoader) and item.persistent_workers:
                    forget_workers(item)

    def _ended_early_message(self, n: int) -> str:
        name = type(self.stream).__name__
        if self._resume_mode == "skip":
            return (
                f"{name} was declared repeatable, but ended after {n} batches where {self._taken} had been used before"
            )
        return f"{name}, restored by load_state_dict() to an earlier batch, ended after {n} where {self._taken} had been used"

    def _other_batch_message(self) -> str:
        name, which = type(self.stream).__name__, f"batch {self._taken} of epoch {self.epoch}"
        if self._resume_mode == "skip":
            return (
                f"{name} was declared repeatable, but the batches up to {which}, read again, are not those that were used: "
                "add state_dict() and load_state_dict(), or make its batches depend only on the epoch (set_epoch) and "
                "generators that nothing else draws from"
            )
        return (
            f"{name}, restored by load_state_dict(), yields another {which} than was used: its state_dict() must hold all that "
            "batches depend on; random numbers of DataLoader workers are not restored, so seed them by sample (TrainLoader does)"
        )

    def _other_state_message(self) -> str:
        return (
            f"{self._state_name()} after batch {self._taken} of epoch {self.epoch}, read again, is not what was "
            "recorded there: it "
            "must depend only on load_state_dict() and the generators since"
        )

    # --- state ---------------------------------------------------------------------------------------------------------

    def _state_name(self) -> str:
        """Return the name of the stream's ``state_dict`` for messages."""
        return f"{type(self.stream).__name__}.state_dict()"

    def _stream_state(self) -> Any:
        """Return a copy by value of the stream's own state. The stream may return a dict that it keeps changing."""
        return _copy_value(self.stream.state_dict())  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the position. Call ``own_generators.states()`` only after this method, which may add points there. Raises
        ``TypeError`` if the stream's state cannot be stored."""
        state: dict[str, Any] = {"kind": "stream", "way": self._resume_mode, "epoch": self.epoch, "taken": self._taken}
        if self._resume_mode == "restart":
            return state
        if self._resume_mode == "state":
            with generator_positions.preserved():
                state["stream"] = self._recorded if self._restored else self._stream_state()
            _is_same(None, state["stream"], self._state_name())
        if self._taken:
            earlier = self._replay_start()
            state |= {"earlier": [earlier.taken, earlier.stream], "epochs": dict(self._epochs)}
            state[_DIGESTS[self._resume_mode]] = None if self._digests is None else _hex(self._digests)
            if earlier.point is not None:
                self.own_generators.marks["earlier"] = earlier.point
            if self._resume_mode == "skip" and not self._restored:
                self.own_generators.marks["now"] = generator_positions.current_point(self.own_generators.find())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a recorded position. ``reach`` or the next ``iter()`` moves the stream there, unless ``resume_mode`` is
        ``restart``. Raises ``ValueError`` for another kind of state."""
        if state.get("kind") != "stream" or state.get("way") != self._resume_mode:
            raise ValueError(
                f"the data position was recorded for {state.get('kind')!r}/{state.get('way')!r}, this is "
                f"'stream'/{self._resume_mode!r}"
            )
        self._run += 1
        self.epoch, self._taken, self._source = int(state["epoch"]), int(state["taken"]), None
        if self._resume_mode == "restart":
            self._taken = 0
            return
        self._recorded, self._epochs = state.get("stream"), state.get("epochs", {})
        self._digests = state.get(_DIGESTS[self._resume_mode])
        self._earlier = [_Earlier(state["earlier"][0], state["earlier"][1], None)] if "earlier" in state else []
        self._difference, self._restored = None, True


def _hex(digests: BatchDigest | BatchChain | str) -> str:
    return digests if isinstance(digests, str) else digests.hex()


def _copy_value(value: Any) -> Any:
    """Return a copy by value of a stream's state."""
    if type(value) in _ATOMS:
        return value
    if type(value) is dict:
        return {key: item if type(item) in _ATOMS else _copy_value(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(item if type(item) in _ATOMS else _copy_value(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if type(value) is np.ndarray else copy.deepcopy(value)


def _is_same(a: Any, b: Any, where: str) -> bool:
    """True if two states compare equal when encoded, tensors and floats bit for bit. Raises ``TypeError``, naming ``where``, for
    a state that cannot be stored."""
    try:
        (left, one), (right, other) = encode(a, root=where), encode(b, root=where)
    except HookStateError as error:
        raise TypeError(f"{error.key}: {error.detail}") from error
    return one == other and all(same_bits(left[name], right[name]) for name in left)
