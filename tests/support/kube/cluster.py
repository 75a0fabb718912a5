"""A modelled Kubernetes cluster whose pods are processes of this machine, for tests where no cluster can run.

    with Cluster(tmp_path, claims={"home": directory}) as cluster:
        kubeconfig = cluster.kubeconfig

The API is served over HTTP, so the official client, its watches and its errors are the real ones. What the Job controller does is
compared with recordings of a real one; the scheduler, the kubelets and the faults below are modelled by hand after the
documentation, and are no proof of what a live cluster does. ``pace`` divides every wait of the controllers (a Job is looked at
once a second, pods are replaced after ten); grace periods and exit times are real.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.kube import operations
from tests.support.kube.api import KubeServer
from tests.support.kube.jobs import ENDED, JobController, release, warn
from tests.support.kube.kubelet import Kubelet
from tests.support.kube.operations import disrupt, set_condition
from tests.support.kube.store import JOBS, PODS, SECRETS, SERVICES, ApiError, Object, Store

GPU = "nvidia.com/gpu"


@dataclass
class Node:
    """``gpus``: how many it has; ``lost``: it answers no more."""

    gpus: int = 8
    labels: dict[str, str] = field(default_factory=dict)
    lost: bool = False


class Cluster:
    """Two nodes, one namespace. Everything ends with the ``with`` block, or with the process that has it."""

    def __init__(self, directory: Path, *, claims: dict[str, Path] | None = None, pace: float = 20.0) -> None:
        self.namespace = "default"
        self.store = Store()
        self.jobs = JobController(self.store, batch=1 / pace, backoff=10 / pace)
        self.nodes = {"node-a": Node(), "node-b": Node()}
        self._claims = claims or {}
        self.kubelet = Kubelet(self.store, directory / "kubelet", self._claims)
        self.api = KubeServer(self.store, self.kubelet.log)
        self.kubeconfig = self.api.kubeconfig(directory / "kubeconfig.yaml", self.namespace)
        self._closing = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if self._fault is not None and kind is None:
            raise self._fault

    def close(self) -> None:
        self._closing.set()
        self._thread.join(30)
        self.api.close()
        self.kubelet.close()

    # --- controllers ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        version = 0
        try:
            while not self._closing.is_set():
                newest = (
                    self.store.version
                )  # above that of the last change, if there is none yet or the history is compacted
                for change in self.store.since(version):
                    newest = max(newest, change.version)
                    if change.resource == JOBS and change.type != "DELETED":
                        self.jobs.job_changed(change.object)
                    elif change.resource == PODS:
                        self.jobs.pod_changed(change.object)
                version = newest
                self.jobs.run_due()
                self._collect()
                self._schedule()
                self.kubelet.sync_pods()
                due = min(filter(None, (self.jobs.next_due(), self.kubelet.next_due())), default=time.monotonic() + 0.2)
                with self.store.changed:
                    wait = max(0.0, min(due - time.monotonic(), 0.2))
                    self.store.changed.wait_for(
                        lambda v=version: self.store.version > v or self.kubelet.has_news(), wait
                    )
        except BaseException as error:
            self._fault = error
            raise

    def _collect(self) -> None:
        """What Jobs that are gone have owned; pods are deleted first, then let go of, as recorded."""
        there = {job["metadata"]["uid"] for job in self.store.select(JOBS)}
        for resource in (PODS, SERVICES, SECRETS):
            for made in self.store.select(resource):
                owners = {reference["uid"] for reference in made["metadata"].get("ownerReferences", ())}
                if not owners or owners & there:
                    continue
                with suppress(ApiError):
                    operations.delete(self.store, resource, made["metadata"]["namespace"], made["metadata"]["name"], {})
                    if resource == PODS:
                        release(self.store, made)

    def _schedule(self) -> None:
        pods = self.store.select(PODS)
        for pod in [p for p in pods if "nodeName" not in p["spec"] and "deletionTimestamp" not in p["metadata"]]:
            missing = self._missing_claim(pod)
            fitting = [] if missing else [n for n in self.nodes if self._fits(pod, n, pods)]
            if not fitting:
                self._unschedulable(pod, missing)
                continue
            placed = [p["spec"].get("nodeName") for p in pods if p["status"]["phase"] not in ENDED]
            node = min(fitting, key=placed.count)
            with suppress(ApiError):
                self._change(pod, lambda p, n=node: _bind(p, n))
                pod["spec"]["nodeName"] = node

    def _fits(self, pod: Object, name: str, pods: list[Object]) -> bool:
        node, used = self.nodes[name], 0
        for other in pods:
            if other["spec"].get("nodeName") == name and other["status"]["phase"] not in ENDED:
                used += _gpus(other)
        wanted = (pod["spec"].get("nodeSelector") or {}).items()
        return not node.lost and used + _gpus(pod) <= node.gpus and wanted <= node.labels.items()

    def _missing_claim(self, pod: Object) -> str | None:
        claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["spec"].get("volumes", ())]
        name = next((claim for claim in claims if claim is not None and claim not in self._claims), None)
        return None if name is None else f'persistentvolumeclaim "{name}" not found'

    def _unschedulable(self, pod: Object, missing: str | None) -> None:
        resource = f"Insufficient {GPU}" if _gpus(pod) else "node(s) didn't match Pod's node affinity/selector"
        message = f"0/{len(self.nodes)} nodes are available: {missing or f'{len(self.nodes)} {resource}'}."
        found = next((c for c in pod["status"].get("conditions", ()) if c["type"] == "PodScheduled"), None)
        if found is None or found.get("message") != message:
            warn(self.store, pod, "FailedScheduling", message)
            with suppress(ApiError):
                self._change(pod, lambda p: set_condition(p, "PodScheduled", "False", "Unschedulable", message))

    def _change(self, pod: Object, change: Callable[[Object], Any]) -> None:
        self.store.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], change)

    # --- what tests look at and do -------------------------------------------------------------------------------------

    def pods(self, job: str | None = None) -> list[Object]:
        """The pods of a Job, by its name, in the order of their indexes; all without."""
        found = [p for p in self.store.select(PODS) if job in (None, p["metadata"]["labels"].get("job-name"))]
        return sorted(found, key=lambda p: p["metadata"]["name"])

    def secret(self, name: str, **data: str) -> None:
        self.store.create(SECRETS, self.namespace, {"metadata": {"name": name}, "stringData": data})

    def admit(self, job: str) -> None:
        """Unsuspend a Job, as Kueue does."""
        operations.patch(self.store, JOBS, self.namespace, job, {"spec": {"suspend": False}})

    # --- faults (modelled by hand, but for the eviction) ---------------------------------------------------------------

    def evict(self, pod: Object) -> None:
        """The eviction API, as ``kubectl drain`` uses it."""
        operations.evict(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"], {})

    def preempt(self, pod: Object) -> None:
        """The scheduler makes room for a pod of higher priority."""
        message = "default-scheduler: preempting to accommodate a higher priority pod"
        self._disrupt(pod, "PreemptionByScheduler", message)

    def _disrupt(self, pod: Object, reason: str, message: str) -> None:
        disrupt(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"], reason, message)
        operations.delete_pod(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def pressure(self, pod: Object) -> None:
        """The node runs out of memory and its kubelet ends the pod; it is not deleted."""
        message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 12Mi."
        self.kubelet.signal(pod["metadata"]["uid"], signal.SIGKILL)

        def change(made: Object) -> None:
            made["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}
            set_condition(made, "DisruptionTarget", "True", "TerminationByKubelet", message)
            for status in made["status"].get("containerStatuses", ()):
                status["state"] = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}

        self._change(pod, change)

    def overfill(self, pod: Object) -> None:
        """The pod writes more to ``/tmp`` than it may: its kubelet ends it, and announces nothing (``emptyDirLimitEviction``)."""
        message = 'Usage of EmptyDir volume "tmp" exceeds the limit "10Gi". '
        self.kubelet.signal(pod["metadata"]["uid"], signal.SIGKILL)
        self._change(pod, lambda made: made["status"].update(phase="Failed", reason="Evicted", message=message))

    def oom(self, pod: Object) -> None:
        """The container takes more memory than its limit."""
        self.kubelet.oom(pod["metadata"]["uid"])

    def lose_node(self, name: str) -> None:
        """The node is cut off: its containers run on unseen. Its pods are marked for deletion, and stay."""
        self.nodes[name].lost = True
        self.kubelet.lost.add(name)
        for pod in self._on(name):
            self._change(pod, lambda p: set_condition(p, "Ready", "False", "NodeNotReady"))
            self._disrupt(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def remove_node(self, name: str) -> None:
        """The node is taken out of the cluster: its pods are failed and forgotten, whether their processes run or not."""
        if not self.nodes[name].lost:
            self.lose_node(name)
        for pod in self._on(name):
            reason = "PodGC: node no longer exists"
            disrupt(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"], "DeletionByPodGC", reason)
            self._change(pod, lambda p: p["status"].update(phase="Failed"))
            operations.delete_pod(self.store, pod["metadata"]["namespace"], pod["metadata"]["name"], 0)
        del self.nodes[name]

    def return_node(self, name: str) -> None:
        """The node is reached again: its kubelet ends what was to be deleted."""
        self.nodes.setdefault(name, Node()).lost = False
        self.kubelet.lost.discard(name)

    def _on(self, name: str) -> list[Object]:
        return [p for p in self.store.select(PODS) if p["spec"].get("nodeName") == name]


def _bind(pod: Object, node: str) -> None:
    pod["spec"]["nodeName"] = node
    set_condition(pod, "PodScheduled", "True")


def _gpus(pod: Object) -> int:
    return sum(int((c["resources"].get("limits") or {}).get(GPU, 0)) for c in pod["spec"]["containers"])
