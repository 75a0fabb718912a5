"""Evaluates one pod: why it waits, why it ended, and whether it can still start. Durations are measured by this process's
monotonic clock. Sources of the reasons: kubernetes.io "Disruptions", and kubelet's source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.phases import Cause
from ratchet_service.launchers.kubernetes.pod_patch import AGENT
from ratchet_service.launchers.kubernetes.volumes import CODE, TMP

Json = dict[str, Any]

INDEX: Final = "batch.kubernetes.io/job-completion-index"
OVERDUE: Final = 10.0
"""Seconds after the end of its grace, after which the machine of a pod that is not reported dead counts as lost."""
_GRACE: Final = 30.0
"""Seconds; Kubernetes' default, for objects without a grace."""
_SCHEDULED: Final = "scheduled"
_CLAIMLESS: Final = "claimless"
_NO_CLAIM: Final = re.compile(r'persistentvolumeclaim "[^"]*" not found')
"""In the scheduler's message."""
_ENDED: Final = "ended"
_UNKNOWN: Final = "ContainerStatusUnknown"
_STOP_EXIT_CODES: Final = (137, 143)
"""Exit codes after SIGKILL and SIGTERM."""
JOB_CONTINUES: Final = "the job continues from its last checkpoint in a new attempt"

DISRUPTIONS: Final[dict[str, tuple[Cause, str]]] = {
    "PreemptionByScheduler": (
        Cause.HIGHER_PRIORITY,
        f"pods of higher priority took its place; {JOB_CONTINUES} when resources are free (launcher.priority_class decides "
        "which pods are preempted)",
    ),
    "EvictionByEvictionAPI": (Cause.EVICTED, f"it was evicted, as when a node is drained; {JOB_CONTINUES}"),
    "TerminationByKubelet": (
        Cause.EVICTED,
        f"its node ended it, since it was short of memory or disk, or shut "
        f"down; {JOB_CONTINUES}; a job that names resources.memory is "
        "evicted later than others",
    ),
    "DeletionByTaintManager": (Cause.NODE_LOST, f"its node does not respond, or is tainted NoExecute; {JOB_CONTINUES}"),
    "DeletionByPodGC": (Cause.NODE_LOST, f"its node no longer exists; {JOB_CONTINUES}"),
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
"""In messages of evictions that the pod itself caused; from kubelet's ``eviction_manager.go``."""
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
    """Time limits in seconds, as in the settings ``fault_patience``, ``start_patience`` and ``result_patience``."""

    fault: float
    start: float
    result: float


@dataclass(frozen=True)
class Pod:
    """One pod of an attempt. ``object``: the pod as JSON; for a deleted pod, its last state. ``state_since``: result of
    ``first_seen_times`` for the pod."""

    object: Json
    deleted: bool = False
    state_since: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def uid(self) -> str:
        """The pod's unique id; its name if it has none yet."""
        return str(self.object["metadata"].get("uid", self.name))

    @property
    def path(self) -> str:
        """The pod's path in the API."""
        return f"/api/v1/namespaces/{self.object['metadata']['namespace']}/pods/{self.name}"

    @property
    def node(self) -> int:
        """The index of the node, within the attempt, whose agent runs in this pod."""
        metadata = self.object["metadata"]
        return int((metadata.get("annotations") or {}).get(INDEX) or (metadata.get("labels") or {}).get(INDEX) or 0)

    @property
    def phase(self) -> str:
        """The phase in the pod's status; ``Pending`` before it has one."""
        return str(self.object.get("status", {}).get("phase", "Pending"))

    @property
    def machine(self) -> str | None:
        """The name of the cluster's machine that the pod is assigned to; None: not yet."""
        name = self.object["spec"].get("nodeName")
        return None if name is None else str(name)

    @property
    def has_ended(self) -> bool:
        """True if the pod does not run any more (succeeded or failed), or is gone."""
        return self.deleted or self.phase in ("Succeeded", "Failed")

    def is_overdue(self, now: float) -> bool:
        """True if the pod's deletion was first seen more than its grace plus ``OVERDUE`` seconds ago. ``now``: monotonic."""
        metadata = self.object["metadata"]
        since = self.state_since.get(_deletion_state(self.object) or "")
        return since is not None and now > since + float(metadata.get("deletionGracePeriodSeconds", _GRACE)) + OVERDUE

    @property
    def deletion_requested_at(self) -> str | None:
        """When the deletion was requested, RFC 3339 in UTC; None: it was not."""
        at = self.object["metadata"].get("deletionTimestamp")
        if at is None:
            return None
        grace = timedelta(seconds=float(self.object["metadata"].get("deletionGracePeriodSeconds", 0)))
        return (datetime.fromisoformat(at) - grace).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def never_started(self) -> bool:
        """True if the pod was deleted and its agent's container is not known to have run."""
        unknown = self.terminated is None or self.terminated.get("reason") == _UNKNOWN
        return self.has_ended and unknown and self.deletion_requested_at is not None

    @property
    def stopped_by_deletion(self) -> bool:
        """True if the pod's deletion was requested and, as far as is known, is why the pod ends."""
        requested_at, ended = self.deletion_requested_at, self.terminated
        if requested_at is None or ended is None or ended.get("reason") == _UNKNOWN:
            return requested_at is not None
        exited_on_signal = ended.get("exitCode") in _STOP_EXIT_CODES and ended.get("reason") != "OOMKilled"
        return exited_on_signal and str(ended.get("finishedAt") or "9999") >= requested_at

    @property
    def status(self) -> Json:
        """Status of the agent's container; empty if there is none yet."""
        statuses: list[Json] = self.object.get("status", {}).get("containerStatuses") or []
        found: Json = next((s for s in statuses if s["name"] == AGENT), statuses[0] if len(statuses) == 1 else {})
        return found

    @property
    def terminated(self) -> Json | None:
        """How the agent's container ended, as in its status; None if it has not ended."""
        found: Json | None = self.status.get("state", {}).get("terminated")
        return found

    @property
    def ended_since(self) -> float | None:
        """Monotonic time when this process first saw that the agent's container had ended; None if it has not."""
        return self.state_since.get(_ENDED)

    @property
    def scheduled_since(self) -> float | None:
        """Monotonic time when this process first saw that the pod was assigned to a machine; None if it is not."""
        return self.state_since.get(_SCHEDULED)

    @property
    def ended_at(self) -> str:
        """The time of the pod's end, or of the disruption that led to it, RFC 3339 in UTC, for sorting. If it is unknown, a text
        that sorts last."""
        announced = _condition(self.object, "DisruptionTarget") or {}
        metadata = self.object["metadata"]
        times = (
            announced.get("lastTransitionTime"),
            (self.terminated or {}).get("finishedAt"),
            metadata.get("deletionTimestamp"),
        )
        return str(next((time for time in times if time), "9999"))

    def describe(self) -> str:
        """Return the pod's name, machine and phase as text, for display; ``deleted`` may replace the phase."""
        where = f" on {self.machine}" if self.machine else ""
        return f"pod {self.name}{where}: {'deleted' if self.deleted and not self.terminated else self.phase}"


def first_seen_times(object_: Json, previous: Mapping[str, float], now: float) -> dict[str, float]:
    """Return state -> monotonic time when this process first saw it, for the pod's current states. ``previous``: the result of
    the previous call for this pod."""
    ended = Pod(object_).terminated is not None
    scheduled = _condition(object_, "PodScheduled") is not None
    claimless = _NO_CLAIM.search(_unschedulable_message(object_)) is not None
    states = (
        _SCHEDULED if scheduled else None,
        _CLAIMLESS if claimless else None,
        _ENDED if ended else None,
        _deletion_state(object_),
    )
    return {state: previous.get(state, now) for state in states if state is not None}


def disruption(pod: Pod) -> tuple[Cause, str] | None:
    """Return cause and message of the disruption that Kubernetes announced for the pod; None: there is none."""
    found = _condition(pod.object, "DisruptionTarget")
    if found is None:
        return None
    reason = str(found.get("reason", ""))
    cause, text = DISRUPTIONS.get(reason, (Cause.EVICTED, f"Kubernetes ended it ({reason}); {JOB_CONTINUES}"))
    return cause, f"{text}{_message_suffix(found.get('message'))}"


def status_end(pod: Pod) -> tuple[Cause, str] | None:
    """Return cause and message of an ended pod's end as its own status shows it; otherwise None."""
    status = pod.object.get("status", {})
    reason, message = str(status.get("reason", "")), status.get("message")
    if reason == "Evicted" and _OVER_ITS_LIMIT.search(str(message)):
        volume = _VOLUME.search(str(message))
        advice = _disk_advice(volume[1] if volume is not None else "tmp")
        return (
            Cause.RANK_KILLED,
            f"it wrote more to its directories than the limit: {advice}{_message_suffix(message)}",
        )
    if reason in _STATUS_REASONS:
        cause = _STATUS_REASONS[reason]
        return cause, f"{reason}; {JOB_CONTINUES}{_message_suffix(message)}"
    if pod.phase == "Failed" and pod.terminated is None and not pod.never_started:
        text = f"its node rejected it ({reason or 'no reason given'}){_message_suffix(message)}"
        return Cause.LAUNCHER_ERROR, text
    return None


def _disk_advice(volume: str) -> str:
    """Return what to do if a directory of the pod is full. ``volume``: its volume's name (``volumes.pod_volumes``)."""
    if volume == "code":  # the snapshot itself always fits, and is read-only
        return f"write to the working directory or to {TMP}, not below {CODE}"
    key = {"tmp": "launcher.tmp_size", "shm": "launcher.shm_size"}.get(
        volume, f"the size of {volume} in launcher.pod_patch"
    )
    if volume.startswith("volume-"):
        key = f"volumes[{volume.removeprefix('volume-')}].empty_dir"
    return f"raise {key}, or write less"


def container_end(pod: Pod) -> tuple[Cause, str] | None:
    """Return cause and message of the end of an agent's container that left no result; None if no end is known."""
    ended = pod.terminated
    if ended is None:
        return (Cause.UNKNOWN, "the pod was deleted by force; its result is unknown") if pod.deleted else None
    code, reason, suffix = (
        int(ended.get("exitCode", 0)),
        str(ended.get("reason", "")),
        _message_suffix(ended.get("message")),
    )
    if reason == "OOMKilled":
        limit = pod.object["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory")
        text = (
            f"it was killed for using more memory than its limit ({limit})"
            if limit
            else "its machine ran out of memory"
        )
        return Cause.OOM, f"{text}: raise resources.memory, or use smaller batches"
    if reason in _NOT_STARTED:
        return Cause.LAUNCHER_ERROR, f"the container did not start ({reason}): check image and python{suffix}"
    if reason == _UNKNOWN:
        if pod.never_started:
            return None
        return (
            Cause.NODE_LOST,
            f"its machine no longer has the container, as after a restart; {JOB_CONTINUES}{suffix}",
        )
    if code == 0:
        text = (
            "it ended with code 0 and without result.json: check that the claim in the launchers file is the service's "
            "run directory"
        )
        return Cause.UNKNOWN, text
    if code in CAUSE_OF_EXIT_CODE:
        return CAUSE_OF_EXIT_CODE[code], f"it ended with code {code}{suffix}"
    signal = f" (signal {code - 128})" if code > 128 else ""
    return Cause.UNKNOWN, f"it ended with code {code}{signal}, and Kubernetes does not say why{suffix}"


def unstartable_reason(pod: Pod, now: float, patience: Patience) -> tuple[Cause, str] | None:
    """Return cause and message if the pod will never start, or not within the limits of ``patience``; otherwise None."""
    claimless = pod.state_since.get(_CLAIMLESS)
    if claimless is not None and not pod.has_ended and now - claimless > patience.fault:
        text = (
            "the claim of one of its volumes does not exist: check volumes in the "
            f"spec{_message_suffix(_unschedulable_message(pod.object))}"
        )
        return Cause.LAUNCHER_ERROR, text
    reason, message = _waiting_container(pod)
    since = pod.scheduled_since
    if pod.has_ended or since is None or pod.status.get("state", {}).keys() & {"running", "terminated"}:
        return None  # a pod outlives its container while a sidecar ends
    waited, image = now - since, pod.object["spec"]["containers"][0].get("image")
    if reason in _IMAGE_NEVER or (reason in _IMAGE_TRIES and waited > patience.fault):
        text = (
            f"the image {image} cannot be pulled ({reason}): check its name, and launcher.image_pull_secrets{message}"
        )
        return Cause.LAUNCHER_ERROR, text
    if reason in _CONTAINER_TRIES and waited > patience.fault:
        text = (
            f"the container cannot be created ({reason}): check the Secrets, ConfigMaps and volumes that the spec "
            f"names{message}"
        )
        return Cause.LAUNCHER_ERROR, text
    if waited > patience.start:
        text = f"its container did not start within {patience.start:g} s on {pod.machine} ({reason or 'no reason'}){message}"
        return Cause.LAUNCHER_ERROR, text
    return None


def waiting_reason(pod: Pod, warning: str | None) -> str | None:
    """Return why the pod is still in the phase Pending; None if it is not. ``warning``: its last warning event."""
    if pod.phase != "Pending":
        return None
    if _condition(pod.object, "PodScheduled") is None:
        gates = pod.object["spec"].get("schedulingGates")
        default = "is held by a scheduling gate" if gates else "no node was found yet"
        return f"waits for a machine: {_unschedulable_message(pod.object) or warning or default}"
    reason, message = _waiting_container(pod)
    if reason in _IMAGE_NEVER or reason in _IMAGE_TRIES:
        return f"its image cannot be pulled now ({reason}){message}"
    suffix = message or (f": {warning}" if warning else "")
    return f"its container is being created on {pod.machine} ({reason or 'Pending'}){suffix}"


def _unschedulable_message(object_: Json) -> str:
    """Return the scheduler's message that says why it found no machine; empty if there is none."""
    found = (c for c in _conditions(object_) if c["type"] == "PodScheduled" and c["status"] != "True")
    return str(next(found, {}).get("message") or "")


def _waiting_container(pod: Pod) -> tuple[str, str]:
    """Return the reason of the first waiting container and, after a colon, its message; empty texts if none. Containers that wait
    for init containers do not count."""
    status = pod.object.get("status", {})
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for found in statuses:
        waiting = found.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            return str(waiting.get("reason", "")), _message_suffix(waiting.get("message"))
    return "", ""


def _conditions(object_: Json) -> list[Json]:
    """Return the conditions in the object's status."""
    return list(object_.get("status", {}).get("conditions") or ())


def _condition(object_: Json, kind: str) -> Json | None:
    """Return the object's condition of this kind if its status is True; otherwise None."""
    return next((c for c in _conditions(object_) if c["type"] == kind and c["status"] == "True"), None)


def _message_suffix(message: Any) -> str:
    """Return the engine's message on one line after a colon, shortened; empty if there is none."""
    text = " ".join(str(message or "").split())
    return f": {text[-600:]}" if text else ""


def _deletion_state(object_: Json) -> str | None:
    """Return a name, for ``first_seen_times``, for the state of being deleted; it contains the time of the deletion. None if the
    object is not being deleted."""
    at = object_["metadata"].get("deletionTimestamp")
    return None if not at else f"leaves at {at}"
