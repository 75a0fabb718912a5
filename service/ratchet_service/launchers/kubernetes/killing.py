"""Ending an attempt by force, and the proof that it is dead.

A Job that has ended by itself, with all its pods, stays for its time, for people. Of any other the proof is the server's own
word, not the watches': there is no Job, so nothing makes pods; then there is no pod that runs. A pod goes when its machine's
kubelet says that its containers have ended. Force (grace 0) takes the object away without that word, so it is used only on
machines that have not answered for ``lost_after``: then what may still run there is fenced by its epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from ratchet_service.launchers.base import AttemptRef, EngineUnreachable
from ratchet_service.launchers.kubernetes import manifests
from ratchet_service.launchers.kubernetes.api import Api, Refusal
from ratchet_service.launchers.kubernetes.creation import JOBS, PODS, delete, told
from ratchet_service.launchers.kubernetes.pods import Pod
from ratchet_service.launchers.kubernetes.settings import Site
from ratchet_service.launchers.kubernetes.states import Seen, concludes, finished

log = logging.getLogger(__name__)

_MARK: Final = "deleted-by-service"
_GRACE: Final = 1
"""Seconds of a kill; 0 is force."""
_CONCLUDES: Final = 5.0
"""Seconds that the Job controller has for the conclusion from the end of all pods; it mostly takes one."""


def delete_job(api: Api, site: Site, name: str) -> bool:
    """In the foreground: the Job stays until its pods have gone, each after its own grace. False: there is no such Job."""
    found = [
        delete(api, f"{JOBS.format(namespace)}/{name}", propagationPolicy="Foreground") for namespace in site.namespaces
    ]
    return any(found)


def mark(ref: AttemptRef) -> None:
    """Leave word, for other processes of this service too, that it was not somebody else who deleted the Job."""
    with suppress(OSError):  # on a full disk the message will say that it was
        (ref.paths.root / _MARK).touch()


def marked(ref: AttemptRef) -> bool:
    return (ref.paths.root / _MARK).exists()


class Killing:
    """Attempts that are being ended by force."""

    def __init__(self, api: Api, site: Site) -> None:
        self._api, self._site = api, site
        self._told: dict[str, set[str]] = {}  # attempt -> its pods that were told
        self._concluding: dict[str, float] = {}  # attempts whose pods have all ended: since when
        self._overdue: dict[str, float] = {}  # pods of machines that do not answer: since when, by this process's clock

    def kill(self, ref: AttemptRef, seen: Seen) -> list[str]:
        """One step: what may still be alive, for people; empty once there is nothing. ``seen``: by the watches; while they show
        something, the server is not asked again."""
        if ref.name not in self._told and concludes(seen, ref.nodes):
            if finished(seen):
                self._concluding.pop(ref.name, None)
                return []
            if time.monotonic() - self._concluding.setdefault(ref.name, time.monotonic()) < _CONCLUDES:
                return [f"job {ref.name}, which is about to end by itself"]
        self._concluding.pop(ref.name, None)
        if ref.name in self._told:
            self._end(ref, seen.pods)
            left = _left(seen)
            if left:
                return [*left, *self._lost(seen.pods)]
        mark(ref)
        job = delete_job(self._api, self._site, ref.name)
        self._told.setdefault(ref.name, set())
        pods = self._pods(ref)
        self._end(ref, pods)
        left = [*([f"job {ref.name}"] if job else []), *(pod.note() for pod in pods if not pod.over)]
        if not left:
            del self._told[ref.name]
        return left

    def _pods(self, ref: AttemptRef) -> list[Pod]:
        own = manifests.selector(self._site.instance)
        chosen = f"{own},{manifests.JOB_ID}={ref.job_id},{manifests.EPOCH}={ref.epoch}"
        out = []
        for namespace in self._site.namespaces:
            try:
                listed = self._api.get(PODS.format(namespace), labelSelector=chosen)
            except Refusal as refusal:
                raise EngineUnreachable(told(refusal)) from None
            out += [Pod(item) for item in listed.get("items") or ()]
        return out

    def _end(self, ref: AttemptRef, pods: Collection[Pod]) -> None:
        for pod in pods:
            if not pod.over and pod.uid not in self._told[ref.name]:
                delete(self._api, pod.path, gracePeriodSeconds=_GRACE)
                self._told[ref.name].add(pod.uid)

    def _lost(self, pods: Collection[Pod]) -> list[str]:
        """What is to be said of pods on machines that do not answer; those that have been silent for long enough are given up."""
        patience, now, out = self._site.settings.lost_after, time.monotonic(), []
        for pod in pods:
            if pod.over or not pod.overdue(now):
                continue
            waited = now - self._overdue.setdefault(pod.uid, now)
            text = f"the machine of {pod.name} does not answer"
            if patience is None:
                out.append(f"{text}: once it is surely off, run `kubectl delete pod {pod.name} --force`")
            elif waited < patience:
                out.append(f"{text}: in {patience - waited:.0f} s it counts as fenced")
            else:
                log.warning("%s: it counts as fenced", text)
                delete(self._api, pod.path, gracePeriodSeconds=0)
                del self._overdue[pod.uid]
        return out


def _left(seen: Seen) -> list[str]:
    job = [] if seen.job is None or seen.deleted else [f"job {seen.job['metadata']['name']}"]
    return [*job, *(pod.note() for pod in seen.pods if not pod.over)]
