"""One kind of objects in one namespace, listed once and then watched, on a thread of its own; a ``Told`` hears of it."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.kubernetes.api import Api, Json, Refusal, Stream

log = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 290
_PAGE: Final = 500
_BACKOFF: Final = (0.2, 10.0)
"""First and longest delay between tries to connect, seconds; with jitter."""
_SHORTEST: Final = 1.0
"""Seconds that a watch should last: a server that ends them sooner is not asked again at once."""


@dataclass(frozen=True)
class Kind:
    """A kind of objects that is watched. ``needed``: nothing is known without it."""

    name: str
    path: str
    query: str
    needed: bool = True


class Told(Protocol):
    """Who is told."""

    def apply(self, kind: str, object_: Json, namespace: str, *, deleted: bool = False) -> None:
        """One event of a watch."""
        ...

    def replace(self, kind: str, items: list[Json], namespace: str, version: str) -> None:
        """A whole list, of that version."""
        ...


class Watcher:
    """Keeps one kind in one namespace current, on a thread of its own."""

    def __init__(self, api: Api, kind: Kind, namespace: str, selector: str, cache: Told) -> None:
        self._api, self._kind, self._namespace, self._cache = api, kind, namespace, cache
        self._path = kind.path.format(namespace)
        self._query = {kind.query: selector if kind.query == "labelSelector" else "type=Warning"}
        self._closing, self._changed = threading.Event(), threading.Condition()
        self._listed, self._fault, self._warned = False, "", False
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.name}-{namespace}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        stream = self._stream
        if stream is not None:
            stream.shut()
        self._thread.join(timeout=5)

    @property
    def blind(self) -> str | None:
        """Why a kind that nobody waits for in ``ready`` is not watched; None: it is, as far as is known."""
        return None if self._kind.needed else self._fault or None

    def ready(self, deadline: float) -> None:
        if not self._kind.needed:
            return
        with self._changed:
            told = self._changed.wait_for(lambda: self._listed or self._fault, max(deadline - time.monotonic(), 0.0))
            if self._fault:
                raise EngineUnreachable(self._fault)
            if not told:
                raise EngineUnreachable(f"Kubernetes has not listed its {self._kind.name} yet")

    def _run(self) -> None:
        version, delay = "", 0.0
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                version = version or self._list()
                version = self._watch(version)
                delay = 0.0 if time.monotonic() - began > _SHORTEST else _SHORTEST
            except _Cut as cut:
                version, delay = cut.version, _BACKOFF[0]
            except EngineUnreachable as error:
                delay = self._failed(error.detail, delay)
            except Refusal as refusal:
                if refusal.code == 410:
                    version, delay = "", _BACKOFF[0]
                else:  # an API server that has just started refuses everybody until it has read the roles
                    self._warn(refusal)
                    delay = self._failed(f"Kubernetes refuses to list {self._kind.name}: {refusal.message}", delay)
            except Exception as error:  # no fault of one answer may leave a cache that stands still
                log.exception("the watch of %s", self._kind.name)
                version, delay = "", self._failed(f"the watch of {self._kind.name} failed: {error!r}", delay)
            self._closing.wait(delay * random.uniform(0.75, 1.25))

    def _warn(self, refusal: Refusal) -> None:
        """Once, of what nobody waits for in ``ready``."""
        if not self._kind.needed and not self._warned:
            text = "%s are not watched, so waiting jobs tell less; asked for again: %s"
            log.warning(text, self._kind.name, refusal.message)
        self._warned = True

    def _failed(self, detail: str, delay: float) -> float:
        self._tell(fault=detail)
        return min(max(2 * delay, _BACKOFF[0]), _BACKOFF[1])

    def _tell(self, fault: str = "") -> None:
        with self._changed:
            self._fault = fault
            self._listed = self._listed or not fault
            self._changed.notify_all()

    def _list(self) -> str:
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
        self._tell()
        return version

    def _watch(self, version: str) -> str:
        """Follow from ``version`` until the server ends the watch; the version to go on from. Raises ``_Cut`` where the
        connection broke, ``Refusal`` (410) where the version is forgotten."""
        query: dict[str, str | int] = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        with self._api.stream(
            self._path, _WATCH_SECONDS, timeoutSeconds=_WATCH_SECONDS, **self._query, **query
        ) as stream:
            self._stream, self._warned = stream, False
            self._tell()
            try:
                for line in stream.lines():
                    version = self._take(json.loads(line)) or version
                    if self._closing.is_set():
                        break
            except EngineUnreachable:
                raise _Cut(version) from None
            finally:
                self._stream = None
        return version

    def _take(self, event: Json) -> str | None:
        object_ = event["object"]
        if event["type"] == "ERROR":
            raise Refusal(int(object_.get("code", 500)), json.dumps(object_).encode())
        if event["type"] != "BOOKMARK":
            self._cache.apply(self._kind.name, object_, self._namespace, deleted=event["type"] == "DELETED")
        version: str | None = object_["metadata"].get("resourceVersion")
        return version


class _Cut(Exception):
    """A watch's connection broke after it had been made."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.version = version
