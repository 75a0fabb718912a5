"""Lists one kind of objects in one namespace and then watches it, on a thread of its own."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.kubernetes.client import Api, Json, Refusal, Stream

log = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 290
_PAGE: Final = 500
_BACKOFF: Final = (0.2, 10.0)
"""First and longest delay between connection retries, seconds; with jitter."""
_MIN_WATCH_SECONDS: Final = 1.0
"""Seconds that a watch should last: if the server ends it sooner, the next one starts after a delay."""


@dataclass(frozen=True)
class Kind:
    """A kind of objects to watch. ``path``: its path in the API, with ``{}`` for the namespace. ``query``: the name of the
    request's parameter that selects the objects. ``required``: without these objects the state of attempts is not known."""

    name: str
    path: str
    query: str
    required: bool = True


class WatchHandler(Protocol):
    """Receives the objects and events that a ``Watcher`` reads."""

    def apply(self, kind: str, object_: Json, namespace: str, *, deleted: bool = False) -> None:
        """Process one object of a watch. ``deleted``: it was deleted, and this is its last state."""
        ...

    def replace(self, kind: str, items: list[Json], namespace: str, version: str) -> None:
        """Process a complete list of the kind in the namespace, as of the resource version ``version``."""
        ...


class Watcher:
    """Keeps the objects of one kind in one namespace current in ``cache``, on a thread of its own. ``selector``:
    label selector; not used for events."""

    def __init__(self, api: Api, kind: Kind, namespace: str, selector: str, cache: WatchHandler) -> None:
        self._api, self._kind, self._namespace, self._cache = api, kind, namespace, cache
        self._path = kind.path.format(namespace)
        self._query = {kind.query: selector if kind.query == "labelSelector" else "type=Warning"}
        self._closing, self._changed = threading.Event(), threading.Condition()
        self._listed, self._fault, self._warned = False, "", False
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.name}-{namespace}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait at most 5 s for its end."""
        self._closing.set()
        stream = self._stream
        if stream is not None:
            stream.shutdown()
        self._thread.join(timeout=5)

    @property
    def unavailable_reason(self) -> str | None:
        """Why a kind that is not ``required`` cannot be watched, as far as is known; otherwise None."""
        return None if self._kind.required else self._fault or None

    def wait_ready(self, deadline: float) -> None:
        """Block until a required kind is listed, at most until ``deadline`` (monotonic). Raises ``EngineUnreachable`` if it is
        not, or if its watch fails now."""
        if not self._kind.required:
            return
        with self._changed:
            known = self._changed.wait_for(lambda: self._listed or self._fault, max(deadline - time.monotonic(), 0.0))
            if self._fault:
                raise EngineUnreachable(self._fault)
            if not known:
                raise EngineUnreachable(f"Kubernetes has not listed its {self._kind.name} yet")

    def _run(self) -> None:
        """List and watch until ``close``. After an error, resume after a delay."""
        version, delay = "", 0.0
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                version = version or self._list()
                version = self._watch(version)
                delay = 0.0 if time.monotonic() - began > _MIN_WATCH_SECONDS else _MIN_WATCH_SECONDS
            except _WatchInterrupted as cut:
                version, delay = cut.version, _BACKOFF[0]
            except EngineUnreachable as error:
                delay = self._record_failure(error.detail, delay)
            except Refusal as refusal:
                if refusal.code == 410:
                    version, delay = "", _BACKOFF[0]
                else:  # an API server that has just started refuses all requests until it has read the roles
                    self._warn_once(refusal)
                    delay = self._record_failure(
                        f"Kubernetes refuses to list {self._kind.name}: {refusal.message}", delay
                    )
            except Exception as error:  # no faulty answer may stop the updates of the cache
                log.exception("the watch of %s", self._kind.name)
                version, delay = "", self._record_failure(f"the watch of {self._kind.name} failed: {error!r}", delay)
            self._closing.wait(delay * random.uniform(0.75, 1.25))

    def _warn_once(self, refusal: Refusal) -> None:
        """Log that a kind which is not ``required`` cannot be watched; once, until it is watched again."""
        if not self._kind.required and not self._warned:
            text = "%s cannot be watched, so waiting jobs show fewer reasons; trying again: %s"
            log.warning(text, self._kind.name, refusal.message)
        self._warned = True

    def _record_failure(self, detail: str, delay: float) -> float:
        """Record why the kind cannot be watched, and return the seconds until the next try. ``delay``: the seconds before the
        last try; the result is twice as long, within limits."""
        self._set_fault(fault=detail)
        return min(max(2 * delay, _BACKOFF[0]), _BACKOFF[1])

    def _set_fault(self, fault: str = "") -> None:
        """Record the fault. Without an argument, clear it and record that the kind is listed."""
        with self._changed:
            self._fault = fault
            self._listed = self._listed or not fault
            self._changed.notify_all()

    def _list(self) -> str:
        """List all objects, page by page, pass them to the handler, and return the version to watch from. Raises as ``Api``."""
        items: list[Json] = []
        more: dict[str, str | int] = {}
        while True:
            page = self._api.get(self._path, limit=_PAGE, **self._query, **more)
            items += page.get("items") or []
            more = {"continue": page["metadata"].get("continue") or ""}
            if not more["continue"]:
                break
        version = str(page["metadata"]["resourceVersion"])
        self._cache.replace(self._kind.name, items, self._namespace, version)
        self._set_fault()
        return version

    def _watch(self, version: str) -> str:
        """Watch from ``version`` until the server ends the watch or ``close`` is called, and return the version to resume from.
        Raises ``_WatchInterrupted``, ``EngineUnreachable`` and ``Refusal``."""
        query: dict[str, str | int] = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        with self._api.stream(
            self._path, _WATCH_SECONDS, timeoutSeconds=_WATCH_SECONDS, **self._query, **query
        ) as stream:
            self._stream, self._warned = stream, False
            self._set_fault()
            try:
                for line in stream.lines():
                    version = self._apply_event(json.loads(line)) or version
                    if self._closing.is_set():
                        break
            except EngineUnreachable:
                raise _WatchInterrupted(version) from None
            finally:
                self._stream = None
        return version

    def _apply_event(self, event: Json) -> str | None:
        """Pass the object of one event, except a bookmark, to the handler, and return the version to resume from, if any. Raises
        ``Refusal``."""
        object_ = event["object"]
        if event["type"] == "ERROR":
            raise Refusal(int(object_.get("code", 500)), json.dumps(object_).encode())
        if event["type"] != "BOOKMARK":
            self._cache.apply(self._kind.name, object_, self._namespace, deleted=event["type"] == "DELETED")
        version: str | None = object_["metadata"].get("resourceVersion")
        return version


class _WatchInterrupted(Exception):
    """A watch's connection broke after it was established; ``version``: the version from which to resume."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.version = version
