"""From a Job, its pods and their events to what became of an attempt: pure, on plain JSON.

Kubernetes says the same thing in several places, and takes some away early: a pod goes with its node, a Job's conditions stay. So
each pod is judged by the first that speaks: the disruption that a controller announced, the reason of the pod's status, how the
container ended. What was seen last of pods and Jobs that are deleted counts like the rest (``Seen``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.phases import Cause
from ratchet_contract.plural import counted
from ratchet_service.launchers.base import EngineEnd
from ratchet_service.launchers.kubernetes.manifests import QUEUE
from ratchet_service.launchers.kubernetes.pods import (
    GOES_ON,
    Patience,
    Pod,
    container_end,
    disruption,
    hopeless,
    status_end,
    waits_for,
)

Json = dict[str, Any]

_DELETED: Final = (
    Cause.EVICTED,
    f"somebody deleted the pod; {GOES_ON}: to end it cancel it by Ratchet (`ratchet cancel`)",
)
USED_UP: Final = "exceeded quota"
"""Of the admission controller ResourceQuota: others' objects go in time."""
_FORBIDDEN: Final = re.compile(rf"is forbidden: (?!{USED_UP})|denied the request|is invalid: ")
"""Of admission: no such PriorityClass or service account, a policy, a limit. What else keeps a pod from being made passes."""


@dataclass(frozen=True)
class Seen:
    """What watches have brought of an attempt. ``deleted``: the Job was there and is not any more; ``ours``: this service deleted
    it; ``warnings``: the last warning event, by the name of the Job or pod that it is about; ``forbidden_since``: when the
    cluster was first seen to forbid the Job's pods, as it does by the last such event, monotonic; ``blind``: why warning events
    are not watched, None where they are."""

    job: Json | None = None
    deleted: bool = False
    ours: bool = False
    pods: tuple[Pod, ...] = ()
    warnings: Mapping[str, str] = field(default_factory=dict)
    forbidden_since: float | None = None
    blind: str | None = None

    @property
    def leaving(self) -> bool:
        """The Job is deleted, or being deleted."""
        return self.job is not None and (self.deleted or "deletionTimestamp" in self.job["metadata"])


@dataclass(frozen=True)
class View:
    """``alive``, ``waiting``, ``ends`` as in ``AttemptState``; ``gone``: nodes whose pod is known not to run any more, or whose
    machine is lost; ``notes`` by node; ``revoked``: whoever started the Job has taken the start back, and it must not go on;
    ``by_hand``: somebody deleted a pod, and not its Job, as far as that is known."""

    alive: bool
    waiting: str | None = None
    ends: tuple[EngineEnd, ...] = ()
    gone: frozenset[int] = frozenset()
    notes: Mapping[int, str] = field(default_factory=dict)
    revoked: bool = False
    by_hand: bool = False


def look(
    seen: Seen,
    nodes: int,
    began: Callable[[], bool],
    has_result: Callable[[int], bool],
    now: float,
    patience: Patience,
) -> View:
    """``began``: has an agent of the attempt begun at some time? ``has_result``: has this node's agent left its last word?
    ``now``: monotonic."""
    live = [pod for pod in seen.pods if not pod.over]
    revoked = _revoked(seen, began)
    ends = _ends(seen, has_result, now, patience, revoked)
    unmade = _forbidden(seen, nodes, now, patience)
    stuck = unmade is not None or any(hopeless(pod, now, patience) is not None for pod in live)
    late = [pod for pod in seen.pods if pod.over and _result_may_come(pod, has_result, now, patience)]
    may_start = _may_start(seen, nodes) and not revoked
    alive = not stuck and bool(live or late or may_start)
    return View(
        alive=alive,
        waiting=_waiting(seen, nodes, live) if alive else None,
        ends=ends if unmade is None else (*ends, unmade),
        gone=_gone(seen, nodes, late, now, may_start),
        notes={pod.node: pod.note() for pod in seen.pods},
        revoked=revoked,
        by_hand=any(_by_hand(seen, pod) for pod in seen.pods),
    )


def concludes(seen: Seen, nodes: int) -> bool:
    """All pods have ended by themselves, so that the controller will say that the Job has ended, and make no more pods."""
    ended = {pod.node for pod in seen.pods if pod.phase in ("Succeeded", "Failed")}
    return seen.job is not None and not seen.leaving and len(ended) == nodes and all(pod.over for pod in seen.pods)


def finished(seen: Seen) -> bool:
    """The controller has said so; a Job's last condition never changes back, nor does it come before the end of its pods."""
    return seen.job is not None and any(_condition(seen.job, kind) for kind in ("Complete", "Failed"))


def _may_start(seen: Seen, nodes: int) -> bool:
    """Will the Job controller make pods? Not once one has failed (``backoffLimit: 0``), nor for indices that have succeeded."""
    if seen.job is None or seen.leaving:
        return False
    if any(_condition(seen.job, kind) for kind in ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")):
        return False
    if any(pod.phase == "Failed" for pod in seen.pods):
        return False
    return len({pod.node for pod in seen.pods if pod.phase == "Succeeded"}) < nodes


def _revoked(seen: Seen, began: Callable[[], bool]) -> bool:
    """The Job was started and is suspended now: it would be started again as the same epoch."""
    if seen.job is None or not seen.job["spec"].get("suspend"):
        return False
    return bool(seen.pods) or began()


def _ends(
    seen: Seen, has_result: Callable[[int], bool], now: float, patience: Patience, revoked: bool
) -> tuple[EngineEnd, ...]:
    found: list[tuple[str, bool, EngineEnd]] = []
    for pod in seen.pods:
        by_hand = disruption(pod) is None and (pod.over or not pod.overdue(now)) and _by_hand(seen, pod)
        end = _DELETED if by_hand else _end_of(pod, has_result, now, patience)
        if end is not None:
            follows = disruption(pod) is None and end[0] is not Cause.OOM and not by_hand
            at = (pod.deletion_wanted if by_hand else None) or pod.ended_at
            found.append((at, follows, EngineEnd(end[0], f"{pod.name}: {end[1]}", pod.node)))
    # Times are whole seconds, in which a cause and what follows from it have room.
    ordered = [end for *_, end in sorted(found, key=lambda item: item[:2])]
    interference = _interference(seen, revoked)
    if interference is not None:  # what was done to the Job is why its pods were stopped
        return (interference, *ordered)
    return tuple(ordered or _conclusion(seen) or _last_warnings(seen))


def _end_of(pod: Pod, has_result: Callable[[int], bool], now: float, patience: Patience) -> tuple[Cause, str] | None:
    announced = disruption(pod)
    if announced is not None:
        return announced
    if pod.over:
        return status_end(pod) or (None if has_result(pod.node) else container_end(pod))
    if pod.phase == "Unknown" or pod.overdue(now):
        return Cause.NODE_LOST, f"its machine {pod.machine or ''} does not answer; {GOES_ON}"
    return hopeless(pod, now, patience)


def _interference(seen: Seen, revoked: bool) -> EngineEnd | None:
    """What somebody else did to the Job itself."""
    job = seen.job
    if job is None:
        return None
    if revoked:
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        if queue is not None:
            text = f"Kueue took back what queue {queue} had given{_said(seen, job)}; the job waits in the queue again"
            return EngineEnd(Cause.HIGHER_PRIORITY, text)
        text = f"somebody suspended the Job; {GOES_ON}: to keep it stopped suspend it by Ratchet (`ratchet suspend`)"
        return EngineEnd(Cause.EVICTED, text)
    if seen.leaving and not seen.ours and not _ended_before(job):
        text = f"somebody deleted the Job; {GOES_ON}: to end it cancel it by Ratchet (`ratchet cancel`)"
        return EngineEnd(Cause.EVICTED, text)
    return None


def _ended_before(job: Json) -> bool:
    """Had the Job ended when it was deleted? Then its time after the end was over, which is nobody's doing."""
    ended = _condition(job, "Complete") or _condition(job, "Failed")
    deleted = job["metadata"].get("deletionTimestamp")
    return ended is not None and (deleted is None or str(ended.get("lastTransitionTime", "")) <= str(deleted))


def _by_hand(seen: Seen, pod: Pod) -> bool:
    """Did somebody delete the pod itself? The Job controller deletes pods of a Job that is deleted, suspended or has failed; one
    whose end has failed the Job was deleted before that."""
    job, wanted = seen.job, pod.deletion_wanted
    if job is None or wanted is None or seen.leaving or job["spec"].get("suspend") or not pod.stopped_by_deletion:
        return False
    ended = next(
        filter(None, (_condition(job, kind) for kind in ("FailureTarget", "SuccessCriteriaMet", "Failed"))), None
    )
    if ended is None:
        return True
    failed = str(ended.get("lastTransitionTime", ""))
    if f"/{pod.name} " in str(ended.get("message", "")) or wanted < failed:
        return True
    # Times are whole seconds. Within one the deletion came first where no other pod can have failed the Job.
    return wanted == failed and len(seen.pods) == 1


def forbids(warning: str) -> bool:
    """Does this event say that the cluster will never let a pod of the Job be made as it is?"""
    return _FORBIDDEN.search(warning) is not None


def _forbidden(seen: Seen, nodes: int, now: float, patience: Patience) -> EngineEnd | None:
    missing = _unmade(seen, nodes)
    if seen.job is None or missing is None or seen.forbidden_since is None:
        return None
    if now - seen.forbidden_since <= patience.fault:
        return None
    check = "check launcher.priority_class, launcher.service_account and the policies of the namespace"
    return EngineEnd(Cause.LAUNCHER_ERROR, f"{missing}, and the cluster forbids them: {check}{_said(seen, seen.job)}")


def _last_warnings(seen: Seen) -> list[EngineEnd]:
    """Of pods that were deleted before they began, where nothing else tells of them: as after a restart of the service."""
    text = "it was deleted before its container had started: {}"
    pods = [pod for pod in seen.pods if pod.never_began and pod.name in seen.warnings]
    return [EngineEnd(Cause.LAUNCHER_ERROR, f"{p.name}: {text.format(seen.warnings[p.name])}", p.node) for p in pods]


def _conclusion(seen: Seen) -> list[EngineEnd]:
    """The Job's own, where no pod is left to tell."""
    job = seen.job or {}
    failed = _condition(job, "Failed") or _condition(job, "FailureTarget")
    if failed is None:
        return []
    text = str(failed.get("message", ""))
    if failed.get("reason") == "DeadlineExceeded":
        return [EngineEnd(Cause.TIME_LIMIT, f"the Job's own deadline was reached: {text}")]
    if "DisruptionTarget" in text:
        return [EngineEnd(Cause.EVICTED, f"{text}; {GOES_ON}")]
    _, _, after = text.partition("failed with exit code ")
    code = after.partition(" ")[0]
    cause = CAUSE_OF_EXIT_CODE.get(int(code), Cause.UNKNOWN) if code.isdigit() else Cause.UNKNOWN
    return [EngineEnd(cause, f"the Job failed ({failed.get('reason')}): {text}")]


def _result_may_come(pod: Pod, has_result: Callable[[int], bool], now: float, patience: Patience) -> bool:
    """An agent that ended by a code of its own has written its result, which a shared file system may show later."""
    ended = pod.terminated
    if ended is None or ended.get("exitCode") not in CAUSE_OF_EXIT_CODE or has_result(pod.node):
        return False
    return pod.ended_since is not None and now < pod.ended_since + patience.result


def _gone(seen: Seen, nodes: int, late: Sequence[Pod], now: float, may_start: bool) -> frozenset[int]:
    """Nodes that nothing runs on. One whose machine does not answer after its pod's grace is given up with them."""
    out = set()
    for node in range(nodes):
        pods = [pod for pod in seen.pods if pod.node == node]
        running = [pod for pod in pods if not pod.over and not pod.overdue(now)]
        if running or any(pod.node == node for pod in late) or (not pods and may_start):
            continue
        out.add(node)
    return frozenset(out)


def _waiting(seen: Seen, nodes: int, live: Sequence[Pod]) -> str | None:
    """Why not all containers have started, in the engine's words."""
    job = seen.job
    if job is None:
        return None
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        if queue is None:
            return "the Job is suspended, and no queue is named: somebody suspended it (`kubectl get job` tells)"
        return f"waits in Kueue's queue {queue}{_said(seen, job)}"
    missing = _unmade(seen, nodes)
    if missing is not None:
        return f"{missing} yet{_said(seen, job) or _unseen(seen, job)}"
    for pod in live:
        text = waits_for(pod, seen.warnings.get(pod.name))
        if text is not None:
            return f"node {pod.node}: {text}" if nodes > 1 else text
    return None


def _unmade(seen: Seen, nodes: int) -> str | None:
    """How many pods the Job controller has yet to make; None: none."""
    made = {pod.node for pod in seen.pods}
    if seen.job is None or seen.job["spec"].get("suspend") or len(made) >= nodes or not _may_start(seen, nodes):
        return None
    return f"{nodes - len(made)} of {counted(nodes, 'pod')} not made"


def _said(seen: Seen, job: Json) -> str:
    text = seen.warnings.get(job["metadata"]["name"])
    return f": {text}" if text else ""


def _unseen(seen: Seen, job: Json) -> str:
    """Where to read why pods are not made, if it cannot be seen here."""
    if seen.blind is None:
        return ""
    metadata = job["metadata"]
    return (
        f"; why is not known here, since warning events cannot be read ({seen.blind}): "
        f"`kubectl --namespace {metadata.get('namespace', 'default')} describe job {metadata['name']}` shows them"
    )


def _condition(job: Json, kind: str) -> Json | None:
    found = (c for c in job.get("status", {}).get("conditions") or () if c["type"] == kind and c["status"] == "True")
    return next(found, None)
