"""Derives an attempt's state from its Job, its pods and their events, on plain JSON. Whether agents have started or left a result
is found out by callbacks; all else is pure.

Kubernetes reports the same fact in several places and removes some of them early: a pod disappears with its node, a Job's
conditions stay. So each pod is judged by the first of these that exists: the disruption that a controller announced, a deletion
by hand, the reason in the pod's status, the agent's own result, how the container ended. The last known state of deleted pods and
Jobs counts like that of others (``ObservedState``).
"""

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
    """What is known of an attempt, mostly from the watches. ``job``: the Job's JSON, None if it is not known. ``deleted``: the
    Job existed and does not any more; ``deleted_by_service``: this service deleted it, or is deleting it (set by the launcher).
    ``pods``: deleted ones are included for some time. ``warnings``: name of the Job or of a pod -> the last warning event about
    it. ``forbidden_since``: monotonic time when the cluster was first seen to forbid the Job's pods; None if the last warning
    about the Job does not say so. ``events_unavailable``: why warning events are not watched, None if they are."""

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
    """What is concluded of an attempt. ``alive``, ``waiting``, ``ends``: as in ``AttemptState``. ``gone_nodes``: indices of nodes
    on which nothing runs and nothing will start, or whose machine is lost. ``notes``: node -> text about its pod. ``revoked``:
    the Job was suspended after it had started, and must not be resumed. ``pod_deleted_by_hand``: ``_is_deleted_by_hand`` is true
    for one of the pods."""

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
    """Return what follows from the observed state for the attempt. ``nodes``: number of its nodes. ``has_started()``: True if any
    of its agents has ever started; ``has_result(node)``: True if the node's agent has left its result; both are called only if
    needed. ``now``: monotonic."""
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
    """True if each node has a pod whose phase is Succeeded or Failed, and no pod still runs: the Job controller will mark the Job
    as ended, or has done so, and creates no more pods. False if the Job is not known, is being deleted or was deleted."""
    ended = {pod.node for pod in observed.pods if pod.phase in ("Succeeded", "Failed")}
    return (
        observed.job is not None
        and not observed.is_deleting
        and len(ended) == nodes
        and all(pod.has_ended for pod in observed.pods)
    )


def is_finished(observed: ObservedState) -> bool:
    """True if the Job controller has marked the Job as ended. This mark is final, and is set only after all its pods have
    ended."""
    return observed.job is not None and any(_condition(observed.job, kind) for kind in ("Complete", "Failed"))


def _may_start(observed: ObservedState, nodes: int) -> bool:
    """False if the Job controller will create no more pods: the Job is marked as ending or ended, one of its pods has failed
    (``backoffLimit: 0``), or each node has a pod that succeeded. Also False if the Job is not known, is being deleted or was
    deleted. True otherwise, also while all pods run, or the Job is suspended."""
    if observed.job is None or observed.is_deleting:
        return False
    if any(_condition(observed.job, kind) for kind in ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")):
        return False
    if any(pod.phase == "Failed" for pod in observed.pods):
        return False
    return len({pod.node for pod in observed.pods if pod.phase == "Succeeded"}) < nodes


def _is_revoked(observed: ObservedState, has_started: Callable[[], bool]) -> bool:
    """True if the Job is suspended now although it has pods or an agent has started: if it were resumed, it would run again as
    the same attempt."""
    if observed.job is None or not observed.job["spec"].get("suspend"):
        return False
    return bool(observed.pods) or has_started()


def _engine_ends(
    observed: ObservedState, has_result: Callable[[int], bool], now: float, patience: Patience, revoked: bool
) -> tuple[EngineEnd, ...]:
    """Return the ends of the attempt's pods, in the order in which they happened; a cause comes before its consequences. A pod
    has one if somebody deleted it (``_is_deleted_by_hand``), or as ``_pod_end`` finds; a pod whose end its agent's result
    explains has none. If somebody else suspended or deleted the Job (``_interference``), that comes first. If there is no end at
    all, return the one that the Job's condition shows, or else the last warnings about pods that never started."""
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
    """Return cause and message of the pod's end, from the first source that has them: the announced disruption (even while the
    pod still runs), the pod's status, the container's end. A pod that can never start, or whose machine does not answer, counts
    as ended. None: the pod has not ended, its agent's result says why, or none of these sources shows an end."""
    announced = disruption(pod)
    if announced is not None:
        return announced
    if pod.has_ended:
        return status_end(pod) or (None if has_result(pod.node) else container_end(pod))
    if pod.phase == "Unknown" or pod.is_overdue(now):
        return Cause.NODE_LOST, f"its machine {pod.machine or ''} does not answer; {JOB_CONTINUES}"
    return unstartable_reason(pod, now, patience)


def _interference(observed: ObservedState, revoked: bool) -> EngineEnd | None:
    """Return the end that somebody else, such as Kueue, caused by suspending the Job after its start, or by deleting it before it
    had ended; otherwise None."""
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
    """True if the Job had ended before it was deleted. Such a deletion stops nothing; mostly the Job's time to live was over. The
    caller has checked that the Job was deleted or is being deleted."""
    ended = _condition(job, "Complete") or _condition(job, "Failed")
    deleted = job["metadata"].get("deletionTimestamp")
    return ended is not None and (deleted is None or str(ended.get("lastTransitionTime", "")) <= str(deleted))


def _is_deleted_by_hand(observed: ObservedState, pod: Pod) -> bool:
    """True if, as far as is known, the deletion of the pod itself ended it or will end it, and not the Job controller requested
    it. An announced disruption, such as an eviction, also deletes a pod: callers check ``disruption``.

    The controller deletes pods after the Job is deleted or suspended, or has failed. A deletion requested after the Job's failure
    counts as the controller's, unless the Job's condition names this pod. In the same second, it does so if the Job has several
    pods. False also if the Job is not known."""
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
    """True if this warning says that the cluster will never allow a pod of the unchanged Job."""
    return _FORBIDDEN.search(warning) is not None


def _forbidden_end(observed: ObservedState, nodes: int, now: float, patience: Patience) -> EngineEnd | None:
    """Return the end of an attempt whose pods the cluster has forbidden for more than ``patience.fault`` seconds; None if it has
    not, or if no pod is missing (``_missing_pods_text``)."""
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
    """Return an end for each pod that was deleted before its container had started, as far as is known, and about which there is
    a warning; the message contains the last one. Used if nothing else shows an end, as after a restart of the service."""
    text = "it was deleted before its container had started: {}"
    pods = [pod for pod in observed.pods if pod.never_started and pod.name in observed.warnings]
    return [
        EngineEnd(Cause.LAUNCHER_ERROR, f"{p.name}: {text.format(observed.warnings[p.name])}", p.node) for p in pods
    ]


def _ends_from_job_condition(observed: ObservedState) -> list[EngineEnd]:
    """Return, in a list, the end that the Job's own condition shows; empty if the Job has not failed. Used if no pod shows an
    end."""
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
    """True if the result of the pod's agent may still appear. An agent that ends with one of its own exit codes has written a
    result, but a shared file system may show the file up to ``patience.result`` seconds later."""
    ended = pod.terminated
    if ended is None or ended.get("exitCode") not in CAUSE_OF_EXIT_CODE or has_result(pod.node):
        return False
    return pod.ended_since is not None and now < pod.ended_since + patience.result


def _gone_nodes(
    observed: ObservedState, nodes: int, late: Sequence[Pod], now: float, may_start: bool
) -> frozenset[int]:
    """Return the indices of nodes on which nothing runs and nothing will start. Nodes whose machine does not answer after the
    pod's grace are included. ``late``: pods whose result may still appear; their nodes are not included."""
    out = set()
    for node in range(nodes):
        pods = [pod for pod in observed.pods if pod.node == node]
        running = [pod for pod in pods if not pod.has_ended and not pod.is_overdue(now)]
        if running or any(pod.node == node for pod in late) or (not pods and may_start):
            continue
        out.add(node)
    return frozenset(out)


def _waiting_reason(observed: ObservedState, nodes: int, live: Sequence[Pod]) -> str | None:
    """Return why not all containers have started, with the engine's messages; None: they have, or nothing is known. ``live``:
    pods that have not ended."""
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
    """Return, as text, how many pods the Job controller still has to create. None if each node has a pod, if the Job is suspended
    or not known, or if no more pods will be created (``_may_start``)."""
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
    """Return the sentence that says where to read why pods are not created, if warning events are not watched; otherwise
    empty."""
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
