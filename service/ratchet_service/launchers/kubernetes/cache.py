"""What is true in the cluster, told by watches: a poll of any number of attempts costs no request.

One list and then one watch per kind and namespace, resumed where it stopped. Bookmarks keep the place fresh; when the server has
forgotten it (410 Gone), the kind is listed once more, and what is missing from the list was deleted meanwhile. What a deletion
took away stays here for a while as it was last: it may be the only evidence of why an attempt ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ratchet_service.launchers.base import attempt_name
from ratchet_service.launchers.kubernetes.api import Api, Json
from ratchet_service.launchers.kubernetes.manifests import EPOCH, JOB_ID
from ratchet_service.launchers.kubernetes.pods import Pod, first_seen
from ratchet_service.launchers.kubernetes.states import Seen, finished, forbids
from ratchet_service.launchers.kubernetes.watcher import Kind, Watcher

_SYNC_PATIENCE: Final = 10.0
_KEPT: Final = 900.0
"""Seconds that what is deleted is remembered."""
_EVENTS_KEPT: Final = 5000


@dataclass
class _Entry:
    """``since``: of a pod's states (``first_seen``)."""

    object: Json
    namespace: str
    deleted_at: float | None = None
    since: Mapping[str, float] = field(default_factory=dict)


class Cache:
    """Jobs and pods of one service, and the warnings about them. ``start`` begins to watch; thread-safe."""

    def __init__(self, api: Api, namespaces: tuple[str, ...], selector: str) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Entry] = {}
        self._pods: dict[str, dict[str, _Entry]] = {}
        self._warnings: dict[str, str] = {}
        self._forbidden: dict[str, float] = {}
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
            pods = [Pod(e.object, e.deleted_at is not None, e.since) for e in self._pods.get(name, {}).values()]
            warnings = {key: self._warnings[key] for key in [name, *(p.name for p in pods)] if key in self._warnings}
            forbidden = self._forbidden.get(name)
        return Seen(
            job=None if job is None else job.object,
            deleted=job is not None and job.deleted_at is not None,
            pods=tuple(pods),
            warnings=warnings,
            forbidden_since=forbidden,
            blind=next((watcher.blind for watcher in self._watchers if watcher.blind is not None), None),
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
        now = time.monotonic()
        entry = _Entry(object_, namespace, now if deleted else None)
        with self._lock:
            if kind == "events":
                if not deleted:  # after its time
                    self._warn(object_, now)
            elif kind == "jobs":
                self._job(entry)
            else:
                name = _attempt(object_)
                if name is not None:
                    pods, uid = self._pods.setdefault(name, {}), str(object_["metadata"]["uid"])
                    entry.since = first_seen(object_, pods[uid].since if uid in pods else {}, now)
                    pods[uid] = entry
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

    def _warn(self, event: Json, now: float) -> None:
        about = str((event.get("involvedObject") or {}).get("name", ""))
        if about.startswith("job-"):
            self._warnings.pop(about, None)  # to the end
            self._warnings[about] = f"{event.get('reason', '')}: {' '.join(str(event.get('message', '')).split())}"
            if forbids(self._warnings[about]):
                self._forbidden.setdefault(about, now)
            else:
                self._forbidden.pop(about, None)
            while len(self._warnings) > _EVENTS_KEPT:
                oldest = next(iter(self._warnings))
                del self._warnings[oldest]
                self._forbidden.pop(oldest, None)

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
