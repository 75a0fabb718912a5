"""The rights of ``deploy/kubernetes/base/role.yaml`` against what the Kubernetes launcher asks for: all that it needs, no more.

The API server is a modelled one (``tests.support.kube``) that refuses what the Role does not allow. It has no controllers: what
they would do to pods and Jobs is done by the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.launchers.base import AttemptRef, LaunchError, LaunchPlan
from ratchet_service.launchers.kubernetes.launcher import KubernetesLauncher, make
from ratchet_service.launchers.kubernetes.settings import parse_settings
from ratchet_service.reconciler.launch import build_launch_file
from tests.support.fake_kustomize import documents
from tests.support.kube import operations
from tests.support.kube.api import KubeServer, Target, no_right
from tests.support.kube.store import JOBS, PODS, Store
from tests.support.server import wait_for

BASE = Path(__file__).parents[3] / "deploy" / "kubernetes" / "base"
SPEC = parse_spec(
    {
        "name": "rights",
        "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask"},
        "world": {"nodes": 2, "ranks_per_node": 1, "device": "cpu"},
        "secrets": {"TOKEN": {"from_env": "SITE_TOKEN"}},
        "launcher": {"kind": "kubernetes"},
    }
)
RESOLVED = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python")
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def granted() -> set[Right]:
    (role,) = [document for document in documents(BASE / "role.yaml") if document["kind"] == "Role"]
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} and "*" not in str(rule) for rule in role["rules"])
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


class Guarded:
    """A server that knows the Role, and what was asked of it."""

    def __init__(self, directory: Path, rights: set[Right]) -> None:
        self.asked: set[Right] = set()
        self.store = Store()
        self.server = KubeServer(self.store, log=lambda namespace, name, query: b"the agent's words\n")
        self.server.forbidden = self._refuses
        self.rights = rights
        settings = yaml.safe_load((BASE / "launchers.yaml").read_text())["kubernetes"]
        self.settings: dict[str, Any] = settings | {"kubeconfig": str(self.server.kubeconfig(directory / "kubeconfig"))}
        if os.getuid() == 0:
            self.settings["run_as_user"] = self.settings["run_as_group"] = 10001

    def _refuses(self, verb: str, on: Target) -> str | None:
        named = on.resource.plural if on.sub is None else f"{on.resource.plural}/{on.sub}"
        right = (on.resource.group, named, verb)
        self.asked.add(right)
        if right in self.rights and on.namespace == "ratchet":
            return None
        return no_right(verb, on)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path, granted())
    yield made
    made.server.close()


def planned(launcher: KubernetesLauncher, home: HomePaths, attempt: int) -> LaunchPlan:
    launch = build_launch_file(home, "job-000000000001", attempt, SPEC, RESOLVED, (), token="t", desired=Desired.RUN)
    Path(launch.attempt_dir).mkdir(parents=True)
    return launcher.plan(launch)


def started(guarded: Guarded, plan: LaunchPlan) -> str:
    """The first node's pod, as controller, scheduler and kubelet would have it; its name."""
    (job,) = [found for found in guarded.store.select(JOBS, "ratchet") if found["metadata"]["name"] == plan.ref.name]
    template, name = job["spec"]["template"], f"{plan.ref.name}-0-abcde"
    annotations = {"batch.kubernetes.io/job-completion-index": "0"}
    metadata = {"name": name, "labels": template["metadata"]["labels"], "annotations": annotations}
    spec = template["spec"] | {"nodeName": "node-a"}
    operations.create(
        guarded.store, PODS, "ratchet", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    )
    running = {"name": "agent", "state": {"running": {"startedAt": "2030-01-01T00:00:00Z"}}}

    def run(pod: dict[str, Any]) -> None:
        pod["status"] = {"phase": "Running", "containerStatuses": [running]}

    guarded.store.update(PODS, "ratchet", name, run)
    return name


def gone(guarded: Guarded, ref: AttemptRef, pod: str) -> None:
    guarded.store.remove(PODS, "ratchet", pod)
    guarded.store.remove(JOBS, "ratchet", ref.name)


def test_role_grants_exactly_the_rights_the_launcher_uses(guarded: Guarded, tmp_path: Path) -> None:
    home = HomePaths(tmp_path / "home")
    site = parse_settings(home, guarded.settings)
    launcher = KubernetesLauncher(site, {"SITE_TOKEN": "s3cret"})
    try:
        plan = planned(launcher, home, 1)
        launcher.submit(plan)
        launcher.submit(plan)  # as after a crash: all is there
        pod = started(guarded, plan)
        wait_for(lambda: launcher.poll(plan.ref).alive and launcher.logs(plan.ref, 100), "the pod to be seen")
        assert launcher.logs(plan.ref, 100) == "node 0: the agent's words"
        launcher.stop(plan.ref, 5)
        assert launcher.kill(plan.ref)
        gone(guarded, plan.ref, pod)
        wait_for(lambda: not launcher.kill(plan.ref), "the attempt to be proved dead")
        orphan = planned(launcher, home, 2)
        launcher.submit(orphan)
        pod = started(guarded, orphan)
        wait_for(lambda: launcher.sweep(lambda names: []) == [orphan.ref.name], "the orphan to be swept")
    finally:
        launcher.close()
    assert guarded.asked == guarded.rights


@pytest.mark.parametrize(
    "missing", [("batch", "jobs", "create"), ("", "secrets", "create"), ("", "services", "create")]
)
def test_missing_right_fails_submission_with_lacks_a_right(missing: Right, tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, granted() - {missing})
    try:
        home = HomePaths(tmp_path / "home")
        launcher = KubernetesLauncher(parse_settings(home, guarded.settings), {"SITE_TOKEN": "s3cret"})
        with pytest.raises(LaunchError, match="lacks a permission"):
            launcher.submit(planned(launcher, home, 1))
        launcher.close()
    finally:
        guarded.server.close()


def test_planning_sends_no_request_to_the_cluster(guarded: Guarded, tmp_path: Path) -> None:
    """The API has no account in the cluster: it makes a launcher to check and to plan."""
    home = HomePaths(tmp_path / "home")
    launcher = make(home, guarded.settings)
    plan = planned(launcher, home, 1)
    assert launcher.check(SPEC)[1] == [] and plan.printable()["request"]["manifests"]
    assert guarded.asked == set() and guarded.server.requests == []
