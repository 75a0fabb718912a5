"""What the launcher makes of a Job, its pods and their events.

The histories are modelled by hand after Kubernetes' documentation and source: a Job failed by a disruption, a lost node, an OOM
kill, an image that cannot be pulled, a pod that fits nowhere and the like were not recorded from a live cluster; what one does
then is not proved here. Recorded histories are replayed in ``tests/integration/support/test_kubernetes_replay.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_contract.phases import Budget, Cause
from ratchet_service.launchers.kubernetes import watch_cache as cache_module
from ratchet_service.launchers.kubernetes.client import Api
from ratchet_service.launchers.kubernetes.job_status import ObservedState, View, evaluate, is_finished, will_conclude
from ratchet_service.launchers.kubernetes.pod_status import Patience, Pod, first_seen_times
from ratchet_service.launchers.kubernetes.watch_cache import Cache
from tests.support.kube_jobs import site

NAME = "job-0123456789ab-a0003"
START = datetime(2026, 11, 22, 12, tzinfo=UTC)
PATIENCE = Patience(fault=300.0, start=1800.0, result=15.0)
RUNNING = {"running": {"startedAt": "2026-11-22T12:00:05Z"}}


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(
    *conditions: tuple[str, str, str],
    concluded: float = 55,
    deleted: bool = False,
    queue: str | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """``conditions``: type, reason, message; all of the second ``concluded``. ``deleted``: in the second 60."""
    metadata: dict[str, Any] = {"name": NAME, "uid": "j", "labels": {}}
    if deleted:
        metadata["deletionTimestamp"] = at(60)
    if queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = queue
    listed = [
        {"type": t, "status": "True", "reason": r, "message": m, "lastTransitionTime": at(concluded)}
        for t, r, m in conditions
    ]
    return {"metadata": metadata, "spec": {"suspend": False, **spec}, "status": {"conditions": listed}}


def pod(
    node: int = 0,
    phase: str = "Running",
    state: Mapping[str, Any] | None = None,
    *,
    conditions: tuple[dict[str, Any], ...] = (),
    scheduled: bool = True,
    deletion: float | None = None,
    gone: bool = False,
    **status: Any,
) -> Pod:
    """``deletion``: seconds at which the grace of its deletion ends. Its states are seen as soon as they are there, by a clock
    that shows 0 at ``START``."""
    metadata: dict[str, Any] = {
        "name": f"{NAME}-{node}-x", "uid": f"p{node}", "namespace": "ratchet",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(node)},
    }  # fmt: skip
    if deletion is not None:
        metadata |= {"deletionTimestamp": at(deletion), "deletionGracePeriodSeconds": 30}
    spec: dict[str, Any] = {
        "containers": [{"name": "agent", "image": "team/train:2", "resources": {"limits": {"memory": "4Gi"}}}]
    }
    own = list(conditions)
    if scheduled:
        spec["nodeName"] = f"machine-{node}"
        own.append({"type": "PodScheduled", "status": "True", "lastTransitionTime": at(0)})
    if state is None and phase == "Running":
        state = RUNNING
    statuses = [] if state is None else [{"name": "agent", "state": state}]
    told = {"phase": phase, "conditions": own, "containerStatuses": statuses, **status}
    made = {"metadata": metadata, "spec": spec, "status": told}
    since = first_seen_times(made, {}, 0.0)
    over = (state or {}).get("terminated", {}).get("finishedAt")
    if over is not None:
        since = first_seen_times(made, {"scheduled": 0.0}, (datetime.fromisoformat(over) - START).total_seconds())
    if deletion is not None:
        since |= {f"leaves at {at(deletion)}": deletion - 30}
    return Pod(made, gone, since)


def ended(code: int, reason: str = "Error", finished_at: float = 50, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at(finished_at), "message": message}}


def disruption(reason: str, message: str = "the engine's words", seconds: float = 40) -> dict[str, Any]:
    return {
        "type": "DisruptionTarget", "status": "True", "reason": reason, "message": message, "lastTransitionTime": at(seconds),
    }  # fmt: skip


def waiting(reason: str, message: str = "the engine's words") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def seen(made: dict[str, Any] | None, *pods: Pod, **more: Any) -> ObservedState:
    return ObservedState(made, pods=pods, **more)


def view(
    what: ObservedState, *, nodes: int = 1, results: tuple[int, ...] = (), began: bool = True, seconds: float = 100
) -> View:
    return evaluate(what, nodes, lambda: began, lambda node: node in results, seconds, PATIENCE)


FAILED = (
    "Failed",
    "PodFailurePolicy",
    f"Pod ratchet/{NAME}-0-x has condition DisruptionTarget matching FailJob rule at index 0",
)


# --- ends --------------------------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[Pod, Cause, str]] = {
    "preempted": (
        pod(0, "Failed", ended(143), conditions=(disruption("PreemptionByScheduler"),)),
        Cause.HIGHER_PRIORITY, "launcher.priority_class",
    ),
    "drained": (
        pod(0, "Failed", ended(143), conditions=(disruption("EvictionByEvictionAPI"),)), Cause.EVICTED, "node is drained",
    ),
    "node under pressure": (
        pod(0, "Failed", ended(137), conditions=(disruption("TerminationByKubelet"),), reason="Evicted"),
        Cause.EVICTED, "resources.memory",
    ),
    "evicted, by an old kubelet": (
        pod(0, "Failed", reason="Evicted", message="The node was low on resource: memory."), Cause.EVICTED, "low on resource",
    ),
    "more disk than its limit": (
        pod(0, "Failed", ended(137), reason="Evicted", message='Usage of EmptyDir volume "tmp" exceeds the limit "10Gi". '),
        Cause.RANK_KILLED, "launcher.tmp_size",
    ),
    "more of a volume than its limit": (
        pod(0, "Failed", reason="Evicted", message='Usage of EmptyDir volume "volume-1" exceeds the limit "1Gi". '),
        Cause.RANK_KILLED, "raise volumes[1].empty_dir",
    ),
    "more of a volume of the patch than its limit": (
        pod(0, "Failed", reason="Evicted", message='Usage of EmptyDir volume "more" exceeds the limit "1Gi". '),
        Cause.RANK_KILLED, "raise the size of more in launcher.pod_patch",
    ),
    "more beside its code than the limit": (  # a patch of this volume is refused, and the snapshot itself always fits
        pod(0, "Failed", reason="Evicted", message='Usage of EmptyDir volume "code" exceeds the limit "2Gi". '),
        Cause.RANK_KILLED, "than the limit: write to the working directory or to /tmp, not below /ratchet/code",
    ),
    "more shared memory than its limit": (
        pod(0, "Failed", reason="Evicted", message='Usage of EmptyDir volume "shm" exceeds the limit "8Gi". '),
        Cause.RANK_KILLED, "launcher.shm_size",
    ),
    "more disk than all limits": (
        pod(0, "Failed", reason="Evicted", message="Pod ephemeral local storage usage exceeds the total limit of containers 9G."),
        Cause.RANK_KILLED, "launcher.tmp_size",
    ),
    "more logs than its limit": (
        pod(0, "Failed", reason="Evicted", message='Container agent exceeded its local ephemeral storage limit "11Gi". '),
        Cause.RANK_KILLED, "launcher.tmp_size",
    ),
    "node shut down": (pod(0, "Failed", reason="NodeShutdown", message="imminent node shutdown"), Cause.EVICTED, "shutdown"),
    "taint": (
        pod(0, "Running", conditions=(disruption("DeletionByTaintManager"),), deletion=60), Cause.NODE_LOST, "does not respond",
    ),
    "node removed": (
        pod(0, "Failed", conditions=(disruption("DeletionByPodGC"),)), Cause.NODE_LOST, "no longer exists",
    ),
    "unknown phase": (pod(0, "Unknown"), Cause.NODE_LOST, "machine-0 does not answer"),
    "node lost": (pod(0, "Failed", reason="NodeLost"), Cause.NODE_LOST, "NodeLost"),
    "grace is long over": (pod(0, "Running", deletion=60), Cause.NODE_LOST, "machine-0 does not answer"),
    "a later Kubernetes' word": (
        pod(0, "Failed", ended(143), conditions=(disruption("EvictionByMoonlight"),)), Cause.EVICTED, "EvictionByMoonlight",
    ),
    "out of memory": (pod(0, "Failed", ended(137, "OOMKilled")), Cause.OOM, "(4Gi): raise resources.memory"),
    "deadline of the pod": (pod(0, "Failed", ended(143), reason="DeadlineExceeded"), Cause.TIME_LIMIT, "DeadlineExceeded"),
    "restarted machine": (pod(0, "Failed", ended(137, "ContainerStatusUnknown")), Cause.NODE_LOST, "restart"),
    "no such program": (
        pod(0, "Failed", ended(128, "StartError", message='exec: "python": not found')), Cause.LAUNCHER_ERROR, "image and python",
    ),
    "not admitted": (
        pod(0, "Failed", reason="UnexpectedAdmissionError", message="Allocate failed"), Cause.LAUNCHER_ERROR, "Allocate failed",
    ),
    "user error": (pod(0, "Failed", ended(78, message="no module named x")), Cause.USER_ERROR, "no module named x"),
    "checkpoint error": (pod(0, "Failed", ended(74)), Cause.CHECKPOINT_ERROR, "code 74"),
    "hang": (pod(0, "Failed", ended(124)), Cause.HANG, "code 124"),
    "killed by nobody known": (pod(0, "Failed", ended(137)), Cause.UNKNOWN, "signal 9"),
    "success without a result": (pod(0, "Succeeded", ended(0, "Completed")), Cause.UNKNOWN, "check that the claim"),
    "removed by force": (pod(0, "Running", gone=True, state={}), Cause.UNKNOWN, "by force"),
    "bad image name": (pod(0, "Pending", waiting("InvalidImageName")), Cause.LAUNCHER_ERROR, "team/train:2"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_pod_end_maps_to_cause_and_advice(case: str) -> None:
    """Modelled by hand, but for the eviction and the plain exit codes."""
    what, cause, words = ENDS[case]
    (end,) = view(seen(job(), what)).ends
    assert (end.cause, end.node) == (cause, 0)
    assert words in end.message and what.name in end.message


def test_cluster_interruptions_count_as_preemptions() -> None:
    budgets = {case: view(seen(job(), what)).ends[0].cause.budget for case, (what, _, _) in ENDS.items()}
    free = {case for case, budget in budgets.items() if budget is Budget.PREEMPTIONS}
    assert {"preempted", "drained", "node under pressure", "taint", "node removed", "unknown phase"} <= free
    assert not free & {"more disk than its limit", "more disk than all limits", "more logs than its limit"}
    assert not free & {"out of memory", "no such program", "user error", "bad image name", "killed by nobody known"}


def test_agent_result_overrides_exit_codes_but_not_evictions() -> None:
    """Node 1 was evicted; the Job controller then stopped node 0. Both agents tell of a SIGTERM only."""
    pods = (
        pod(0, "Failed", ended(143)),
        pod(1, "Failed", ended(143), conditions=(disruption("EvictionByEvictionAPI"),)),
    )
    ends = view(seen(job(FAILED), *pods), nodes=2, results=(0, 1)).ends
    assert [(end.cause, end.node) for end in ends] == [(Cause.EVICTED, 1)]


def test_pod_ends_are_ordered_by_finish_time() -> None:
    first = pod(1, "Failed", ended(137, "OOMKilled", finished_at=20))
    second = pod(0, "Failed", ended(1, finished_at=30))
    assert [end.node for end in view(seen(job(), second, first), nodes=2).ends] == [1, 0]


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (FAILED[2], Cause.EVICTED),
        (
            "Container agent for pod ratchet/x failed with exit code 78 matching FailJob rule at index 1",
            Cause.USER_ERROR,
        ),
        ("Job has reached the specified backoff limit", Cause.UNKNOWN),
    ],
)
def test_job_condition_gives_cause_when_no_pod_is_left(message: str, cause: Cause) -> None:
    """A Job failed by a disruption is modelled by hand; the other two messages were recorded."""
    found = view(seen(job(("Failed", "PodFailurePolicy", message))))
    assert not found.alive and [(end.cause, end.node) for end in found.ends] == [(cause, None)]


def test_job_deleted_by_others_is_evicted_but_not_when_deleted_by_service() -> None:
    """It is outside interference that says nothing of the job: the next attempt goes on, and no failure is counted."""
    running = pod(0, "Running", deletion=200)
    (end,) = view(seen(job(deleted=True), running)).ends
    assert end.cause is Cause.EVICTED and "ratchet cancel" in end.message
    assert view(seen(job(deleted=True), running, deleted_by_service=True)).ends == ()
    assert view(seen(job(), deleted=True)).ends[0].cause is Cause.EVICTED


def test_pod_deleted_by_hand_is_evicted_but_not_pods_removed_with_job() -> None:
    code = f"Container agent for pod ratchet/{NAME}-1-x failed with exit code 143 matching FailJob rule at index 1"
    by_hand, other = (
        pod(1, "Failed", ended(143, finished_at=42), deletion=70),
        pod(0, "Failed", ended(143), deletion=75),
    )
    failed = job(("FailureTarget", "PodFailurePolicy", code), concluded=42)
    first, second = view(seen(failed, other, by_hand), nodes=2).ends
    assert (first.cause, first.node, second.cause) == (Cause.EVICTED, 1, Cause.SIGTERM)
    assert "somebody deleted the pod" in first.message and "ratchet cancel" in first.message
    assert view(seen(failed, other, by_hand), nodes=2, results=(0, 1)).ends == (first,)
    of_the_job = pod(0, "Failed", ended(143), deletion=70)
    for made in (job(deleted=True), job(suspend=True)):
        assert "deleted the pod" not in view(seen(made, of_the_job)).ends[0].message
    after = pod(0, "Failed", ended(78, finished_at=30), deletion=70)  # taken away once it had ended
    assert [end.cause for end in view(seen(job(), after)).ends] == [Cause.USER_ERROR]


def test_forced_pod_deletion_in_second_of_job_end_counts_as_eviction() -> None:
    """Kubernetes tells times in whole seconds."""
    failed = job(("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"), concluded=42)
    forced = pod(0, "Failed", ended(137, finished_at=42), deletion=72)
    (end,) = view(seen(failed, forced)).ends
    assert end.cause is Cause.EVICTED and "somebody deleted the pod" in end.message
    broken = pod(1, "Failed", ended(78, finished_at=42))
    assert all("deleted the pod" not in end.message for end in view(seen(failed, forced, broken), nodes=2).ends)


@pytest.mark.parametrize(
    "state", [waiting("ImagePullBackOff"), ended(137, "ContainerStatusUnknown")], ids=["old", "new"]
)
def test_deleted_job_with_unstarted_container_has_no_end_without_warning(state: dict[str, Any]) -> None:
    never = pod(0, "Failed", state, deletion=70)
    assert view(seen(job(deleted=True), never, deleted_by_service=True)).ends == ()
    warnings = {never.name: 'Failed: Failed to pull image "team/train:2"'}
    (end,) = view(seen(job(deleted=True), never, deleted_by_service=True, warnings=warnings)).ends
    assert end.cause is Cause.LAUNCHER_ERROR and "team/train:2" in end.message


def test_finished_job_removed_by_ttl_is_not_evicted() -> None:
    complete = job(("Complete", "CompletionsReached", ""))
    assert view(seen(complete, deleted=True)).ends == ()
    over = pod(0, "Failed", ended(78))
    assert view(seen(job(FAILED), over, deleted=True)).ends[0].cause is Cause.USER_ERROR
    assert view(seen(job(FAILED, deleted=True), over)).ends[0].cause is Cause.USER_ERROR
    stopped = view(seen(job(FAILED, concluded=70, deleted=True), over))  # the controller's word came after the deletion
    assert stopped.ends[0].cause is Cause.EVICTED


# --- the queue ---------------------------------------------------------------------------------------------------------


def test_kueue_held_job_waits_and_revoked_job_has_ended() -> None:
    """Modelled by hand: no Kueue was recorded, only ``suspend``."""
    held = view(seen(job(suspend=True, queue="vision")), began=False)
    assert held.alive and held.waiting == "waits in Kueue's queue vision" and not held.revoked

    stopping = view(seen(job(suspend=True, queue="vision"), pod(0, "Running", deletion=200)))
    assert stopping.alive and stopping.revoked
    taken = view(seen(job(suspend=True, queue="vision"), pod(0, "Failed", ended(143), gone=True)))
    assert not taken.alive and taken.ends[0].cause is Cause.HIGHER_PRIORITY and "queue vision" in taken.ends[0].message
    by_hand = view(seen(job(suspend=True), pod(0, "Failed", ended(143), gone=True)))
    assert by_hand.ends[0].cause is Cause.EVICTED and "ratchet suspend" in by_hand.ends[0].message


def test_unschedulable_pod_waits_with_scheduler_message() -> None:
    """Modelled by hand."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available",
    }
    found = view(seen(job(), pod(0, "Pending", conditions=(condition,), scheduled=False)), began=False, seconds=90_000)
    assert found.alive and found.waiting == "waits for a machine: 0/3 nodes are available" and found.ends == ()


def test_exceeded_quota_waits_with_controller_message() -> None:
    warnings = {NAME: 'FailedCreate: pods "x" is forbidden: exceeded quota: gpus'}
    found = view(seen(job(), pod(0), warnings=warnings), nodes=2, began=False)
    assert found.alive and found.ends == ()
    assert found.waiting == f"1 of 2 pods not made yet: {warnings[NAME]}"


def test_forbidden_pods_become_launcher_error_after_timeout() -> None:
    warnings = {
        NAME: f'FailedCreate: Error creating: pods "{NAME}-1-x" is forbidden: no PriorityClass with name high was found'
    }
    forbidden = seen(job(), pod(0), warnings=warnings, forbidden_since=20)
    found = view(forbidden, nodes=2, seconds=320)
    assert found.alive and found.waiting == f"1 of 2 pods not made yet: {warnings[NAME]}" and found.ends == ()
    found = view(forbidden, nodes=2, seconds=321)
    assert not found.alive and [end.cause for end in found.ends] == [Cause.LAUNCHER_ERROR]
    assert "1 of 2 pods not made" in found.ends[0].message and warnings[NAME] in found.ends[0].message
    for other in (seen(job(suspend=True), warnings=warnings, forbidden_since=20), seen(job(), pod(0), pod(1))):
        assert view(other, nodes=2, began=False, seconds=900).alive


def test_latest_failed_create_event_decides_whether_pods_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    cache = Cache(Api(site().settings), ("ratchet",), "")

    def told(seconds: float, text: str, *, deleted: bool = False) -> float | None:
        clock.now = seconds
        event = {"metadata": {"name": "e"}, "involvedObject": {"name": NAME}, "reason": "FailedCreate"}
        cache.apply("events", event | {"message": f"Error creating: {text}"}, "ratchet", deleted=deleted)
        return cache.observe(NAME).forbidden_since

    assert told(101, 'pods "a" is forbidden: exceeded quota: q, requested: pods=1') is None
    assert told(102, 'Internal error occurred: failed calling webhook "w": context deadline exceeded') is None
    assert told(103, 'pods "b" is forbidden: no PriorityClass with name high was found') == 103
    assert told(104, 'admission webhook "w" denied the request: no') == 103
    assert told(105, '(combined from similar events): Error creating: Pod "c" is invalid: spec: Forbidden') == 103
    assert told(106, 'pods "d" is forbidden: exceeded quota: q', deleted=True) == 103, "an old event whose time is over"
    assert told(107, 'pods "e" is forbidden: exceeded quota: q') is None
    assert told(108, 'pods "f" is forbidden: failed quota: q: must specify limits.cpu') == 108


def test_missing_volume_claim_becomes_launcher_error_after_timeout() -> None:
    text = '0/3 nodes are available: persistentvolumeclaim "data" not found.'
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    made = pod(0, "Pending", scheduled=False, conditions=(unscheduled,))
    found = view(seen(job(), made), seconds=300)
    assert found.alive and found.waiting == f"waits for a machine: {text}"
    found = view(seen(job(), made), seconds=301)
    assert not found.alive and [end.cause for end in found.ends] == [Cause.LAUNCHER_ERROR]
    assert text in found.ends[0].message and "volumes" in found.ends[0].message
    came = first_seen_times(pod(0, "Pending").object, made.state_since, 200)
    assert view(seen(job(), Pod(pod(0, "Pending").object, False, came)), seconds=450).alive


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"])
def test_container_creation_failure_becomes_launcher_error_after_timeout(reason: str) -> None:
    """Modelled by hand."""
    what = seen(job(), pod(0, "Pending", waiting(reason, "pull access denied")))
    early = view(what, began=False, seconds=299)
    assert early.alive and early.ends == () and "pull access denied" in (early.waiting or "")
    late = view(what, began=False, seconds=301)
    assert not late.alive and late.waiting is None
    assert late.ends[0].cause is Cause.LAUNCHER_ERROR and "pull access denied" in late.ends[0].message


def test_hanging_start_shows_last_warning_then_becomes_launcher_error() -> None:
    """Modelled by hand: a volume that cannot be mounted is told by events alone."""
    stuck = pod(0, "Pending", waiting("ContainerCreating", ""))
    what = seen(job(), stuck, warnings={stuck.name: 'FailedMount: configmap "train" not found'})
    assert 'configmap "train" not found' in (view(what, began=False, seconds=1700).waiting or "")
    found = view(what, began=False, seconds=1801)
    assert not found.alive and found.ends[0].cause is Cause.LAUNCHER_ERROR


def test_pod_that_cannot_start_ends_whole_attempt() -> None:
    """Modelled by hand."""
    found = view(seen(job(), pod(0), pod(1, "Pending", waiting("InvalidImageName"))), nodes=2)
    assert not found.alive and [end.node for end in found.ends] == [1]


# --- alive, gone, proved -----------------------------------------------------------------------------------------------


def test_attempt_is_alive_while_a_pod_runs_or_is_pending() -> None:
    assert view(seen(job(), pod(0))).alive
    assert view(seen(job(), pod(0, "Pending"))).alive
    assert view(seen(job())).alive
    assert view(seen(job(deleted=True), pod(0, deletion=200))).alive
    assert view(seen(job(), pod(0, "Succeeded", ended(0)), pod(1)), nodes=2, results=(0,)).alive
    assert view(
        seen(job(), pod(0, "Succeeded", ended(0))), nodes=2, results=(0,)
    ).alive  # the other pod is still to come


def test_attempt_is_not_alive_after_pod_failure_or_without_job() -> None:
    assert not view(seen(job(), pod(0, "Failed", ended(1))), nodes=2, results=(0,)).alive
    assert not view(seen(job(deleted=True))).alive
    assert not view(seen(None), began=False).alive


def test_attempt_stays_alive_while_agent_result_file_is_pending() -> None:
    """A shared file system may show it some seconds later; what a kill left behind will not come."""
    late = seen(job(), pod(0, "Failed", ended(143, finished_at=95)))
    assert view(late).alive and view(late).gone_nodes == frozenset()
    assert not view(late, seconds=111).alive
    assert not view(late, results=(0,)).alive
    assert not view(seen(job(), pod(0, "Failed", ended(137, finished_at=95)))).alive


def test_node_is_gone_when_pod_ended_or_machine_is_unreachable() -> None:
    """The machine's silence is modelled by hand."""
    assert view(seen(job(), pod(0), pod(1)), nodes=2).gone_nodes == frozenset()
    assert view(seen(job(), pod(0), pod(1, "Failed", ended(137))), nodes=2).gone_nodes == {1}
    lost = pod(1, conditions=(disruption("DeletionByTaintManager"),), deletion=60)
    assert view(seen(job(), pod(0), lost), nodes=2, seconds=65).gone_nodes == frozenset()
    assert view(seen(job(), pod(0), lost), nodes=2, seconds=75).gone_nodes == {1}
    assert view(seen(job(), pod(0)), nodes=2).gone_nodes == frozenset()  # the other one is still to be made


def test_job_is_finished_only_by_final_controller_condition() -> None:
    over = pod(0, "Failed", ended(1))
    assert will_conclude(seen(job(), over), 1) and not will_conclude(seen(job(), over), 2)
    assert not will_conclude(seen(job(deleted=True), over), 1)
    assert not will_conclude(seen(job(), over, pod(1)), 2)
    assert not is_finished(seen(job(("FailureTarget", "PodFailurePolicy", "")), over))
    assert is_finished(seen(job(FAILED), over))


# --- what the watches leave --------------------------------------------------------------------------------------------


def listed(version: int, uid: str = "j") -> dict[str, Any]:
    made = job()
    made["metadata"] |= {"uid": uid, "resourceVersion": str(version)}
    return made


def test_cache_keeps_new_job_until_newer_list_omits_job() -> None:
    cache = Cache(Api(site().settings), ("ratchet",), "")
    cache.add_job(listed(12), "ratchet")
    assert cache.observe(NAME).job is not None and cache.live_attempts() == [NAME]
    cache.replace("jobs", [], "ratchet", "11")
    assert not cache.observe(NAME).deleted
    cache.replace("jobs", [], "other", "13")
    assert not cache.observe(NAME).deleted
    cache.replace("jobs", [], "ratchet", "13")
    assert cache.observe(NAME).deleted and cache.live_attempts() == []


def test_cache_add_job_does_not_revive_job_deleted_by_watch() -> None:
    cache = Cache(Api(site().settings), ("ratchet",), "")
    cache.apply("jobs", listed(12), "ratchet")
    cache.apply("jobs", listed(13), "ratchet", deleted=True)
    cache.add_job(listed(12), "ratchet")
    assert cache.observe(NAME).deleted
    cache.add_job(listed(14, uid="another of this name"), "ratchet")
    assert not cache.observe(NAME).deleted


def test_pod_timeouts_count_from_first_observation_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the cluster's clocks nor news of the same state shorten or lengthen it; a service that starts anew counts anew."""
    clock = [1000.0]
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    first, second = (Cache(Api(site().settings), ("ratchet",), "") for _ in range(2))

    def told(cache: Cache, deletion: float | None = None) -> Pod:
        made = pod(0, "Pending", waiting("ContainerCreating", str(clock[0])), deletion=deletion).object
        made["metadata"]["labels"] = {"ratchet.dev/job-id": "job-0123456789ab", "ratchet.dev/attempt": "3"}
        cache.apply("pods", made, "ratchet")
        (seen_,) = cache.observe(NAME).pods
        return seen_

    told(first)
    clock[0] += 100.0
    assert (told(first).scheduled_since, told(second).scheduled_since) == (1000.0, 1100.0)
    told(first, deletion=-9000)
    clock[0] += 39.0
    assert not told(first, deletion=-9000).is_overdue(clock[0])
    clock[0] += 2.0
    assert told(first, deletion=-9000).is_overdue(clock[0]) and not told(second, deletion=-9000).is_overdue(clock[0])
    assert not told(first, deletion=-9020).is_overdue(clock[0]), "somebody hurries it: a new grace"


def test_cache_keeps_last_state_of_deleted_pod() -> None:
    cache = Cache(Api(site().settings), ("ratchet",), "")
    made = pod(0, "Failed", ended(137, "OOMKilled")).object
    made["metadata"]["labels"] = {"ratchet.dev/job-id": "job-0123456789ab", "ratchet.dev/attempt": "3"}
    cache.apply("jobs", listed(12), "ratchet")
    cache.apply("pods", made, "ratchet", deleted=True)
    assert [end.cause for end in view(cache.observe(NAME)).ends] == [Cause.OOM]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("cause", "what"),
    [
        (Cause.OOM, {"state": ended(137, "OOMKilled")}),
        (Cause.EVICTED, {"state": ended(137), "conditions": (disruption("EvictionByEvictionAPI", seconds=50),)}),
    ],
)
def test_pod_killed_in_same_second_is_not_taken_as_first_cause(cause: Cause, what: dict[str, Any], last: bool) -> None:
    first, stopped = (1, 0) if last else (0, 1)
    pods = sorted((pod(first, "Failed", **what), pod(stopped, "Failed", ended(137))), key=lambda p: p.node)
    end, *_ = view(seen(job(), *pods), nodes=2).ends
    assert (end.cause, end.node) == (cause, first)


def test_ended_container_with_running_sidecar_is_not_a_failed_start() -> None:
    """Its pod runs on for as long as a sidecar ends, perhaps long after it was begun."""
    told = view(seen(job(), pod(0, "Running", ended(143, finished_at=4000))), seconds=4001)
    assert told.alive and told.ends == ()
