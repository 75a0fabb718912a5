"""One pod: why it waits, why it ended, and whether it can still begin. Pure, on plain JSON.

What has taken too long is told by this process's monotonic clock, from when it first saw the state (``first_seen``): the times in
objects are of the cluster's clocks, which may differ from ours, and either may be set. After a restart of the service patience
begins anew: it may be late, never early.

Reasons: of the DisruptionTarget condition, kubernetes.io "Disruptions"; of a pod's status and of waiting containers, kubelet's
source (``pkg/kubelet/eviction``, ``nodeshutdown``, ``images/types.go``, ``container/sync_result.go``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.phases import Cause
from ratchet_service.launchers.kubernetes.patch import AGENT

Json = dict[str, Any]

INDEX: Final = "batch.kubernetes.io/job-completion-index"
OVERDUE: Final = 10.0
"""Seconds beyond the end of its grace, after which a pod that is not reported dead has lost its machine."""
_GRACE: Final = 30.0
"""Kubernetes' own, for objects that do not say it."""
_SCHEDULED: Final = "scheduled"
_CLAIMLESS: Final = "claimless"
_NO_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]*" not found')
"""Of the scheduler."""
_ENDED: Final = "ended"
_UNKNOWN: Final = "ContainerStatusUnknown"
_STOPPED: Final = (137, 143)
"""Exit codes of what was told to end, in time or not."""
GOES_ON: Final = "the job goes on from its last checkpoint in a new attempt"

DISRUPTIONS: Final[dict[str, tuple[Cause, str]]] = {
    "PreemptionByScheduler": (
        Cause.HIGHER_PRIORITY,
        f"pods of higher priority took its place; {GOES_ON} when there is room (launcher.priority_class decides who yields)",
    ),
    "EvictionByEvictionAPI": (Cause.EVICTED, f"it was evicted, as when a node is drained; {GOES_ON}"),
    "TerminationByKubelet": (
        Cause.EVICTED,
        f"its node ended it, being short of memory or disk, or shut down; {GOES_ON}; a job that names resources.memory is "
        "evicted later than others",
    ),
    "DeletionByTaintManager": (Cause.NODE_LOST, f"its node does not answer, or must be left; {GOES_ON}"),
    "DeletionByPodGC": (Cause.NODE_LOST, f"its node is not there any more; {GOES_ON}"),
}
_STATUS_REASONS: Final[dict[str, Cause]] = {
    "Evicted": Cause.EVICTED,
    "NodeShutdown": Cause.EVICTED,
    "Terminated": Cause.EVICTED,
    "Shutdown": Cause.EVICTED,
    "Preempting": Cause.HIGHER_PRIORITY,
    "NodeLost": Cause.NODE_LOST,
    "DeadlineExceeded": Cause.TIME_LIMIT,
}
_OVER_ITS_LIMIT: Final = re.compile(r"exceed(s|ed) (its|the) .*limit")
"""Of an eviction that the pod itself is to blame for; kubelet's ``eviction_manager.go``."""
_VOLUME: Final = re.compile(r'EmptyDir volume "([^"]+)"')
_IMAGE_NEVER: Final = ("InvalidImageName", "ErrImageNeverPull")
_IMAGE_TRIES: Final = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
_CONTAINER_TRIES: Final = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)
_NOT_STARTED: Final = ("StartError", "ContainerCannotRun")


@dataclass(frozen=True)
class Patience:
    """Seconds, as in the settings."""

    fault: float
    start: float
    result: float


@dataclass(frozen=True)
class Pod:
    """``deleted``: the object is gone; what is here is what it was last. ``since``: of its states, when this process first saw
    them (``first_seen``)."""

    object: Json
    deleted: bool = False
    since: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.object["metadata"].get("uid", self.name))

    @property
    def path(self) -> str:
        """Of the API."""
        return f"/api/v1/namespaces/{self.object['metadata']['namespace']}/pods/{self.name}"

    @property
    def node(self) -> int:
        """The index of the pod's node in the attempt."""
        metadata = self.object["metadata"]
        return int((metadata.get("annotations") or {}).get(INDEX) or (metadata.get("labels") or {}).get(INDEX) or 0)

    @property
    def phase(self) -> str:
        return str(self.object.get("status", {}).get("phase", "Pending"))

    @property
    def machine(self) -> str | None:
        """The cluster's node that it was given."""
        name = self.object["spec"].get("nodeName")
        return None if name is None else str(name)

    @property
    def over(self) -> bool:
        """It runs no more, or there is no such pod any more."""
        return self.deleted or self.phase in ("Succeeded", "Failed")

    def overdue(self, now: float) -> bool:
        """Somebody deletes it, its grace is over, and nobody has told of its end. ``now``: monotonic."""
        metadata = self.object["metadata"]
        since = self.since.get(_leaving(self.object) or "")
        return since is not None and now > since + float(metadata.get("deletionGracePeriodSeconds", _GRACE)) + OVERDUE

    @property
    def deletion_wanted(self) -> str | None:
        """When somebody wanted it gone, RFC 3339 in UTC; None: nobody has. A shorter grace does not move it."""
        at = self.object["metadata"].get("deletionTimestamp")
        if at is None:
            return None
        grace = timedelta(seconds=float(self.object["metadata"].get("deletionGracePeriodSeconds", 0)))
        return (datetime.fromisoformat(at) - grace).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def never_began(self) -> bool:
        """It was ended, and no container of it is known to have run: a kubelet says also of one that it never started that it is
        not to be found (``ContainerStatusUnknown``)."""
        unknown = self.terminated is None or self.terminated.get("reason") == _UNKNOWN
        return self.over and unknown and self.deletion_wanted is not None

    @property
    def stopped_by_deletion(self) -> bool:
        """It ended because it was deleted, or will: not one that had ended by itself before."""
        wanted, ended = self.deletion_wanted, self.terminated
        if wanted is None or ended is None or ended.get("reason") == _UNKNOWN:
            return wanted is not None
        told = ended.get("exitCode") in _STOPPED and ended.get("reason") != "OOMKilled"
        return told and str(ended.get("finishedAt") or "9999") >= wanted

    @property
    def status(self) -> Json:
        """Of the agent's container; empty before there is any."""
        statuses: list[Json] = self.object.get("status", {}).get("containerStatuses") or []
        found: Json = next((s for s in statuses if s["name"] == AGENT), statuses[0] if len(statuses) == 1 else {})
        return found

    @property
    def terminated(self) -> Json | None:
        found: Json | None = self.status.get("state", {}).get("terminated")
        return found

    @property
    def ended_since(self) -> float | None:
        """When its container was first seen to have ended, monotonic."""
        return self.since.get(_ENDED)

    @property
    def scheduled_since(self) -> float | None:
        """When it was first seen to have been given a machine, monotonic."""
        return self.since.get(_SCHEDULED)

    @property
    def ended_at(self) -> str:
        """For putting ends into order; RFC 3339 in UTC, so text will do."""
        announced = _condition(self.object, "DisruptionTarget") or {}
        metadata = self.object["metadata"]
        times = (
            announced.get("lastTransitionTime"),
            (self.terminated or {}).get("finishedAt"),
            metadata.get("deletionTimestamp"),
        )
        return str(next((time for time in times if time), "9999"))

    def note(self) -> str:
        """For people: what runs where."""
        where = f" on {self.machine}" if self.machine else ""
        return f"pod {self.name}{where}: {'deleted' if self.deleted and not self.terminated else self.phase}"


def first_seen(object_: Json, before: Mapping[str, float], now: float) -> dict[str, float]:
    """The states that patience is counted from, and when each was first seen, monotonic. ``before``: of the same pod until now. A
    deletion that is hurried (a shorter grace) is a state of its own."""
    ended = Pod(object_).terminated is not None
    scheduled = _condition(object_, "PodScheduled") is not None
    claimless = _NO_CLAIM.search(_unscheduled(object_)) is not None
    there = (
        _SCHEDULED if scheduled else None,
        _CLAIMLESS if claimless else None,
        _ENDED if ended else None,
        _leaving(object_),
    )
    return {state: before.get(state, now) for state in there if state is not None}


def disruption(pod: Pod) -> tuple[Cause, str] | None:
    """What was announced to the pod before it was ended."""
    found = _condition(pod.object, "DisruptionTarget")
    if found is None:
        return None
    reason = str(found.get("reason", ""))
    cause, text = DISRUPTIONS.get(reason, (Cause.EVICTED, f"Kubernetes ended it ({reason}); {GOES_ON}"))
    return cause, f"{text}{_quoted(found.get('message'))}"


def status_end(pod: Pod) -> tuple[Cause, str] | None:
    """The reason in a failed pod's own status, or that it never got as far as a container."""
    status = pod.object.get("status", {})
    reason, message = str(status.get("reason", "")), status.get("message")
    if reason == "Evicted" and _OVER_ITS_LIMIT.search(str(message)):
        volume = _VOLUME.search(str(message))
        key = _key_of_size(volume[1]) if volume is not None else "launcher.tmp_size"
        return (
            Cause.RANK_KILLED,
            f"it wrote more into its directories than it may: raise {key}, or write less{_quoted(message)}",
        )
    if reason in _STATUS_REASONS:
        cause = _STATUS_REASONS[reason]
        return cause, f"{reason}; {GOES_ON}{_quoted(message)}"
    if pod.phase == "Failed" and pod.terminated is None and not pod.never_began:
        text = f"its node did not take it ({reason or 'no reason given'}){_quoted(message)}"
        return Cause.LAUNCHER_ERROR, text
    return None


def _key_of_size(volume: str) -> str:
    """The key of the spec by which a directory of the pod's gets more room (``mounts.mounted``)."""
    if volume.startswith("volume-"):
        return f"volumes[{volume.removeprefix('volume-')}].empty_dir"
    return {"tmp": "launcher.tmp_size", "shm": "launcher.shm_size"}.get(
        volume, f"the size of {volume} in launcher.pod_patch"
    )


def container_end(pod: Pod) -> tuple[Cause, str] | None:
    """How the agent's container ended, for where it left no result."""
    ended = pod.terminated
    if ended is None:
        return (Cause.UNKNOWN, "the pod was deleted by force; how it ended is not known") if pod.deleted else None
    code, reason, said = int(ended.get("exitCode", 0)), str(ended.get("reason", "")), _quoted(ended.get("message"))
    if reason == "OOMKilled":
        limit = pod.object["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory")
        text = (
            f"it was killed for using more memory than its limit ({limit})"
            if limit
            else "its machine ran out of memory"
        )
        return Cause.OOM, f"{text}: raise resources.memory, or use smaller batches"
    if reason in _NOT_STARTED:
        return Cause.LAUNCHER_ERROR, f"the container did not start ({reason}): check image and python{said}"
    if reason == _UNKNOWN:
        if pod.never_began:
            return None
        return Cause.NODE_LOST, f"its machine does not know the container any more, as after a restart; {GOES_ON}{said}"
    if code == 0:
        text = "it ended with code 0 and left no result.json: is the claim of the launchers file the service's run directory?"
        return Cause.UNKNOWN, text
    if code in CAUSE_OF_EXIT_CODE:
        return CAUSE_OF_EXIT_CODE[code], f"it ended with code {code}{said}"
    signal = f" (signal {code - 128})" if code > 128 else ""
    return Cause.UNKNOWN, f"it ended with code {code}{signal}, and Kubernetes does not say why{said}"


def hopeless(pod: Pod, now: float, patience: Patience) -> tuple[Cause, str] | None:
    """Why a pod that has not begun will not. ``now``: monotonic."""
    claimless = pod.since.get(_CLAIMLESS)
    if claimless is not None and not pod.over and now - claimless > patience.fault:
        text = f"the claim of one of its volumes is not there: check volumes of the spec{_quoted(_unscheduled(pod.object))}"
        return Cause.LAUNCHER_ERROR, text
    reason, message = _waits(pod)
    since = pod.scheduled_since
    if pod.over or since is None or pod.status.get("state", {}).keys() & {"running", "terminated"}:
        return None  # a pod outlives its container, as long as a sidecar ends
    waited, image = now - since, pod.object["spec"]["containers"][0].get("image")
    if reason in _IMAGE_NEVER or (reason in _IMAGE_TRIES and waited > patience.fault):
        text = (
            f"the image {image} cannot be pulled ({reason}): check its name, and launcher.image_pull_secrets{message}"
        )
        return Cause.LAUNCHER_ERROR, text
    if reason in _CONTAINER_TRIES and waited > patience.fault:
        text = f"the container cannot be made ({reason}): check the Secrets, ConfigMaps and volumes that the spec names{message}"
        return Cause.LAUNCHER_ERROR, text
    if waited > patience.start:
        text = f"its container did not start within {patience.start:g} s on {pod.machine} ({reason or 'no reason'}){message}"
        return Cause.LAUNCHER_ERROR, text
    return None


def waits_for(pod: Pod, warning: str | None) -> str | None:
    """Why the pod has not begun; None: it has."""
    if pod.phase != "Pending":
        return None
    if _condition(pod.object, "PodScheduled") is None:
        gates = pod.object["spec"].get("schedulingGates")
        default = "is held by a scheduling gate" if gates else "no node was found yet"
        return f"waits for a machine: {_unscheduled(pod.object) or warning or default}"
    reason, message = _waits(pod)
    if reason in _IMAGE_NEVER or reason in _IMAGE_TRIES:
        return f"its image cannot be pulled now ({reason}){message}"
    said = message or (f": {warning}" if warning else "")
    return f"its container is being made on {pod.machine} ({reason or 'Pending'}){said}"


def _unscheduled(object_: Json) -> str:
    """The scheduler's words on why it found no node; empty where it has none."""
    found = (c for c in _conditions(object_) if c["type"] == "PodScheduled" and c["status"] != "True")
    return str(next(found, {}).get("message") or "")


def _waits(pod: Pod) -> tuple[str, str]:
    """Reason and message of a container that waits: an init container's first."""
    status = pod.object.get("status", {})
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for found in statuses:
        waiting = found.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            return str(waiting.get("reason", "")), _quoted(waiting.get("message"))
    return "", ""


def _conditions(object_: Json) -> list[Json]:
    return list(object_.get("status", {}).get("conditions") or ())


def _condition(object_: Json, kind: str) -> Json | None:
    return next((c for c in _conditions(object_) if c["type"] == kind and c["status"] == "True"), None)


def _quoted(message: Any) -> str:
    """The engine's words, on one line, at the end of a sentence."""
    text = " ".join(str(message or "").split())
    return f": {text[-600:]}" if text else ""


def _leaving(object_: Json) -> str | None:
    """Names its deletion; None: nobody deletes it."""
    at = object_["metadata"].get("deletionTimestamp")
    return None if not at else f"leaves at {at}"
