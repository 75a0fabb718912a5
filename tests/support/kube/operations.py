"""The verbs of an API server on a store: what creating, patching and deleting mean for each kind of object."""

from __future__ import annotations

import copy
import random
from datetime import datetime, timedelta
from typing import Any

from tests.support.kube.defaults import fill_job
from tests.support.kube.store import JOBS, PODS, ApiError, Object, Resource, Store, now
from tests.support.kube.validation import check

FOREGROUND = "foregroundDeletion"
_IMMUTABLE = ("template", "selector", "completions", "completionMode", "podFailurePolicy")


def create(store: Store, resource: Resource, namespace: str, given: Object, dry: bool = False) -> Object:
    """Raises ``ApiError``: 409 when the name is taken, 400 and 422 for what is no such object."""
    metadata = given.setdefault("metadata", {})
    if "name" not in metadata and "generateName" in metadata:
        metadata["name"] = metadata["generateName"] + "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
    check(resource, given)
    if resource == JOBS:
        fill_job(given)
    if not dry:
        return store.create(resource, namespace, given)
    if store.find(resource, namespace, metadata["name"]) is not None:
        store.create(resource, namespace, given)  # says that it is there
    return given


def patch(store: Store, resource: Resource, namespace: str, name: str, body: Any, status: bool = False) -> Object:
    """A merge patch (a dict; a strategic one is taken as such) or a JSON patch (a list)."""

    def change(made: Object) -> None:
        before = copy.deepcopy(made)
        _json_patch(made, body) if isinstance(body, list) else merge(made, body)
        wanted = made["metadata"].get("resourceVersion")
        if wanted not in (None, before["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on {resource.full} "{name}"')
        if status:
            made |= {"metadata": before["metadata"], "spec": before.get("spec")}
        elif resource in (JOBS, PODS):
            made["status"] = before["status"]
            _settle(resource, before, made)

    return store.update(resource, namespace, name, change)


def _settle(resource: Resource, before: Object, made: Object) -> None:
    if made["spec"] == before["spec"]:
        return
    if resource == JOBS:
        for key in _IMMUTABLE:
            if made["spec"].get(key) != before["spec"].get(key) and not _still_suspended(key, before, made):
                message = f'Job.batch "{made["metadata"]["name"]}" is invalid: spec.{key}: field is immutable'
                raise ApiError(422, "Invalid", message, {"causes": [{"field": f"spec.{key}"}]})
    made["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1


def _still_suspended(key: str, before: Object, made: Object) -> bool:
    """A suspended Job that never started may still be told nodes, tolerations, labels (Kueue does)."""
    if key != "template" or not before["spec"].get("suspend") or "startTime" in before["status"]:
        return False
    ours, theirs = (copy.deepcopy(j["spec"]["template"]) for j in (before, made))
    for template in (ours, theirs):
        template.pop("metadata", None)
        for allowed in ("nodeSelector", "tolerations", "affinity", "schedulingGates"):
            template["spec"].pop(allowed, None)
    return bool(ours == theirs)


def merge(target: Object, body: Object) -> None:
    """RFC 7396, in place."""
    for key, value in body.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def _json_patch(target: Object, operations: list[Object]) -> None:
    for operation in operations:
        *way, last = (p.replace("~1", "/").replace("~0", "~") for p in operation["path"].split("/")[1:])
        at: Any = target
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if operation["op"] == "remove":
            del at[last]
        elif isinstance(at, list):
            at.append(operation["value"]) if last == "-" else at.insert(int(last), operation["value"])
        else:
            at[last] = operation["value"]


def delete(store: Store, resource: Resource, namespace: str, name: str, options: Object) -> Object:
    """As the options say: ``propagationPolicy`` (Background without), ``gracePeriodSeconds``, ``preconditions``."""
    found = store.get(resource, namespace, name)
    uid = (options.get("preconditions") or {}).get("uid")
    if uid not in (None, found["metadata"]["uid"]):
        message = f'Operation cannot be fulfilled on {resource.full} "{name}": Precondition failed: UID in precondition: {uid}'
        raise ApiError(409, "Conflict", message)
    if resource == PODS:
        return delete_pod(store, namespace, name, options.get("gracePeriodSeconds"))
    if options.get("propagationPolicy") == "Foreground" and resource == JOBS:
        return store.update(resource, namespace, name, _foreground)
    if resource != JOBS and found["metadata"].get("finalizers"):
        return store.update(resource, namespace, name, lambda o: o["metadata"].setdefault("deletionTimestamp", now()))
    if options.get("propagationPolicy") == "Orphan":
        for pod in store.select(PODS, namespace):
            if owner(pod) == found["metadata"]["uid"]:
                store.update(PODS, namespace, pod["metadata"]["name"], lambda p: p["metadata"].pop("ownerReferences"))
    store.remove(resource, namespace, name)
    details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": found["metadata"]["uid"]}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _foreground(job: Object) -> None:
    job["metadata"].setdefault("deletionTimestamp", now())
    job["metadata"].setdefault("deletionGracePeriodSeconds", 0)
    finalizers = job["metadata"].setdefault("finalizers", [])
    if FOREGROUND not in finalizers:
        finalizers.append(FOREGROUND)


def delete_pod(store: Store, namespace: str, name: str, grace: int | None = None) -> Object:
    """Mark it; the kubelet takes it away once its process has ended. What never ran, has ended or gets no grace goes at once."""

    def change(pod: Object) -> None:
        seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        if "nodeName" not in pod["spec"] or pod["status"]["phase"] in ("Succeeded", "Failed"):
            seconds = 0
        metadata = pod["metadata"]
        if "deletionTimestamp" not in metadata:
            metadata |= {"deletionTimestamp": now(seconds), "deletionGracePeriodSeconds": seconds}
        elif seconds < metadata["deletionGracePeriodSeconds"]:  # counted from the first wish
            earlier = seconds - metadata["deletionGracePeriodSeconds"]
            metadata |= {
                "deletionTimestamp": later(metadata["deletionTimestamp"], earlier),
                "deletionGracePeriodSeconds": seconds,
            }

    return store.update(PODS, namespace, name, change)


def later(time: str, seconds: float) -> str:
    """A time of an object, moved by so much."""
    return (datetime.fromisoformat(time) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def evict(store: Store, namespace: str, name: str, body: Object) -> Object:
    """The eviction API: says why on the pod, then deletes it."""
    disrupt(store, namespace, name, "EvictionByEvictionAPI", "Eviction API: evicting")
    delete_pod(store, namespace, name, (body.get("deleteOptions") or {}).get("gracePeriodSeconds"))
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def disrupt(store: Store, namespace: str, name: str, reason: str, message: str) -> None:
    """The condition DisruptionTarget, which says that the pod's end is none of its own doing."""

    def change(pod: Object) -> None:
        set_condition(pod, "DisruptionTarget", "True", reason, message)

    store.update(PODS, namespace, name, change)


def set_condition(made: Object, type_: str, status: str, reason: str | None = None, message: str | None = None) -> None:
    """The condition of that type, in its place where there is one, else the last."""
    at = now()
    condition = {"type": type_, "status": status, "lastProbeTime": at if made["kind"] == "Job" else None}
    condition |= {"lastTransitionTime": at}
    condition |= {k: v for k, v in (("reason", reason), ("message", message)) if v is not None}
    conditions = made["status"].setdefault("conditions", [])
    for i, old in enumerate(conditions):
        if old["type"] == type_:
            if any(old.get(k) != condition.get(k) for k in ("status", "reason", "message")):
                conditions[i] = condition
            return
    conditions.append(condition)


def condition(made: Object, type_: str) -> Object | None:
    """The condition of that type, if it is true."""
    for found in made["status"].get("conditions", ()):
        if found["type"] == type_ and found["status"] == "True":
            return dict(found)
    return None


def owner(made: Object) -> str | None:
    """The uid of the controller that the object belongs to."""
    return next((r["uid"] for r in made["metadata"].get("ownerReferences", ()) if r.get("controller")), None)
