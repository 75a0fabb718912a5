"""The Kubernetes launcher on a live cluster: ``KUBECONFIG=... pytest -m cluster``. Nothing of this runs without one.

In the namespace RATCHET_CLUSTER_NAMESPACE (``default``) it needs the rights of ``deploy/kubernetes/base/role.yaml``. Jobs are
trained where these are set: RATCHET_CLUSTER_CLAIM, a ReadWriteMany claim; RATCHET_CLUSTER_HOME, where its root is seen here;
RATCHET_CLUSTER_IMAGE, a worker image; and where these tests run as root RATCHET_CLUSTER_USER, the user of the pods. To evict a
pod one needs ``create`` on ``pods/eviction``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.spec.job import Resolved
from ratchet_service.launchers.base import AttemptRef, AttemptState, LaunchPlan
from ratchet_service.launchers.kubernetes import manifests
from ratchet_service.launchers.kubernetes.client import Api
from ratchet_service.launchers.kubernetes.delete import delete_job
from ratchet_service.launchers.kubernetes.launcher import KubernetesLauncher
from ratchet_service.launchers.kubernetes.settings import parse_settings
from ratchet_service.launchers.launch_file import build_launch_file
from tests.support.kube_faults import SERVER_SEES
from tests.support.kube_jobs import SMALL, WHOLE, spec_of
from tests.support.server import wait_for

pytestmark = pytest.mark.cluster

NAMESPACE = os.environ.get("RATCHET_CLUSTER_NAMESPACE", "default")
PATIENCE = 300.0
TRAINING = ("RATCHET_CLUSTER_CLAIM", "RATCHET_CLUSTER_HOME", "RATCHET_CLUSTER_IMAGE")


class Live:
    """A launcher on the cluster, for one job by a name of its own. ``training``: with claim and image."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.training = all(os.environ.get(name) for name in TRAINING)
        root = Path(os.environ["RATCHET_CLUSTER_HOME"]) if self.training else directory
        self.job_id = f"job-{secrets.token_hex(6)}"
        user = os.environ.get("RATCHET_CLUSTER_USER") or ("65532" if os.getuid() == 0 else None)
        given = {
            "claim": os.environ.get("RATCHET_CLUSTER_CLAIM", f"no-claim-{self.job_id}"),
            "url": "http://127.0.0.1:9",  # agents train without a service
            "image": os.environ.get("RATCHET_CLUSTER_IMAGE", "registry.k8s.io/pause:3.10"),
            "namespace": NAMESPACE,
            "run_as_user": None if user is None else int(user),
        }
        self.site = parse_settings(HomePaths(root), given | settings)
        self.launcher = KubernetesLauncher(self.site, os.environ)
        self.refs: list[AttemptRef] = []

    def plan(self, **spec: Any) -> LaunchPlan:
        made = spec_of(SMALL, **spec)
        resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=made.python or "python")
        launch = build_launch_file(
            self.site.home, self.job_id, len(self.refs) + 1, made, resolved, (), token="t", desired=Desired.RUN
        )
        plan = self.launcher.plan(launch)
        self.refs.append(plan.ref)
        return plan

    def over(self, ref: AttemptRef) -> AttemptState:
        return wait_for(lambda: s if not (s := self.launcher.poll(ref)).alive else None, "the end", PATIENCE, 0.5)

    def close(self) -> None:
        for ref in self.refs:
            wait_for(lambda ref=ref: not self.launcher.kill(ref), "the attempt to be proved dead", PATIENCE, 0.5)
            delete_job(Api(self.site.settings), self.site, ref.name)
        self.launcher.close()


@pytest.fixture
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Live]:
    if "cluster" not in (request.config.option.markexpr or ""):
        pytest.skip("a live cluster is used only when asked for: pytest -m cluster")
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: no cluster")
    made = Live(tmp_path, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.fixture
def training(live: Live) -> Live:
    if not live.training:
        pytest.skip(f"jobs are trained only where {', '.join(TRAINING)} are set")
    return live


def dry_run(live: Live, manifest: dict[str, Any]) -> None:
    """Raises ``ApiException`` for what the server would refuse."""
    from kubernetes import client, config

    with config.new_client_from_config() as api:
        options = {"dry_run": "All", "field_validation": "Strict"}
        if manifest["kind"] == "Job":
            client.BatchV1Api(api).create_namespaced_job(NAMESPACE, manifest, **options)
        elif manifest["kind"] == "Service":
            client.CoreV1Api(api).create_namespaced_service(NAMESPACE, manifest, **options)
        else:
            client.CoreV1Api(api).create_namespaced_secret(NAMESPACE, manifest, **options)


@pytest.mark.parametrize("base", [SMALL, WHOLE], ids=["small", "whole"])
def test_live_cluster_accepts_the_manifests(live: Live, base: dict[str, Any]) -> None:
    spec = spec_of(base)
    resolved = Resolved(
        device="cpu", backend="gloo", threads_per_rank=1, python="python", code_digest="c0de", start_digest="5a17"
    )
    launch = build_launch_file(live.site.home, live.job_id, 1, spec, resolved, (), token="t", desired=Desired.RUN)
    for manifest in live.launcher.plan(launch).request["manifests"]:
        dry_run(live, manifest)
    secret = manifests.secret_manifest(live.site, launch, {"KEY": "value"})
    assert secret is not None
    dry_run(live, secret)


@pytest.mark.parametrize("fault", SERVER_SEES)
def test_live_cluster_refuses_the_manifests_that_local_validation_refuses(live: Live, fault: str) -> None:
    from kubernetes.client import ApiException

    job = live.plan(resources={"gpu": "nvidia.com/gpu", "memory": "1Gi"}, world={"nodes": 2}).request["manifests"][0]
    live.refs.clear()
    SERVER_SEES[fault][0](job)
    with pytest.raises(ApiException) as refusal:
        dry_run(live, job)
    assert refusal.value.status in (400, 422)


def test_unschedulable_pod_waits_and_is_removed_completely(live: Live) -> None:
    plan = live.plan(launcher={"node_selector": {"ratchet.dev/no-such-node": "true"}}, world={"nodes": 2})
    live.launcher.submit(plan)
    live.launcher.submit(plan)
    state = wait_for(
        lambda: s if "machine" in ((s := live.launcher.poll(plan.ref)).waiting or "") else None,
        "the wait",
        PATIENCE,
        0.5,
    )
    assert state.alive and not state.seen and state.ends == ()
    live.launcher.stop(plan.ref, 10)
    wait_for(lambda: not live.launcher.kill(plan.ref), "it to be proved dead", PATIENCE, 0.5)
    assert not live.launcher.poll(plan.ref).alive
    assert live.launcher.sweep(lambda names: names) == []


@pytest.mark.parametrize("live", [{"fault_patience": 20}], indirect=True)
def test_live_cluster_attempt_with_a_missing_image_ends_with_launcher_error(training: Live) -> None:
    plan = training.plan(image="registry.invalid/none:0")
    training.launcher.submit(plan)
    state = training.over(plan.ref)
    assert [end.cause for end in state.ends] == [Cause.LAUNCHER_ERROR] and "registry.invalid" in state.ends[0].message


def test_live_cluster_job_trains_to_its_end(training: Live) -> None:
    plan = training.plan(task={**SMALL["task"], "args": {"epochs": 1}})
    training.launcher.submit(plan)
    state = training.over(plan.ref)
    assert [result.cause for result in state.results] == [Cause.COMPLETED] and state.ends == ()


def test_evicted_pod_saves_a_checkpoint_and_ends_with_cause_evicted(training: Live) -> None:
    from kubernetes import client, config

    plan = training.plan(task={**SMALL["task"], "args": {"epochs": 5000}})
    training.launcher.submit(plan)
    wait_for(lambda: plan.ref.paths.base_file.exists(), "the training", PATIENCE, 0.5)
    with config.new_client_from_config() as api:
        core = client.CoreV1Api(api)
        (pod,) = core.list_namespaced_pod(
            NAMESPACE, label_selector=f"batch.kubernetes.io/job-name={plan.ref.name}"
        ).items
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.metadata.name}}
        core.create_namespaced_pod_eviction(pod.metadata.name, NAMESPACE, eviction)
    state = training.over(plan.ref)
    assert [result.cause for result in state.results] == [Cause.SIGTERM]
    assert [end.cause for end in state.ends] == [Cause.EVICTED]
    assert list(training.site.home.job(training.job_id).checkpoints.glob("*/MANIFEST.json"))
