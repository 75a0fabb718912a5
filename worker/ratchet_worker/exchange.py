"""Small messages between ranks over the rendezvous store, so that a save or an evaluation needs no collective.

A collective waits for a rank that will never come; here every wait has a deadline, counts as no progress, and can be
abandoned. One ``Exchange`` belongs to one thread: a waiting ``TCPStore`` client blocks every other caller of that client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from ratchet_contract.errors import WorkerError

_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02
_LOOK: Final = 0.5  # seconds between two looks at the progress of what is waited for


class Abandoned(Exception):
    """The wait was given up because the caller's ``abandon`` said so."""


class PeerTimeout(WorkerError):
    """A rank did not answer in time."""

    code = "peer-timeout"


def until_present(
    store: Store, keys: list[str], longest: float = _LONGEST_PAUSE, first: float = _FIRST_PAUSE
) -> Iterator[None]:
    """Yields, with pauses that grow from ``first`` to ``longest`` seconds, until all ``keys`` are in the store. One look costs
    some 25 microseconds here, and as much where the store is.

    ``Store.wait`` would hold the client, and every one of its timeouts prints warnings.
    """
    pause, following = first, max(2 * _FIRST_PAUSE, first / 8)
    while not store.check(keys):
        yield
        time.sleep(pause)
        pause, following = min(following, longest), 2 * following


class Exchange:
    """Gather and broadcast of JSON values among all ranks, by name; a name is used once. Values are a few megabytes at most.

    A value may have a text ``beside`` it, which is handed over as it is: no reader parses it unless it wants to.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: float, hold: Callable[[], None] = lambda: None
    ) -> None:
        """``timeout`` in seconds. ``hold``: called before each value is published; see ``GroupAbort.hold``."""
        self._store, self.rank, self.world_size, self._timeout = store, rank, world_size, timeout
        self.hold = hold
        self._kept: dict[str, tuple[Any, bytes]] = {}
        self._usual: dict[str, float] = {}  # of waits that recur: seconds that the last one lasted at least

    def gather(
        self, name: str, value: Any, *, abandon: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Every rank's value in rank order. Raises ``PeerTimeout`` (naming the ranks) or ``Abandoned``."""
        self.post(name, value)
        return self.collect(name, abandon=abandon, timeout=timeout)

    def post(self, name: str, value: Any, beside: str = "") -> None:
        """Publish this rank's value; returns at once."""
        self.hold()
        self._store.set(self._key(name, self.rank), f"{_dump(value)}\n{beside}" if beside else _dump(value))

    def keep(self, name: str, value: Any, beside: str = "") -> None:
        """The same where this rank is the only one that collects it: its own value need not travel. Until ``forget``."""
        self.hold()
        self._kept[name] = value, beside.encode()

    def collect(
        self, name: str, *, abandon: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Every rank's posted value in rank order, waiting for the missing ones."""
        return [value for value, _ in self.collect_beside(name, abandon=abandon, timeout=timeout)]

    def collect_beside(
        self,
        name: str,
        *,
        abandon: Callable[[], bool] | None = None,
        timeout: float | None = None,
        progress: Callable[[], object] | None = None,
        pause: float = _LONGEST_PAUSE,
        recurs: bool = False,
    ) -> list[tuple[Any, bytes]]:
        """The same, and the text beside each value: empty where there is none. ``progress``: as long as its value changes, the
        timeout begins anew. ``pause``: seconds between two looks, at most. ``recurs``: about as long as the wait before, so that
        for half of that nobody looks. What this rank keeps is the object that it kept."""
        keys = self._posted(name)
        found: list[tuple[Any, bytes]] = []
        if keys:
            self._wait(name, keys, abandon, timeout, progress, pause, ("collect", 0.5) if recurs else None)
            values = [raw.partition(b"\n") for raw in self._store.multi_get(keys)]
            found = [(json.loads(value), beside) for value, _, beside in values]
        if name in self._kept:
            found.insert(self.rank, self._kept[name])
        return found

    def broadcast(
        self,
        name: str,
        value: Any = None,
        *,
        timeout: float | None = None,
        progress: Callable[[], object] | None = None,
        recurs: bool = False,
    ) -> Any:
        """Rank 0's ``value`` on every rank; the others' argument is not looked at. ``recurs``: it takes about as long as the one
        before, so that it is seldom looked for until then."""
        key = self._key(name, 0)
        if self.rank == 0:
            self.hold()
            text = _dump(value)
            if self.world_size > 1:
                self._store.set(key, text)
            return json.loads(text)
        self._wait(name, [key], None, timeout, progress, recurs=("broadcast", 0.9) if recurs else None)
        return json.loads(self._store.get(key))

    def forget(self, name: str) -> None:
        """Remove the keys of ``name`` from the store; only when every rank is known to have read them: it has posted something
        since."""
        for key in self._posted(name):
            self._store.delete_key(key)
        self._kept.pop(name, None)

    def forget_broadcast(self, name: str) -> None:
        """The same of a value that was broadcast."""
        if self.world_size > 1:
            self._store.delete_key(self._key(name, 0))

    def _posted(self, name: str) -> list[str]:
        """The keys of all ranks, but of this one's where it keeps its value."""
        kept = self.rank if name in self._kept else None
        return [self._key(name, rank) for rank in range(self.world_size) if rank != kept]

    def _key(self, name: str, rank: int) -> str:
        return f"exchange/{name}/{rank}"

    def _wait(
        self,
        name: str,
        keys: list[str],
        abandon: Callable[[], bool] | None,
        timeout: float | None,
        progress: Callable[[], object] | None = None,
        pause: float = _LONGEST_PAUSE,
        recurs: tuple[str, float] | None = None,
    ) -> None:
        """``recurs``: a kind of wait, and the share of the last one of that kind in which there is no look."""
        kind, share = recurs or ("", 0.0)
        first = min(max(_FIRST_PAUSE, share * self._usual.get(kind, 0.0)), _LONGEST_PAUSE)
        limit = self._timeout if timeout is None else timeout
        begun, absent = time.monotonic(), 0.0
        deadline = begun + limit
        look, seen = begun + _LOOK, None
        for _ in until_present(self._store, keys, pause, first):
            absent = time.monotonic() - begun
            if abandon is not None and abandon():
                raise Abandoned(name)
            if progress is not None and time.monotonic() > look:
                look, before, seen = time.monotonic() + _LOOK, seen, progress()
                deadline = deadline if seen == before else time.monotonic() + limit
            if time.monotonic() > deadline:
                missing = [int(k.rsplit("/", 1)[1]) for k in keys if not self._store.check([k])]
                raise PeerTimeout(f"{name}: no answer from rank {missing} within {limit:.0f} s")
        self._usual[kind] = absent


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
