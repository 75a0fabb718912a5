"""Derives an attempt's state from its Job, its pods and their events, on plain JSON. Kubernetes reports the same fact in several
places, and removes some of them early, so each pod's end is taken from the first source that has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.phases import Cause
from ratchet_contract.plural import pluralize
from ratchet_service.launchers.base import EngineEnd
from ratchet_service.launchers.kubernetes.manifests import QUEUE
from ratchet_service.launchers.kubernetes.pod_status import (
    JOB_CONTINUES,
    Patience,
    Pod,
    container_end,
    disruption,
    status_end,
    unstartable_reason,
    waiting_reason,
)

Json = dict[str, Any]

_POD_DELETED: Final = (
    Cause.EVICTED,
    f"somebody deleted the pod; {JOB_CONTINUES}: to end it cancel it by Ratchet (`ratchet cancel`)",
)
QUOTA_EXCEEDED: Final = "exceeded quota"
"""In messages of the admission controller ResourceQuota. This is temporary: other objects will be deleted."""
_FORBIDDEN: Final = re.compile(rf"is forbidden: (?!{QUOTA_EXCEEDED})|denied the request|is invalid: ")
"""Permanent refusals by admission: no such PriorityClass or service account, a policy, a limit. Other obstacles are temporary."""


@dataclass(frozen=True)
class ObservedState:
    """What is known of an attempt. ``deleted``: the Job existed and no longer does. ``warnings``: name of the Job or of a pod ->
    text of its last warning event. ``forbidden_since``: monotonic time since which the cluster has been seen to forbid the Job's
    pods."""

    job: Json | None = None
    deleted: bool = False
    deleted_by_service: bool = False
    pods: tuple[Pod, ...] = ()
    warnings: Mapping[str, str] = field(default_factory=dict)
    forbidden_since: float | None = None
    events_unavailable: str | None = None

    @property
    def is_deleting(self) -> bool:
        """True if the Job was deleted or is being deleted. False if it is not known."""
        return self.job is not None and (self.deleted or "deletionTimestamp" in self.job["metadata"])


@dataclass(frozen=True)
class View:
    """What is concluded of an attempt. ``gone_nodes``: nodes on which nothing runs or will start, or whose machine does not
    answer. ``notes``: node -> text about its pod. ``revoked``: the Job is suspended although it has pods or an agent has
    started."""

    alive: bool
    waiting: str | None = None
    ends: tuple[EngineEnd, ...] = ()
    gone_nodes: frozenset[int] = frozenset()
    notes: Mapping[int, str] = field(default_factory=dict)
    revoked: bool = False
    pod_deleted_by_hand: bool = False


def evaluate(
    observed: ObservedState,
    nodes: int,
    has_started: Callable[[], bool],
    has_result: Callable[[int], bool],
    now: float,
    patience: Patience,
) -> View:
    """Return what follows from the observed state. ``has_started()``: an agent has ever started. ``has_result(node)``: the node's
    agent has left its result."""
    live = [pod for pod in observed.pods if not pod.has_ended]
    revoked = _is_revoked(observed, has_started)
    ends = _engine_ends(observed, has_result, now, patience, revoked)
    unmade = _forbidden_end(observed, nodes, now, patience)
    stuck = unmade is not None or any(unstartable_reason(pod, now, patience) is not None for pod in live)
    late = [pod for pod in observed.pods if pod.has_ended and _result_may_come(pod, has_result, now, patience)]
    may_start = _may_start(observed, nodes) and not revoked
    alive = not stuck and bool(live or late or may_start)
    return View(
        alive=alive,
        waiting=_waiting_reason(observed, nodes, live) if alive else None,
        ends=ends if unmade is None else (*ends, unmade),
        gone_nodes=_gone_nodes(observed, nodes, late, now, may_start),
        notes={pod.node: pod.describe() for pod in observed.pods},
        revoked=revoked,
        pod_deleted_by_hand=any(_is_deleted_by_hand(observed, pod) for pod in observed.pods),
    )


def will_conclude(observed: ObservedState, nodes: int) -> bool:
    """True if each node has a pod that succeeded or failed, no pod still runs, and the Job is not being deleted: the Job
    controller will end it."""
    ended = {pod.node for pod in observed.pods if pod.phase in ("Succeeded", "Failed")}
    return (
        observed.job is not None
        and not observed.is_deleting
        and len(ended) == nodes
        and all(pod.has_ended for pod in observed.pods)
    )


def is_finished(observed: ObservedState) -> bool:
    """True if the Job controller has marked the Job as ended. This mark is final."""
    return observed.job is not None and any(_condition(observed.job, kind) for kind in ("Complete", "Failed"))


def _may_start(observed: ObservedState, nodes: int) -> bool:
    """True unless the Job is unknown, being deleted, ended or about to end, a pod has failed, or all nodes have succeeded."""
    if observed.job is None or observed.is_deleting:
        return False
    if any(_condition(observed.job, kind) for kind in ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")):
        return False
    if any(pod.phase == "Failed" for pod in observed.pods):
        return False
    return len({pod.node for pod in observed.pods if pod.phase == "Succeeded"}) < nodes


def _is_revoked(observed: ObservedState, has_started: Callable[[], bool]) -> bool:
    """True if the Job is suspended now although it has pods or an agent has started."""
    if observed.job is None or not observed.job["spec"].get("suspend"):
        return False
    return bool(observed.pods) or has_started()


def _engine_ends(
    observed: ObservedState, has_result: Callable[[int], bool], now: float, patience: Patience, revoked: bool
) -> tuple[EngineEnd, ...]:
    """Return why the attempt ends or has ended, as far as Kubernetes shows it. First comes a suspension or deletion of the Job by
    somebody else, then the ends of the pods, causes before consequences. If there is none of these, return what the Job's
    condition or, failing that, the pods' last warnings show."""
    found: list[tuple[str, bool, EngineEnd]] = []
    for pod in observed.pods:
        by_hand = (
            disruption(pod) is None
            and (pod.has_ended or not pod.is_overdue(now))
            and _is_deleted_by_hand(observed, pod)
        )
        end = _POD_DELETED if by_hand else _pod_end(pod, has_result, now, patience)
        if end is not None:
            follows = disruption(pod) is None and end[0] is not Cause.OOM and not by_hand
            at = (pod.deletion_requested_at if by_hand else None) or pod.ended_at
            found.append((at, follows, EngineEnd(end[0], f"{pod.name}: {end[1]}", pod.node)))
    # Times are whole seconds: a cause and its consequence may have the same time.
    ordered = [end for *_, end in sorted(found, key=lambda item: item[:2])]
    interference = _interference(observed, revoked)
    if interference is not None:  # an action on the Job is why its pods were stopped
        return (interference, *ordered)
    return tuple(ordered or _ends_from_job_condition(observed) or _last_warnings(observed))


def _pod_end(pod: Pod, has_result: Callable[[int], bool], now: float, patience: Patience) -> tuple[Cause, str] | None:
    """Return why the pod ended, will end, cannot start or does not answer: cause and message from the first source that has them.
    None if no reason is known, or if the agent's result explains the pod's end."""
    announced = disruption(pod)
    if announced is not None:
        return announced
    if pod.has_ended:
        return status_end(pod) or (None if has_result(pod.node) else container_end(pod))
    if pod.phase == "Unknown" or pod.is_overdue(now):
        return Cause.NODE_LOST, f"its machine {pod.machine or ''} does not answer; {JOB_CONTINUES}"
    return unstartable_reason(pod, now, patience)


def _interference(observed: ObservedState, revoked: bool) -> EngineEnd | None:
    """Return the end that somebody else, such as Kueue, caused by suspending or deleting the Job; otherwise None."""
    job = observed.job
    if job is None:
        return None
    if revoked:
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        if queue is not None:
            text = (
                f"Kueue evicted the job from queue {queue}{_warning_suffix(observed, job)}; it waits in the queue again"
            )
            return EngineEnd(Cause.HIGHER_PRIORITY, text)
        text = (
            f"somebody suspended the Job; {JOB_CONTINUES}: to keep it stopped suspend it by Ratchet (`ratchet suspend`)"
        )
        return EngineEnd(Cause.EVICTED, text)
    if observed.is_deleting and not observed.deleted_by_service and not _ended_before_deletion(job):
        text = f"somebody deleted the Job; {JOB_CONTINUES}: to end it cancel it by Ratchet (`ratchet cancel`)"
        return EngineEnd(Cause.EVICTED, text)
    return None


def _ended_before_deletion(job: Json) -> bool:
    """True if the Job, which was deleted or is being deleted, had ended before."""
    ended = _condition(job, "Complete") or _condition(job, "Failed")
    deleted = job["metadata"].get("deletionTimestamp")
    return ended is not None and (deleted is None or str(ended.get("lastTransitionTime", "")) <= str(deleted))


def _is_deleted_by_hand(observed: ObservedState, pod: Pod) -> bool:
    """True if, as far as is known, the pod ends or ended because it was deleted, but not by the Job controller. An announced
    disruption, such as an eviction, also counts. False while the Job is suspended or being deleted."""
    job, requested_at = observed.job, pod.deletion_requested_at
    if (
        job is None
        or requested_at is None
        or observed.is_deleting
        or job["spec"].get("suspend")
        or not pod.stopped_by_deletion
    ):
        return False
    ended = next(
        filter(None, (_condition(job, kind) for kind in ("FailureTarget", "SuccessCriteriaMet", "Failed"))), None
    )
    if ended is None:
        return True
    failed = str(ended.get("lastTransitionTime", ""))
    if f"/{pod.name} " in str(ended.get("message", "")) or requested_at < failed:
        return True
    # Times are whole seconds. If both are equal and no other pod can have failed the Job, the deletion was first.
    return requested_at == failed and len(observed.pods) == 1


def is_permanent_refusal(warning: str) -> bool:
    """True if this warning says that admission refuses the Job's pods, other than for an exceeded quota."""
    return _FORBIDDEN.search(warning) is not None


def _forbidden_end(observed: ObservedState, nodes: int, now: float, patience: Patience) -> EngineEnd | None:
    """Return the end of an attempt whose pods the cluster has forbidden for ``patience.fault`` seconds; otherwise None."""
    missing = _missing_pods_text(observed, nodes)
    if observed.job is None or missing is None or observed.forbidden_since is None:
        return None
    if now - observed.forbidden_since <= patience.fault:
        return None
    check = "check launcher.priority_class, launcher.service_account and the policies of the namespace"
    return EngineEnd(
        Cause.LAUNCHER_ERROR,
        f"{missing}, and the cluster forbids them: {check}{_warning_suffix(observed, observed.job)}",
    )


def _last_warnings(observed: ObservedState) -> list[EngineEnd]:
    """Return an end, with the last warning, for each pod that has one and was deleted before its container had started."""
    text = "it was deleted before its container had started: {}"
    pods = [pod for pod in observed.pods if pod.never_started and pod.name in observed.warnings]
    return [
        EngineEnd(Cause.LAUNCHER_ERROR, f"{p.name}: {text.format(observed.warnings[p.name])}", p.node) for p in pods
    ]


def _ends_from_job_condition(observed: ObservedState) -> list[EngineEnd]:
    """Return, in a list, the end that the Job's own condition shows; empty if the Job has not failed."""
    job = observed.job or {}
    failed = _condition(job, "Failed") or _condition(job, "FailureTarget")
    if failed is None:
        return []
    text = str(failed.get("message", ""))
    if failed.get("reason") == "DeadlineExceeded":
        return [EngineEnd(Cause.TIME_LIMIT, f"the Job's own deadline was reached: {text}")]
    if "DisruptionTarget" in text:
        return [EngineEnd(Cause.EVICTED, f"{text}; {JOB_CONTINUES}")]
    _, _, after = text.partition("failed with exit code ")
    code = after.partition(" ")[0]
    cause = CAUSE_OF_EXIT_CODE.get(int(code), Cause.UNKNOWN) if code.isdigit() else Cause.UNKNOWN
    return [EngineEnd(cause, f"the Job failed ({failed.get('reason')}): {text}")]


def _result_may_come(pod: Pod, has_result: Callable[[int], bool], now: float, patience: Patience) -> bool:
    """True if the result of the pod's agent may still appear: a shared file system may show the file later."""
    ended = pod.terminated
    if ended is None or ended.get("exitCode") not in CAUSE_OF_EXIT_CODE or has_result(pod.node):
        return False
    return pod.ended_since is not None and now < pod.ended_since + patience.result


def _gone_nodes(
    observed: ObservedState, nodes: int, late: Sequence[Pod], now: float, may_start: bool
) -> frozenset[int]:
    """Return the nodes on which nothing runs or will start, or whose machine does not answer. ``late``: pods to wait for."""
    out = set()
    for node in range(nodes):
        pods = [pod for pod in observed.pods if pod.node == node]
        running = [pod for pod in pods if not pod.has_ended and not pod.is_overdue(now)]
        if running or any(pod.node == node for pod in late) or (not pods and may_start):
            continue
        out.add(node)
    return frozenset(out)


def _waiting_reason(observed: ObservedState, nodes: int, live: Sequence[Pod]) -> str | None:
    """Return why not all containers have started; None: they have, or nothing is known. ``live``: pods that have not ended."""
    job = observed.job
    if job is None:
        return None
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        if queue is None:
            return "the Job is suspended, and no queue is named: somebody suspended it (see `kubectl get job`)"
        return f"waits in Kueue's queue {queue}{_warning_suffix(observed, job)}"
    missing = _missing_pods_text(observed, nodes)
    if missing is not None:
        return f"{missing} yet{_warning_suffix(observed, job) or _events_hint(observed, job)}"
    for pod in live:
        text = waiting_reason(pod, observed.warnings.get(pod.name))
        if text is not None:
            return f"node {pod.node}: {text}" if nodes > 1 else text
    return None


def _missing_pods_text(observed: ObservedState, nodes: int) -> str | None:
    """Return how many pods the Job controller still has to create, as the beginning of a sentence; None if there are none, or the
    Job is unknown or suspended."""
    made = {pod.node for pod in observed.pods}
    if (
        observed.job is None
        or observed.job["spec"].get("suspend")
        or len(made) >= nodes
        or not _may_start(observed, nodes)
    ):
        return None
    return f"{nodes - len(made)} of {pluralize(nodes, 'pod')} not made"


def _warning_suffix(observed: ObservedState, job: Json) -> str:
    """Return the last warning about the Job after a colon; empty if there is none."""
    text = observed.warnings.get(job["metadata"]["name"])
    return f": {text}" if text else ""


def _events_hint(observed: ObservedState, job: Json) -> str:
    """Return the end of a sentence, which says where to read why pods are not created; empty if warning events are watched."""
    if observed.events_unavailable is None:
        return ""
    metadata = job["metadata"]
    return (
        f"; the reason is unknown, since warning events cannot be read ({observed.events_unavailable}): "
        f"`kubectl --namespace {metadata.get('namespace', 'default')} describe job {metadata['name']}` shows them"
    )


def _condition(job: Json, kind: str) -> Json | None:
    """Return the Job's condition of this kind if its status is True; otherwise None."""
    found = (c for c in job.get("status", {}).get("conditions") or () if c["type"] == kind and c["status"] == "True")
    return next(found, None)
