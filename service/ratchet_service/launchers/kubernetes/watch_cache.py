"""A cache of the cluster's state, kept current by watches. The last state of a deleted Job or pod is kept for some time: it may
be the only evidence of why an attempt ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ratchet_service.launchers.base import attempt_name
from ratchet_service.launchers.kubernetes.client import Api, Json
from ratchet_service.launchers.kubernetes.job_status import ObservedState, is_finished, is_permanent_refusal
from ratchet_service.launchers.kubernetes.manifests import ATTEMPT, JOB_ID
from ratchet_service.launchers.kubernetes.pod_status import Pod, first_seen_times
from ratchet_service.launchers.kubernetes.watch_stream import Kind, Watcher

_SYNC_TIMEOUT: Final = 10.0
_KEEP_DELETED_SECONDS: Final = 900.0
"""Seconds for which deleted objects are kept."""
_MAX_WARNINGS: Final = 5000


@dataclass
class _Entry:
    """One object in the cache. ``deleted_at``: monotonic; None: it exists. ``state_since``: see ``first_seen_times``."""

    object: Json
    namespace: str
    deleted_at: float | None = None
    state_since: Mapping[str, float] = field(default_factory=dict)


class Cache:
    """The Jobs and pods of one service, and recent warnings about objects whose names are like those of attempts, in memory.
    ``start`` starts the watches. Thread-safe."""

    def __init__(self, api: Api, namespaces: tuple[str, ...], selector: str) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Entry] = {}
        self._pods: dict[str, dict[str, _Entry]] = {}
        self._warnings: dict[str, str] = {}
        self._forbidden_since: dict[str, float] = {}
        self._pruned_at = time.monotonic()
        self._watchers = [
            Watcher(api, kind, namespace, selector, self)
            for namespace in namespaces
            for kind in (
                Kind("jobs", "/apis/batch/v1/namespaces/{}/jobs", "labelSelector"),
                Kind("pods", "/api/v1/namespaces/{}/pods", "labelSelector"),
                Kind("events", "/api/v1/namespaces/{}/events", "fieldSelector", required=False),
            )
        ]

    def start(self) -> None:
        """Start the watches; does not wait for their first results."""
        for watcher in self._watchers:
            watcher.start()

    def close(self) -> None:
        """Stop the watches."""
        for watcher in self._watchers:
            watcher.close()

    def wait_ready(self) -> None:
        """Block until Jobs and pods are listed, at most ``_SYNC_TIMEOUT`` seconds. Raises ``EngineUnreachable`` if they are not,
        or if a watch of them fails now."""
        deadline = time.monotonic() + _SYNC_TIMEOUT
        for watcher in self._watchers:
            watcher.wait_ready(deadline)

    def observe(self, name: str) -> ObservedState:
        """Return what the cache has of the attempt with this name; ``deleted_by_service`` is not set."""
        with self._lock:
            job = self._jobs.get(name)
            pods = [Pod(e.object, e.deleted_at is not None, e.state_since) for e in self._pods.get(name, {}).values()]
            warnings = {key: self._warnings[key] for key in [name, *(p.name for p in pods)] if key in self._warnings}
            forbidden = self._forbidden_since.get(name)
        return ObservedState(
            job=None if job is None else job.object,
            deleted=job is not None and job.deleted_at is not None,
            pods=tuple(pods),
            warnings=warnings,
            forbidden_since=forbidden,
            events_unavailable=next(
                (watcher.unavailable_reason for watcher in self._watchers if watcher.unavailable_reason is not None),
                None,
            ),
        )

    def live_attempts(self) -> list[str]:
        """Return the sorted names of attempts with a Job or a pod that exists, and is neither being deleted nor kept for
        inspection. Attempts whose Job is being deleted are left out."""
        with self._lock:
            kept = {
                name
                for name, entry in self._jobs.items()
                if _is_live(entry) and is_finished(ObservedState(entry.object))
            }
            jobs = {name for name, entry in self._jobs.items() if _is_live(entry)} - kept
            pods = {
                name
                for name, entries in self._pods.items()
                if any(_is_live(e) and not (name in kept and Pod(e.object).has_ended) for e in entries.values())
            }
            dying = {name for name, entry in self._jobs.items() if not _is_live(entry) and entry.deleted_at is None}
        return sorted((jobs | pods) - dying)

    def add_job(self, job: Json, namespace: str) -> None:
        """Add a Job that a request to create it returned, unless the cache has it (by uid) already."""
        name = str(job["metadata"]["name"])
        with self._lock:
            known = self._jobs.get(name)
            if known is None or known.object["metadata"]["uid"] != job["metadata"]["uid"]:
                self._jobs[name] = _Entry(job, namespace)

    def refresh(self, job: Json, namespace: str) -> None:
        """Store a Job that a request returned, unless the cache has a newer version of it."""
        with self._lock:
            known = self._jobs.get(str(job["metadata"]["name"]))
            if known is None or not _is_newer(known.object, str(job["metadata"].get("resourceVersion", ""))):
                self._jobs[str(job["metadata"]["name"])] = _Entry(job, namespace)

    def apply(self, kind: str, object_: Json, namespace: str, *, deleted: bool = False) -> None:
        """Process one object of a watch or a list; its ``managedFields`` are removed. ``deleted``: this is its last state."""
        object_["metadata"].pop("managedFields", None)  # long and not used
        now = time.monotonic()
        entry = _Entry(object_, namespace, now if deleted else None)
        with self._lock:
            if kind == "events":
                if not deleted:  # a deletion only means that the event object expired
                    self._store_warning(object_, now)
            elif kind == "jobs":
                self._store_job(entry)
            else:
                name = _attempt_name_of(object_)
                if name is not None:
                    pods, uid = self._pods.setdefault(name, {}), str(object_["metadata"]["uid"])
                    entry.state_since = first_seen_times(object_, pods[uid].state_since if uid in pods else {}, now)
                    pods[uid] = entry
            self._prune()

    def replace(self, kind: str, items: list[Json], namespace: str, version: str) -> None:
        """Store a complete list, as of ``version``. Older objects of this kind (Jobs or pods) in the namespace that are not in it
        count as deleted."""
        for item in items:
            self.apply(kind, item, namespace)
        present = {item["metadata"]["uid"] for item in items}
        with self._lock:
            entries = [*self._jobs.values()] if kind == "jobs" else [e for p in self._pods.values() for e in p.values()]
            for entry in entries if kind != "events" else ():
                missing = entry.namespace == namespace and entry.object["metadata"]["uid"] not in present
                if missing and entry.deleted_at is None and not _is_newer(entry.object, version):
                    entry.deleted_at = time.monotonic()

    def _store_job(self, entry: _Entry) -> None:
        """Store a Job from a watch or a list, unless the cache has a newer version of it; its deletion is always stored. Called
        with the lock held."""
        metadata = entry.object["metadata"]
        known = self._jobs.get(str(metadata["name"]))
        # an older version would make every poll query the server again
        later = known is not None and _is_newer(known.object, str(metadata.get("resourceVersion", "")))
        if (
            known is not None
            and later
            and known.object["metadata"]["uid"] == metadata["uid"]
            and entry.deleted_at is None
        ):
            return
        self._jobs[str(metadata["name"])] = entry

    def _store_warning(self, event: Json, now: float) -> None:
        """Store a warning event about an object with a name like those of attempts, and since when such warnings say that the
        cluster forbids its pods. Called with the lock held."""
        about = str((event.get("involvedObject") or {}).get("name", ""))
        if about.startswith("job-"):
            self._warnings.pop(about, None)  # so that it is re-inserted at the end
            self._warnings[about] = f"{event.get('reason', '')}: {' '.join(str(event.get('message', '')).split())}"
            if is_permanent_refusal(self._warnings[about]):
                self._forbidden_since.setdefault(about, now)
            else:
                self._forbidden_since.pop(about, None)
            while len(self._warnings) > _MAX_WARNINGS:
                oldest = next(iter(self._warnings))
                del self._warnings[oldest]
                self._forbidden_since.pop(oldest, None)

    def _prune(self) -> None:
        """Drop objects that were deleted more than ``_KEEP_DELETED_SECONDS`` ago; at most once a minute. Called with the lock
        held."""
        now = time.monotonic()
        if now - self._pruned_at < 60:
            return
        self._pruned_at = now
        old = now - _KEEP_DELETED_SECONDS
        self._jobs = {n: e for n, e in self._jobs.items() if e.deleted_at is None or e.deleted_at > old}
        for name, entries in list(self._pods.items()):
            kept = {uid: e for uid, e in entries.items() if e.deleted_at is None or e.deleted_at > old}
            if kept:
                self._pods[name] = kept
            else:
                del self._pods[name]


def _is_live(entry: _Entry) -> bool:
    """True if the object exists and is not being deleted."""
    return entry.deleted_at is None and "deletionTimestamp" not in entry.object["metadata"]


def _attempt_name_of(object_: Json) -> str | None:
    """Return the name of the attempt to which the object belongs, by its labels; None: it belongs to none."""
    labels = object_["metadata"].get("labels") or {}
    attempt = labels.get(ATTEMPT, "")
    return attempt_name(labels[JOB_ID], int(attempt)) if JOB_ID in labels and attempt.isdigit() else None


def _is_newer(object_: Json, version: str) -> bool:
    """True if the object was written after resource version ``version``, by numbers that increase (KEP-5504)."""
    own = str(object_["metadata"].get("resourceVersion", ""))
    return own.isdigit() and version.isdigit() and int(own) > int(version)
