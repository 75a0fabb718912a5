"""Small messages between ranks over the rendezvous store, so that a save or an evaluation needs no collective. Each ``Exchange``
belongs to one thread."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from ratchet_contract.errors import UserError, WorkerError

_FIRST_PAUSE: Final = 0.0005
_LONGEST_PAUSE: Final = 0.02
_PROGRESS_POLL_SECONDS: Final = 0.5  # seconds between two polls of ``progress``


class Abandoned(Exception):
    """Raised if a wait was abandoned because the caller's ``should_abandon`` returned True."""


class PeerTimeout(WorkerError):
    """Raised if a rank did not post its value in time."""

    code = "peer-timeout"


def poll_until_present(
    store: Store, keys: list[str], longest: float = _LONGEST_PAUSE, first: float = _FIRST_PAUSE
) -> Iterator[None]:
    """Poll the store until all ``keys`` are in it, and yield before each pause. ``longest``, ``first``: pauses in seconds."""
    pause, following = first, max(2 * _FIRST_PAUSE, first / 8)
    # Not ``Store.wait``, which would block the client and prints warnings at every timeout.
    while not store.check(keys):
        yield
        time.sleep(pause)
        pause, following = min(following, longest), 2 * following


class Exchange:
    """Gathers and broadcasts small JSON values among all ranks. Each value has a name, and each name is used once. A posted value
    may have an attachment, a text that is not parsed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: float,
        block_if_aborting: Callable[[], None] = lambda: None,
    ) -> None:
        """``timeout``: seconds for each wait that has no timeout of its own. ``block_if_aborting``: called before each value is
        published; see ``GroupAbort.block_if_aborting``."""
        # For one thread alone: a waiting TCPStore client blocks its other callers.
        self._store, self.rank, self.world_size, self._timeout = store, rank, world_size, timeout
        self.block_if_aborting = block_if_aborting
        self._local_values: dict[str, tuple[Any, bytes]] = {}
        self._last_wait_seconds: dict[
            str, float
        ] = {}  # by kind of recurring wait: least seconds that the last one took

    def gather(
        self, name: str, value: Any, *, should_abandon: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Publish this rank's ``value`` and return every rank's, in rank order. Blocks. Raises ``PeerTimeout``, or ``Abandoned``
        if ``should_abandon`` returns True."""
        self.post(name, value)
        return self.collect(name, should_abandon=should_abandon, timeout=timeout)

    def post(self, name: str, value: Any, attachment: str = "") -> None:
        """Publish this rank's value, with an attachment; return without waiting for others."""
        self.block_if_aborting()
        self._store.set(self._key(name, self.rank), f"{_dump(value)}\n{attachment}" if attachment else _dump(value))

    def post_locally(self, name: str, value: Any, attachment: str = "") -> None:
        """Keep this rank's value in this process instead of publishing it. For a value that only this rank collects."""
        self.block_if_aborting()
        self._local_values[name] = value, attachment.encode()

    def collect(
        self, name: str, *, should_abandon: Callable[[], bool] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Return every rank's posted value, in rank order. Blocks. Raises ``PeerTimeout``, or ``Abandoned`` if ``should_abandon``
        returns True."""
        return [
            value for value, _ in self.collect_with_attachments(name, should_abandon=should_abandon, timeout=timeout)
        ]

    def collect_with_attachments(
        self,
        name: str,
        *,
        should_abandon: Callable[[], bool] | None = None,
        timeout: float | None = None,
        progress: Callable[[], object] | None = None,
        pause: float = _LONGEST_PAUSE,
        is_recurring: bool = False,
    ) -> list[tuple[Any, bytes]]:
        """Return every rank's posted value and its attachment, in rank order. Blocks. ``progress``: each change of its result
        restarts the timeout. ``pause``: the longest pause between two polls, in seconds. ``is_recurring``: this wait takes about
        as long as the last recurring one, so that frequent polls begin later. Raises as ``collect``."""
        keys = self._posted_keys(name)
        found: list[tuple[Any, bytes]] = []
        if keys:
            self._wait(name, keys, should_abandon, timeout, progress, pause, ("collect", 0.5) if is_recurring else None)
            values = [raw.partition(b"\n") for raw in self._store.multi_get(keys)]
            found = [(json.loads(value), beside) for value, _, beside in values]
        if name in self._local_values:
            found.insert(self.rank, self._local_values[name])
        return found

    def broadcast(
        self,
        name: str,
        value: Any = None,
        *,
        timeout: float | None = None,
        progress: Callable[[], object] | None = None,
        is_recurring: bool = False,
    ) -> Any:
        """Return rank 0's ``value`` on every rank. Other ranks wait for it; each change of ``progress()`` restarts their
        timeout. ``is_recurring``: as in ``collect_with_attachments``. Raises ``PeerTimeout``."""
        key = self._key(name, 0)
        if self.rank == 0:
            self.block_if_aborting()
            text = _dump(value)
            if self.world_size > 1:
                self._store.set(key, text)
            return json.loads(text)
        self._wait(name, [key], None, timeout, progress, recurs=("broadcast", 0.9) if is_recurring else None)
        return json.loads(self._store.get(key))

    def delete(self, name: str) -> None:
        """Remove all ranks' values of ``name``. Call it only when every rank is known to have read them."""
        for key in self._posted_keys(name):
            self._store.delete_key(key)
        self._local_values.pop(name, None)

    def delete_broadcast(self, name: str) -> None:
        """Remove a broadcast value from the store. Call it only when every rank is known to have read it."""
        if self.world_size > 1:
            self._store.delete_key(self._key(name, 0))

    def _posted_keys(self, name: str) -> list[str]:
        """The keys of all ranks in rank order, without this rank's own if its value was posted locally."""
        kept = self.rank if name in self._local_values else None
        return [self._key(name, rank) for rank in range(self.world_size) if rank != kept]

    def _key(self, name: str, rank: int) -> str:
        """The store's key for the value that ``rank`` posts under ``name``."""
        return f"exchange/{name}/{rank}"

    def _wait(
        self,
        name: str,
        keys: list[str],
        should_abandon: Callable[[], bool] | None,
        timeout: float | None,
        progress: Callable[[], object] | None = None,
        pause: float = _LONGEST_PAUSE,
        recurs: tuple[str, float] | None = None,
    ) -> None:
        """Wait until all ``keys`` are in the store. ``recurs``: for a recurring wait, its kind and a factor. The first pause is
        about this factor times the duration of the last wait of that kind, but at most ``_LONGEST_PAUSE``."""
        kind, share = recurs or ("", 0.0)
        first = min(max(_FIRST_PAUSE, share * self._last_wait_seconds.get(kind, 0.0)), _LONGEST_PAUSE)
        limit = self._timeout if timeout is None else timeout
        begun, absent = time.monotonic(), 0.0
        deadline = begun + limit
        look, seen = begun + _PROGRESS_POLL_SECONDS, None
        for _ in poll_until_present(self._store, keys, pause, first):
            absent = time.monotonic() - begun
            if should_abandon is not None and should_abandon():
                raise Abandoned(name)
            if progress is not None and time.monotonic() > look:
                look, before, seen = time.monotonic() + _PROGRESS_POLL_SECONDS, seen, progress()
                deadline = deadline if seen == before else time.monotonic() + limit
            if time.monotonic() > deadline:
                missing = [int(k.rsplit("/", 1)[1]) for k in keys if not self._store.check([k])]
                raise PeerTimeout(f"{name}: no answer from rank {missing} within {limit:.0f} s")
        self._last_wait_seconds[kind] = absent


def _dump(value: Any) -> str:
    """Return ``value`` as JSON, with Python's ``NaN`` and ``Infinity``. Raises ``UserError`` for a value that JSON does not
    have."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"ranks exchange only JSON values (numbers, strings, booleans, None, and lists and dicts of them): {error}. Convert "
            "the value first, for example a tensor or an array by its tolist()"
        ) from error
