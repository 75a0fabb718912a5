"""What is true in the cluster, told by watches: a poll of any number of attempts costs no request.

One list and then one watch per kind and namespace, resumed where it stopped. Bookmarks keep the place fresh; when the server has
forgotten it (410 Gone), the kind is listed once more, and what is missing from the list was deleted meanwhile. What a deletion
took away stays here for a while as it was last: it may be the only evidence of why an attempt ended.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from dataclasses import dataclass
from typing import Final

from ratchet_service.launchers.base import EngineUnreachable, attempt_name
from ratchet_service.launchers.kubernetes.api import Api, Json, Refusal, Stream
from ratchet_service.launchers.kubernetes.manifests import EPOCH, JOB_ID
from ratchet_service.launchers.kubernetes.pods import Pod
from ratchet_service.launchers.kubernetes.states import Seen, finished

log = logging.getLogger(__name__)

_SYNC_PATIENCE: Final = 10.0
_WATCH_SECONDS: Final = 290
_PAGE: Final = 500
_BACKOFF: Final = (0.2, 10.0)
"""First and longest delay between tries to connect, seconds; with jitter."""
_SHORTEST: Final = 1.0
"""Seconds that a watch should last: a server that ends them sooner is not asked again at once."""
_KEPT: Final = 900.0
"""Seconds that what is deleted is remembered."""
_EVENTS_KEPT: Final = 5000


@dataclass(frozen=True)
class Kind:
    """A kind of objects that is watched. ``needed``: nothing is known without it."""

    name: str
    path: str
    query: str
    needed: bool = True


@dataclass
class _Entry:
    object: Json
    namespace: str
    deleted_at: float | None = None


class Cache:
    """Jobs and pods of one service, and the warnings about them. ``start`` begins to watch; thread-safe."""

    def __init__(self, api: Api, namespaces: tuple[str, ...], selector: str) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Entry] = {}
        self._pods: dict[str, dict[str, _Entry]] = {}
        self._warnings: dict[str, str] = {}
        self._pruned = time.monotonic()
        self._watchers = [
            Watcher(api, kind, namespace, selector, self)
            for namespace in namespaces
            for kind in (
                Kind("jobs", "/apis/batch/v1/namespaces/{}/jobs", "labelSelector"),
                Kind("pods", "/api/v1/namespaces/{}/pods", "labelSelector"),
                Kind("events", "/api/v1/namespaces/{}/events", "fieldSelector", needed=False),
            )
        ]

    def start(self) -> None:
        for watcher in self._watchers:
            watcher.start()

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.close()

    def ready(self) -> None:
        """Return when everything was listed and is watched. Raises ``EngineUnreachable``."""
        deadline = time.monotonic() + _SYNC_PATIENCE
        for watcher in self._watchers:
            watcher.ready(deadline)

    def seen(self, name: str) -> Seen:
        with self._lock:
            job = self._jobs.get(name)
            pods = [Pod(e.object, e.deleted_at is not None) for e in self._pods.get(name, {}).values()]
            warnings = {key: self._warnings[key] for key in [name, *(p.name for p in pods)] if key in self._warnings}
        return Seen(
            job=None if job is None else job.object,
            deleted=job is not None and job.deleted_at is not None,
            pods=tuple(pods),
            warnings=warnings,
        )

    def names(self) -> list[str]:
        """Attempts of which something is there that nobody is deleting already. A Job that has ended, with all its pods, stays
        for its time, for people."""
        with self._lock:
            kept = {name for name, entry in self._jobs.items() if _stays(entry) and finished(Seen(entry.object))}
            jobs = {name for name, entry in self._jobs.items() if _stays(entry)} - kept
            pods = {
                name
                for name, entries in self._pods.items()
                if any(_stays(e) and not (name in kept and Pod(e.object).over) for e in entries.values())
            }
            dying = {name for name, entry in self._jobs.items() if not _stays(entry) and entry.deleted_at is None}
        return sorted((jobs | pods) - dying)

    def add_job(self, job: Json, namespace: str) -> None:
        """Of an answer to a request, ahead of the watch."""
        name = str(job["metadata"]["name"])
        with self._lock:
            known = self._jobs.get(name)
            if known is None or known.object["metadata"]["uid"] != job["metadata"]["uid"]:
                self._jobs[name] = _Entry(job, namespace)

    def refresh(self, job: Json, namespace: str) -> None:
        """Of an answer to a request, unless the watch has brought something newer."""
        with self._lock:
            known = self._jobs.get(str(job["metadata"]["name"]))
            if known is None or not _newer(known.object, str(job["metadata"].get("resourceVersion", ""))):
                self._jobs[str(job["metadata"]["name"])] = _Entry(job, namespace)

    def apply(self, kind: str, object_: Json, namespace: str, *, deleted: bool = False) -> None:
        """One event of a watch, or one item of a list."""
        object_["metadata"].pop("managedFields", None)  # long, and of no use here
        entry = _Entry(object_, namespace, time.monotonic() if deleted else None)
        with self._lock:
            if kind == "events":
                self._warn(object_)
            elif kind == "jobs":
                self._job(entry)
            else:
                name = _attempt(object_)
                if name is not None:
                    self._pods.setdefault(name, {})[str(object_["metadata"]["uid"])] = entry
            self._prune()

    def replace(self, kind: str, items: list[Json], namespace: str, version: str) -> None:
        """A whole list: what is not in it is deleted, except what was made after it."""
        for item in items:
            self.apply(kind, item, namespace)
        present = {item["metadata"]["uid"] for item in items}
        with self._lock:
            entries = [*self._jobs.values()] if kind == "jobs" else [e for p in self._pods.values() for e in p.values()]
            for entry in entries if kind != "events" else ():
                missing = entry.namespace == namespace and entry.object["metadata"]["uid"] not in present
                if missing and entry.deleted_at is None and not _newer(entry.object, version):
                    entry.deleted_at = time.monotonic()

    def _job(self, entry: _Entry) -> None:
        """Of the watch, unless an answer has brought the same Job as it was later: else every poll would ask again."""
        metadata = entry.object["metadata"]
        known = self._jobs.get(str(metadata["name"]))
        later = known is not None and _newer(known.object, str(metadata.get("resourceVersion", "")))
        if (
            known is not None
            and later
            and known.object["metadata"]["uid"] == metadata["uid"]
            and entry.deleted_at is None
        ):
            return
        self._jobs[str(metadata["name"])] = entry

    def _warn(self, event: Json) -> None:
        about = str((event.get("involvedObject") or {}).get("name", ""))
        if about.startswith("job-"):
            self._warnings.pop(about, None)  # to the end
            self._warnings[about] = f"{event.get('reason', '')}: {' '.join(str(event.get('message', '')).split())}"
            while len(self._warnings) > _EVENTS_KEPT:
                del self._warnings[next(iter(self._warnings))]

    def _prune(self) -> None:
        now = time.monotonic()
        if now - self._pruned < 60:
            return
        self._pruned = now
        old = now - _KEPT
        self._jobs = {n: e for n, e in self._jobs.items() if e.deleted_at is None or e.deleted_at > old}
        for name, entries in list(self._pods.items()):
            kept = {uid: e for uid, e in entries.items() if e.deleted_at is None or e.deleted_at > old}
            if kept:
                self._pods[name] = kept
            else:
                del self._pods[name]


class Watcher:
    """Keeps one kind in one namespace current, on a thread of its own."""

    def __init__(self, api: Api, kind: Kind, namespace: str, selector: str, cache: Cache) -> None:
        self._api, self._kind, self._namespace, self._cache = api, kind, namespace, cache
        self._path = kind.path.format(namespace)
        self._query = {kind.query: selector if kind.query == "labelSelector" else "type=Warning"}
        self._closing, self._changed = threading.Event(), threading.Condition()
        self._listed, self._fault = False, ""
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
                elif not self._kind.needed:
                    log.warning("events are not watched, so waiting jobs tell less: %s", refusal.message)
                    return
                else:
                    delay = self._failed(f"Kubernetes refuses to list {self._kind.name}: {refusal.message}", delay)
            except Exception as error:  # no fault of one answer may leave a cache that stands still
                log.exception("the watch of %s", self._kind.name)
                version, delay = "", self._failed(f"the watch of {self._kind.name} failed: {error!r}", delay)
            self._closing.wait(delay * random.uniform(0.75, 1.25))

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
            self._stream = stream
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


def _stays(entry: _Entry) -> bool:
    return entry.deleted_at is None and "deletionTimestamp" not in entry.object["metadata"]


def _attempt(object_: Json) -> str | None:
    labels = object_["metadata"].get("labels") or {}
    epoch = labels.get(EPOCH, "")
    return attempt_name(labels[JOB_ID], int(epoch)) if JOB_ID in labels and epoch.isdigit() else None


def _newer(object_: Json, version: str) -> bool:
    """Was the object written after that version of the list? Versions are numbers that grow (KEP-5504)."""
    own = str(object_["metadata"].get("resourceVersion", ""))
    return own.isdigit() and version.isdigit() and int(own) > int(version)
