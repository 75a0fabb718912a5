"""What an API server keeps: objects with versions, and the history that watches are served from."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]


class ApiError(Exception):
    """An answer that is no success; ``body`` is a Status object."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.body: Object = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "reason": reason, "details": details or {}, "code": code,
        }  # fmt: skip


@dataclass(frozen=True)
class Resource:
    """One kind of objects: ``group`` is empty for the core's."""

    group: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/v1" if self.group else "v1"

    @property
    def full(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def not_found(self, name: str) -> ApiError:
        details = {"name": name, "group": self.group, "kind": self.plural}
        return ApiError(404, "NotFound", f'{self.full} "{name}" not found', details)


JOBS, PODS = Resource("batch", "jobs", "Job"), Resource("", "pods", "Pod")
SERVICES, SECRETS = Resource("", "services", "Service"), Resource("", "secrets", "Secret")
EVENTS = Resource("", "events", "Event")
RESOURCES = {
    (r.group, r.plural): r for r in (JOBS, PODS, SERVICES, SECRETS, EVENTS, Resource("", "configmaps", "ConfigMap"))
}


@dataclass(frozen=True)
class Change:
    """One entry of the history. ``before``: the object's labels until then."""

    version: int
    resource: Resource
    type: str
    object: Object
    before: dict[str, str]


def now(ahead: float = 0.0) -> str:
    """The time as objects have it, in whole seconds."""
    return (datetime.now(UTC) + timedelta(seconds=ahead)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """Thread-safe. What is handed out are copies."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.history: list[Change] = []
        self.compacted = 0
        self._version = 100
        self._objects: dict[tuple[Resource, str, str], Object] = {}

    @property
    def version(self) -> int:
        return self._version

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.changed:
            return copy.deepcopy(self._objects.get((resource, namespace, name)))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self.find(resource, namespace, name)
        if found is None:
            raise resource.not_found(name)
        return found

    def select(self, resource: Resource, namespace: str | None = None, labels: Labels | None = None) -> list[Object]:
        with self.changed:
            found = [o for (r, n, _), o in self._objects.items() if r == resource and namespace in (None, n)]
            return copy.deepcopy([o for o in found if labels is None or labels(labels_of(o))])

    def create(self, resource: Resource, namespace: str, given: Object) -> Object:
        made = copy.deepcopy(given)
        name = made["metadata"]["name"]
        with self.changed:
            if (resource, namespace, name) in self._objects:
                details = {"name": name, "group": resource.group, "kind": resource.plural}
                raise ApiError(409, "AlreadyExists", f'{resource.full} "{name}" already exists', details)
            made |= {"kind": resource.kind, "apiVersion": resource.api_version}
            made["metadata"] |= {"namespace": namespace, "creationTimestamp": now()}
            made["metadata"].setdefault("uid", str(uuid.uuid4()))
            self._record("ADDED", resource, namespace, made, labels_of(made))
        return copy.deepcopy(made)

    def update(self, resource: Resource, namespace: str, name: str, change: Callable[[Object], None]) -> Object:
        """``change`` is given the object to alter it. An object whose deletion was wanted goes when its last finalizer does."""
        with self.changed:
            before = self.get(resource, namespace, name)
            after = copy.deepcopy(before)
            change(after)
            if after == before:
                return after
            wanted = after["metadata"].get("deletionTimestamp") is not None
            rests = after["metadata"].get("deletionGracePeriodSeconds", 0) == 0
            ended = wanted and rests and not after["metadata"].get("finalizers")
            self._record("DELETED" if ended else "MODIFIED", resource, namespace, after, labels_of(before))
            return copy.deepcopy(after)

    def remove(self, resource: Resource, namespace: str, name: str) -> Object:
        with self.changed:
            gone = self.get(resource, namespace, name)
            self._record("DELETED", resource, namespace, gone, labels_of(gone))
            return gone

    def put(self, type_: str, resource: Resource, namespace: str, given: Object) -> None:
        """Whatever ``type_`` says of an object made elsewhere, as it is."""
        with self.changed:
            self._record(type_, resource, namespace, copy.deepcopy(given), labels_of(given))

    def compact(self) -> None:
        """Forget the history: who watches from an earlier version is told that it has expired."""
        with self.changed:
            self._version += 10
            self.compacted = self._version
            self.changed.notify_all()

    def wait(self, version: int, seconds: float) -> None:
        """Return when there is something newer than ``version``, at the latest after ``seconds``."""
        with self.changed:
            self.changed.wait_for(lambda: self._version > version, seconds)

    def since(self, version: int) -> list[Change]:
        with self.changed:
            first = next((i for i, c in enumerate(self.history) if c.version > version), len(self.history))
            return self.history[first:]

    def _record(self, type_: str, resource: Resource, namespace: str, made: Object, before: dict[str, str]) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        key = (resource, namespace, made["metadata"]["name"])
        if type_ == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = copy.deepcopy(made)  # the caller may go on with its own
        self.history.append(Change(self._version, resource, type_, copy.deepcopy(made), before))
        self.changed.notify_all()


Labels = Callable[[dict[str, str]], bool]


def labels_of(object_: Object) -> dict[str, str]:
    return object_["metadata"].get("labels") or {}


def selector(text: str) -> Labels:
    """A label selector: ``a=b``, ``a!=b``, ``a``, ``!a``, ``a in (b,c)``, ``a notin (b)``, joined by commas."""
    tests = [_requirement(part.strip()) for part in _split(text) if part.strip()]
    return lambda labels: all(test(labels) for test in tests)


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _requirement(part: str) -> Labels:
    for word in (" notin ", " in "):
        if word in part:
            key, _, rest = part.partition(word)
            values = {v.strip() for v in rest.strip().strip("()").split(",")}
            inside = word == " in "
            return lambda labels: (labels.get(key.strip()) in values) == inside
    if "!=" in part:
        key, value = part.split("!=")
        return lambda labels: labels.get(key) != value
    if "=" in part:
        key, value = part.replace("==", "=").split("=")
        return lambda labels: labels.get(key) == value
    if part.startswith("!"):
        return lambda labels: part[1:] not in labels
    return lambda labels: part in labels
