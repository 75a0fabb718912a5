"""Kills an attempt, and proves that it is dead: the server has neither its Job nor a pod that runs. An attempt is also dead if
its Job has ended by itself and all its pods have ended; this Job is kept for inspection. A pod on a machine that does not answer
is deleted by force after ``lost_after`` seconds. If this setting is None, such a pod is never deleted by force."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from ratchet_service.launchers.base import AttemptRef, EngineUnreachable
from ratchet_service.launchers.kubernetes import manifests
from ratchet_service.launchers.kubernetes.client import Api, Refusal
from ratchet_service.launchers.kubernetes.create import JOBS, PODS, delete_object, refusal_message
from ratchet_service.launchers.kubernetes.job_status import ObservedState, is_finished, will_conclude
from ratchet_service.launchers.kubernetes.pod_status import Pod
from ratchet_service.launchers.kubernetes.settings import Site

log = logging.getLogger(__name__)

_MARKER_FILE: Final = "deleted-by-service"
_GRACE: Final = 1
"""Seconds of grace for a kill; 0 would be force."""
_CONCLUDE_SECONDS: Final = 5.0
"""Seconds for the Job controller to set the Job's condition after the end of all pods; it mostly takes one."""


def delete_job(api: Api, site: Site, name: str) -> bool:
    """Request the deletion of the Job ``name`` and its pods, in all namespaces that jobs may use. Return True if it exists.
    Raises ``EngineUnreachable``."""
    found = [
        delete_object(api, f"{JOBS.format(namespace)}/{name}", propagationPolicy="Foreground")
        for namespace in site.namespaces
    ]
    return any(found)


def mark_deleted(ref: AttemptRef) -> None:
    """Create a marker file, which records that this service itself deletes the attempt's Job. Errors are ignored."""
    with suppress(OSError):  # on a full disk the message will blame somebody else
        (ref.paths.root / _MARKER_FILE).touch()


def is_marked_deleted(ref: AttemptRef) -> bool:
    """True if the marker file of ``mark_deleted`` exists: this service deletes the attempt's Job, or has deleted it."""
    return (ref.paths.root / _MARKER_FILE).exists()


class AttemptKiller:
    """Kills attempts step by step: ``kill`` is called repeatedly until an attempt is dead. Keeps its state in memory."""

    def __init__(self, api: Api, site: Site) -> None:
        self._api, self._site = api, site
        self._deleted_pods: dict[str, set[str]] = {}  # attempt -> its pods that were deleted
        self._concluding_since: dict[str, float] = {}  # attempt whose pods have all ended -> since when
        self._overdue_since: dict[str, float] = {}  # pod of a machine that does not answer -> since when, monotonic

    def kill(self, ref: AttemptRef, observed: ObservedState) -> list[str]:
        """Do the next step of killing the attempt, and return texts about what may still be alive; empty once it is proved dead.
        Raises ``EngineUnreachable``."""
        if ref.name not in self._deleted_pods and will_conclude(observed, ref.nodes):
            if is_finished(observed):
                self._concluding_since.pop(ref.name, None)
                return []
            if time.monotonic() - self._concluding_since.setdefault(ref.name, time.monotonic()) < _CONCLUDE_SECONDS:
                return [f"job {ref.name}, which is about to end by itself"]
        self._concluding_since.pop(ref.name, None)
        if ref.name in self._deleted_pods:
            self._delete_pods(ref, observed.pods)
            left = _remaining(observed)
            if left:
                return [*left, *self._handle_unreachable(observed.pods)]
        mark_deleted(ref)
        job = delete_job(self._api, self._site, ref.name)
        self._deleted_pods.setdefault(ref.name, set())
        pods = self._list_pods(ref)
        self._delete_pods(ref, pods)
        left = [*([f"job {ref.name}"] if job else []), *(pod.describe() for pod in pods if not pod.has_ended)]
        if not left:
            del self._deleted_pods[ref.name]
        return left

    def _list_pods(self, ref: AttemptRef) -> list[Pod]:
        """Return the attempt's pods as the server lists them now. Raises ``EngineUnreachable``."""
        own = manifests.label_selector(self._site.instance)
        chosen = f"{own},{manifests.JOB_ID}={ref.job_id},{manifests.ATTEMPT}={ref.attempt}"
        out = []
        for namespace in self._site.namespaces:
            try:
                listed = self._api.get(PODS.format(namespace), labelSelector=chosen)
            except Refusal as refusal:
                raise EngineUnreachable(refusal_message(refusal)) from None
            out += [Pod(item) for item in listed.get("items") or ()]
        return out

    def _delete_pods(self, ref: AttemptRef, pods: Collection[Pod]) -> None:
        """Request, once for each pod, the deletion of those pods that have not ended, with a grace of one second."""
        for pod in pods:
            if not pod.has_ended and pod.uid not in self._deleted_pods[ref.name]:
                delete_object(self._api, pod.path, gracePeriodSeconds=_GRACE)
                self._deleted_pods[ref.name].add(pod.uid)

    def _handle_unreachable(self, pods: Collection[Pod]) -> list[str]:
        """Return messages about live pods whose machine does not answer; after the setting ``lost_after``, delete such a pod by
        force."""
        lost_after, now, out = self._site.settings.lost_after, time.monotonic(), []
        for pod in pods:
            if pod.has_ended or not pod.is_overdue(now):
                continue
            waited = now - self._overdue_since.setdefault(pod.uid, now)
            text = f"the machine of {pod.name} does not answer"
            if lost_after is None:
                out.append(f"{text}: once it is certainly switched off, run `kubectl delete pod {pod.name} --force`")
            elif waited < lost_after:
                out.append(f"{text}: in {lost_after - waited:.0f} s it counts as fenced")
            else:
                log.warning("%s: it counts as fenced", text)
                delete_object(self._api, pod.path, gracePeriodSeconds=0)
                del self._overdue_since[pod.uid]
        return out


def _remaining(observed: ObservedState) -> list[str]:
    """Return names of the Job and of the pods that have not ended, according to the watches."""
    job = [] if observed.job is None or observed.deleted else [f"job {observed.job['metadata']['name']}"]
    return [*job, *(pod.describe() for pod in observed.pods if not pod.has_ended)]
