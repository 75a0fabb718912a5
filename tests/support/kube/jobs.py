"""A Job controller, as one of 1.36 was recorded at work: what it does in which order, with which conditions and reasons.

What no recording shows (a Job that a disruption fails, and replacements after counted failures) follows that controller's
source, and is unproven against a live one. Only ``podReplacementPolicy: Failed`` is modelled.
"""

from __future__ import annotations

import threading
import time
from calendar import timegm
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.kube.defaults import INDEX, TRACKING, pod_of
from tests.support.kube.operations import FOREGROUND, condition, delete_pod, owner, set_condition
from tests.support.kube.store import EVENTS, JOBS, PODS, ApiError, Object, Store, now

ENDED = ("Succeeded", "Failed")


class JobController:
    """``batch``: seconds that changes are gathered before a Job is looked at again; ``backoff``: seconds between a failure and
    the pod that takes its place; ``quota``: how many pods the namespace may have; ``denied``: why it may have none, in the
    words of whoever forbids them."""

    def __init__(self, store: Store, batch: float = 1.0, backoff: float = 10.0) -> None:
        self._store, self.batch, self._backoff = store, batch, backoff
        self.quota: int | None = None
        self.denied: str | None = None
        self._due: dict[tuple[str, str], float] = {}
        self._wanted: set[tuple[str, str]] = set()  # of those that are due: whose spec changed
        self._held: set[str] = set()
        self._looking = threading.Lock()
        self._failed_at: dict[str, float] = {}  # uid of a Job: when a pod of it failed last
        self._generations: dict[str, int] = {}

    def next_due(self) -> float | None:
        with self._looking:
            return min((due for key, due in self._due.items() if not self._waits(key)), default=None)

    def hold(self, name: str) -> None:
        """Until ``let_go`` the Job of that name is looked at for changes of its spec alone: what its pods do meanwhile is one
        batch, however long they take."""
        with self._looking:
            self._held.add(name)

    def let_go(self, name: str) -> None:
        with self._looking:
            self._held.discard(name)

    def _waits(self, key: tuple[str, str]) -> bool:
        return key[1] in self._held and key not in self._wanted

    def job_changed(self, job: Object) -> None:
        """A change of the spec is looked at immediately, one of the status with the next batch."""
        uid, generation = job["metadata"]["uid"], job["metadata"].get("generation", 1)
        wanted = self._generations.get(uid) != generation or "deletionTimestamp" in job["metadata"]
        self._generations[uid] = generation
        self._enqueue(job, 0.0 if wanted else self.batch)

    def pod_changed(self, pod: Object) -> None:
        job = self._job_of(pod)
        if job is None:
            return
        if pod["status"]["phase"] == "Failed" and TRACKING in pod["metadata"].get("finalizers", ()):
            self._failed_at.setdefault(job["metadata"]["uid"], time.monotonic())
        self._enqueue(job, self.batch)

    def run_due(self) -> None:
        with self._looking:
            for key in [k for k, due in self._due.items() if due <= time.monotonic() and not self._waits(k)]:
                del self._due[key]
                self._wanted.discard(key)
                job = self._store.find(JOBS, *key)
                if job is not None:
                    self._sync(job)

    def _job_of(self, pod: Object) -> Object | None:
        uid = owner(pod)
        jobs = self._store.select(JOBS, pod["metadata"]["namespace"]) if uid else []
        return next((job for job in jobs if job["metadata"]["uid"] == uid), None)

    def _enqueue(self, job: Object, delay: float) -> None:
        key, due = (job["metadata"]["namespace"], job["metadata"]["name"]), time.monotonic() + delay
        self._due[key] = min(due, self._due.get(key, due))
        if delay == 0.0:
            self._wanted.add(key)

    # --- one look at one Job -------------------------------------------------------------------------------------------

    def _sync(self, job: Object) -> None:
        pods = [p for p in self._store.select(PODS, job["metadata"]["namespace"]) if owner(p) == job["metadata"]["uid"]]
        if "deletionTimestamp" in job["metadata"]:
            self._delete_in_foreground(job, pods)
        elif condition(job, "Complete") or condition(job, "Failed"):
            self._expire(job)
        else:
            self._advance(job, pods)

    def _delete_in_foreground(self, job: Object, pods: list[Object]) -> None:
        """A foreground deletion: the Job goes behind its pods."""
        for pod in pods:
            self._delete(pod)
            self._release(pod)
        if not pods:
            self._change(job, lambda j: j["metadata"]["finalizers"].remove(FOREGROUND))
        else:
            self._enqueue(job, self.batch / 10)

    def _expire(self, job: Object) -> None:
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is None:
            return
        ended = condition(job, "Complete") or condition(job, "Failed")
        assert ended is not None
        left = timegm(time.strptime(ended["lastTransitionTime"], "%Y-%m-%dT%H:%M:%SZ")) + ttl - time.time()
        if left > 0:
            self._enqueue(job, left)
        else:
            self._store.remove(JOBS, job["metadata"]["namespace"], job["metadata"]["name"])

    def _advance(self, job: Object, pods: list[Object]) -> None:
        ended = [p for p in pods if p["status"]["phase"] in ENDED and TRACKING in p["metadata"].get("finalizers", ())]
        counted = [p for p in ended if p["status"]["phase"] == "Failed" and _action(job, p)[0] != "Ignore"]
        ignored = [p for p in ended if p["status"]["phase"] == "Failed" and _action(job, p)[0] == "Ignore"]
        if ignored and len(ignored) == len(ended) and self._backing_off(job):
            return  # as recorded: until another pod has ended, or the back-off is over, nothing is done about it
        done = _indexes(job) | {_index(p) for p in pods if p["status"]["phase"] == "Succeeded"}
        active = [p for p in pods if p["status"]["phase"] not in ENDED and "deletionTimestamp" not in p["metadata"]]
        terminating = [p for p in pods if p["status"]["phase"] not in ENDED and "deletionTimestamp" in p["metadata"]]
        if not condition(job, "SuccessCriteriaMet") and not condition(job, "FailureTarget"):
            self._set_outcome_condition(job, counted, done)
        failing = condition(job, "FailureTarget") is not None
        suspended = bool(job["spec"]["suspend"]) and not failing and not condition(job, "SuccessCriteriaMet")
        if failing:
            for pod in active:
                self._delete(pod)
            rest = [p for p in [*active, *terminating] if TRACKING in p["metadata"].get("finalizers", ())]
            counted, ended = [*counted, *rest], [*ended, *rest]
            active, terminating = [], [*terminating, *active]
        elif suspended:
            for pod in active:
                self._release(pod)
            for pod in active:
                self._delete(pod)
            active, terminating = [], [*terminating, *active]
        elif not condition(job, "SuccessCriteriaMet"):
            active += self._create(job, [*active, *terminating], done, counted)
        self._update_status(job, suspended, active, terminating, ended, counted, done)

    def _set_outcome_condition(self, job: Object, counted: list[Object], done: set[int]) -> None:
        """Has it ended, and how?"""
        for pod in counted:
            action, message = _action(job, pod)
            if action == "FailJob":
                set_condition(job, "FailureTarget", "True", "PodFailurePolicy", message)
                return
        if job["status"].get("failed", 0) + len(counted) > job["spec"]["backoffLimit"]:
            message = "Job has reached the specified backoff limit"
            set_condition(job, "FailureTarget", "True", "BackoffLimitExceeded", message)
        elif len(done) >= job["spec"]["completions"]:
            message = "Reached expected number of succeeded pods"
            set_condition(job, "SuccessCriteriaMet", "True", "CompletionsReached", message)

    def _create(self, job: Object, there: list[Object], done: set[int], counted: list[Object]) -> list[Object]:
        """Pods for the indexes that have none; after a failure only when the back-off is over."""
        taken = {_index(p) for p in there} | done
        missing = [i for i in range(job["spec"]["completions"]) if i not in taken]
        namespace, made = job["metadata"]["namespace"], []
        if missing and counted and self._backing_off(job):
            return []
        self._failed_at.pop(job["metadata"]["uid"], None)
        for index in missing:
            pod = pod_of(job, index)
            denied = self.denied
            if self.quota is not None and len(self._store.select(PODS, namespace)) >= self.quota:
                counts = f"requested: pods=1, used: pods={self.quota}, limited: pods={self.quota}"
                denied = f"exceeded quota: pods, {counts}"
            if denied is not None:
                message = f'Error creating: pods "{pod["metadata"]["name"]}" is forbidden: {denied}'
                warn(self._store, job, "FailedCreate", message)
                self._enqueue(job, self.batch)
                break
            made.append(self._store.create(PODS, namespace, pod))
        return made

    def _backing_off(self, job: Object) -> bool:
        left = self._failed_at[job["metadata"]["uid"]] + self._backoff - time.monotonic()
        if left > 0:
            self._enqueue(job, left)
        return left > 0

    def _update_status(
        self,
        job: Object,
        suspended: bool,
        active: list[Object],
        terminating: list[Object],
        ended: list[Object],
        counted: list[Object],
        done: set[int],
    ) -> None:
        """Tell, let go of what is counted, and tell again."""
        status = {k: v for k, v in job["status"].items() if k in ("conditions", "failed", "startTime")}
        if suspended:
            set_condition(job, "Suspended", "True", "JobSuspended", "Job suspended")
            status.pop("startTime", None)
        else:
            if any(c["type"] == "Suspended" for c in job["status"].get("conditions", ())):
                set_condition(job, "Suspended", "False", "JobResumed", "Job resumed")
            status.setdefault("startTime", now())
        status["conditions"] = job["status"].get("conditions", [])
        ready = sum(condition(p, "Ready") is not None for p in active)
        status |= {"terminating": len(terminating), "ready": ready, "uncountedTerminatedPods": {}}
        status |= {"active": len(active), "succeeded": len(done), "completedIndexes": _format_indexes(done)}
        uncounted = [p["metadata"]["uid"] for p in counted]
        self._write_status(job, status | {"uncountedTerminatedPods": {"failed": uncounted} if uncounted else {}})
        for pod in ended:
            self._release(pod)
        status["failed"] = status.get("failed", 0) + len(uncounted)
        met = condition(job, "SuccessCriteriaMet") or condition(job, "FailureTarget")
        if met and not terminating:
            good = met["type"] == "SuccessCriteriaMet"
            set_condition(job, "Complete" if good else "Failed", "True", met["reason"], met["message"])
            status |= {"completionTime": now()} if good else {}
        self._write_status(job, status)

    def _write_status(self, job: Object, status: Object) -> None:
        kept = {k: v for k, v in status.items() if v or k in ("terminating", "ready", "uncountedTerminatedPods")}
        self._change(job, lambda j: j.update(status=kept))

    def _change(self, job: Object, change: Any) -> None:
        with _ignore_not_found():
            self._store.update(JOBS, job["metadata"]["namespace"], job["metadata"]["name"], change)

    def _delete(self, pod: Object) -> None:
        with _ignore_not_found():
            delete_pod(self._store, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _release(self, pod: Object) -> None:
        release(self._store, pod)


@contextmanager
def _ignore_not_found() -> Iterator[None]:
    """Since it was listed somebody may have deleted it."""
    try:
        yield
    except ApiError as error:
        if error.code != 404:
            raise


def release(store: Store, pod: Object) -> None:
    """Take the Job controller's finalizer away."""
    with suppress(ApiError):  # it may be gone
        store.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], _without_tracking)


def _without_tracking(pod: Object) -> None:
    kept = [f for f in pod["metadata"].get("finalizers", ()) if f != TRACKING]
    pod["metadata"].pop("finalizers", None)
    if kept:
        pod["metadata"]["finalizers"] = kept


def warn(store: Store, about: Object, reason: str, message: str) -> None:
    """An event of type Warning; the same one again raises its count."""
    metadata = about["metadata"]
    name = f"{metadata['name']}.{abs(hash((metadata['uid'], reason))):x}"
    involved = {k: metadata[k] for k in ("name", "namespace", "uid")} | {"kind": about["kind"]}
    found = store.find(EVENTS, metadata["namespace"], name)
    if found is None:
        event = {"metadata": {"name": name}, "involvedObject": involved, "type": "Warning", "count": 1}
        event |= {"reason": reason, "message": message, "firstTimestamp": now(), "lastTimestamp": now()}
        store.create(EVENTS, metadata["namespace"], event)
    else:
        again = {"count": found["count"] + 1, "lastTimestamp": now(), "message": message}
        store.update(EVENTS, metadata["namespace"], name, lambda e: e.update(again))


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _indexes(job: Object) -> set[int]:
    found: set[int] = set()
    for part in filter(None, job["status"].get("completedIndexes", "").split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _format_indexes(indexes: set[int]) -> str:
    """``0,1`` and ``0-2``: three or more in a row are one range."""
    rows: list[list[int]] = []
    for index in sorted(indexes):
        if rows and rows[-1][-1] == index - 1:
            rows[-1].append(index)
        else:
            rows.append([index])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in rows)


def _action(job: Object, pod: Object) -> tuple[str, str]:
    """What the failure policy makes of a failed pod, and why: the first rule that fits; Count without one."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for i, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", ())):
        if "onExitCodes" in rule:
            for container, code in _exits(pod):
                wanted = rule["onExitCodes"]
                named = wanted.get("containerName") in (None, container)
                if named and (code in wanted["values"]) == (wanted["operator"] == "In"):
                    failed = f"Container {container} for pod {where} failed with exit code {code}"
                    return rule["action"], f"{failed} matching {rule['action']} rule at index {i}"
        for wanted in rule.get("onPodConditions") or ():
            if any(
                c["type"] == wanted["type"] and c["status"] == wanted["status"] for c in pod["status"]["conditions"]
            ):
                has = f"Pod {where} has condition {wanted['type']}"
                return rule["action"], f"{has} matching {rule['action']} rule at index {i}"
    return "Count", ""


def _exits(pod: Object) -> list[tuple[str, int]]:
    """Containers that ended with another code than 0."""
    states = [(c["name"], c["state"].get("terminated")) for c in pod["status"].get("containerStatuses", ())]
    return [(name, ended["exitCode"]) for name, ended in states if ended and ended["exitCode"] != 0]
