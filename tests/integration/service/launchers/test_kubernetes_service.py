"""What a job's row, attempts and history say of what Kubernetes does to it, through the whole service.

The cluster is modelled (``tests/support/kube``); what it says and does here was seen on a real one of 1.36.2, or follows the
kubelet's source. No pod trains: those that start wait to be told to end.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.version import PROTOCOL_VERSION
from tests.support.engines import STRANGER
from tests.support.full_matrix import full
from tests.support.kube import operations
from tests.support.kube.cluster import Cluster
from tests.support.server import Server, wait_for

PRESENT, ABSENT = "waits:1", "registry.example.com/none:1"


@dataclass
class Site:
    server: Server
    cluster: Cluster

    def submit(self, launcher: dict[str, Any] | None = None, **more: Any) -> str:
        spec = {
            "name": "n",
            "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask"},
            "world": {"device": "cpu"},
            "image": PRESENT,
            "policy": {"max_failures": 0, "backoff": 0.05, "stop_grace": 1},
            "launcher": {"kind": "kubernetes"} | (launcher or {}),
        }
        return self.server.submit(spec | more)

    def told(self, job_id: str, words: str) -> dict[str, Any]:
        """The job, once ``ratchet get`` shows these words."""

        def look() -> dict[str, Any] | None:
            job = self.server.job(job_id)
            return job if words in (job["message"] or "") else None

        try:
            return wait_for(look, f"{words!r} to be told", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.server.job(job_id)}") from None

    def running(self, job_id: str) -> None:
        """The pods of its first attempt run."""
        name = f"{job_id}-a0001"

        def look() -> bool:
            return {pod["status"]["phase"] for pod in self.cluster.pods(name)} == {"Running"}

        wait_for(look, "its pods to run", 60)

    def failed(self, job_id: str) -> dict[str, Any]:
        """Its only attempt, which has failed the job."""
        self.server.wait_phase(job_id, "FAILED", deadline=60)
        (attempt,) = self.server.attempts(job_id)
        return attempt

    def cancel(self, job_id: str) -> None:
        self.server.call("POST", f"/v1/jobs/{job_id}/cancel")
        self.server.wait_phase(job_id, "CANCELLED", deadline=60)

    def types(self, job_id: str) -> list[str]:
        return [event["type"] for event in self.server.events(job_id)]


@contextmanager
def made(folder: Path) -> Iterator[Site]:
    home = folder / "home"
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\ntrap 'exit 143' TERM\nsleep 600 &\nwait\n")
    python.chmod(0o755)
    server = Server(home, "--launchers", str(folder / "launchers.json"))
    with Cluster(folder / "cluster", claims={"home": home}) as cluster:
        cluster.kubelet.images.first[PRESENT] = python.parent
        cluster.kubelet.images.missing.add(ABSENT)
        settings = {
            "claim": "home",
            "url": "http://127.0.0.1:9",
            "kubeconfig": str(cluster.kubeconfig),
            "fault_patience": 1,
        }
        if os.getuid() == 0:
            settings |= {"run_as_user": STRANGER, "run_as_group": STRANGER}
        (folder / "launchers.json").write_text(json.dumps({"kubernetes": settings}))
        try:
            yield Site(server.start(), cluster)
        finally:
            server.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made(tmp_path_factory.mktemp("service")) as site:
        yield site


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"image": ABSENT}, [ABSENT, "cannot be pulled", "image_pull_secrets"]),
        (
            {"secrets": {"KEY": {"from_secret": {"name": "nope", "key": "k"}}}},
            ["cannot be created", 'secret "nope" not found'],
        ),
        (
            {"volumes": [{"claim": "nope", "mount_path": "/data"}]},
            ["check volumes", 'persistentvolumeclaim "nope" not found'],
        ),
    ],
    ids=["image", "Secret", "claim"],
)
def test_pod_that_can_never_start_fails_the_attempt_with_its_reason(
    site: Site, spec: dict[str, Any], words: list[str]
) -> None:
    """The kubelet then says of the container that it ended with code 137, and that it cannot be located: that is our own kill."""
    attempt = site.failed(site.submit(**spec))
    assert attempt["cause"] == "launcher-error", attempt
    assert all(word in attempt["message"] for word in words), attempt["message"]


@pytest.mark.parametrize(
    "denied",
    [
        "no PriorityClass with name nope was found",
        'error looking up service account default/nope: serviceaccount "nope" not found',
        'violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)',
        "ValidatingAdmissionPolicy 'cost' with binding 'all' denied request: pods need a label team",
    ],
    ids=["PriorityClass", "ServiceAccount", "PodSecurity", "policy"],
)
def test_pods_denied_by_the_cluster_fail_the_attempt_with_the_reason(site: Site, denied: str) -> None:
    """A real API server takes the Job, and refuses its pods to the Job controller, which says so in events and tries again."""
    site.cluster.jobs.denied = denied
    attempt = site.failed(site.submit())
    site.cluster.jobs.denied = None
    assert attempt["cause"] == "launcher-error", attempt
    assert denied in attempt["message"] and "launcher.priority_class" in attempt["message"], attempt["message"]


@pytest.mark.parametrize("grace", [None, pytest.param(0, marks=full)], ids=["deleted", "by force"])
def test_deleted_pod_counts_as_a_preemption_with_cause_evicted(site: Site, grace: int | None) -> None:
    job_id = site.submit()
    site.running(job_id)
    (pod,) = site.cluster.pods(f"{job_id}-a0001")
    operations.delete_pod(site.cluster.store, "default", pod["metadata"]["name"], grace)
    first = wait_for(lambda: a[0] if len(a := site.server.attempts(job_id)) == 2 else None, "a second attempt", 150)
    assert (first["cause"], first["outcome"]) == ("evicted", "preempted"), first
    assert "somebody deleted the pod" in first["message"] and "ratchet cancel" in first["message"]
    site.cancel(job_id)


def test_pods_of_another_protocol_are_stopped_with_cause_upgrade(site: Site) -> None:
    job_id = site.submit()
    site.running(job_id)
    site.server.kill()
    with closing(sqlite3.connect(site.server.paths.database)) as database, database:
        older = "UPDATE attempts SET launch = json_set(launch, '$.launch_file.protocol', ?) WHERE job_id = ?"
        assert database.execute(older, (PROTOCOL_VERSION - 1, job_id)).rowcount == 1
    site.server.start()
    first = wait_for(lambda: a[0] if len(a := site.server.attempts(job_id)) == 2 else None, "a second attempt", 40)
    assert (first["cause"], first["outcome"]) == ("upgrade", "preempted"), first
    assert site.server.job(job_id)["budgets"]["failures"] == 0
    site.cancel(job_id)


def test_requests_refused_by_a_starting_api_server_are_retried(site: Site) -> None:
    """Until it knows the roles a real one answers 403 to everybody, for some seconds."""
    api, before = site.cluster.api, site.cluster.api.count("watch", "jobs")
    with api.starting():
        wait_for(lambda: api.count("watch", "jobs") > before + 1, "the first refusal to be known", 60)
        job_id = site.submit()
        wait_for(lambda: "engine-unreachable" in site.types(job_id), "that to be told", 60)
    site.running(job_id)
    site.cancel(job_id)


@pytest.mark.parametrize("kind", ["jobs", pytest.param("services", marks=full)])
def test_exceeded_object_quota_leaves_the_job_in_engine_queue(site: Site, kind: str) -> None:
    site.cluster.api.full.add(kind)
    job_id = site.submit(world={"device": "cpu", "nodes": 2})
    other = site.submit(world={"device": "cpu", "nodes": 2})
    for waiting in (job_id, other):
        job = site.told(waiting, "exceeded quota: objects, requested: count/")
        assert (job["phase"], job["reason"]) == ("STARTING", "engine-queue")
    assert "engine-unreachable" not in site.types(job_id)
    site.cancel(other)
    site.cluster.api.full.clear()
    site.running(job_id)
    wait_for(lambda: site.server.job(job_id)["reason"] is None, "nothing to be waited for", 60)
    site.cancel(job_id)
    assert len(site.server.attempts(job_id)) == 1


@full
def test_unreachable_api_server_is_shown_as_reason_until_available_again(site: Site) -> None:
    job_id = site.submit()
    site.running(job_id)
    with site.cluster.api.unreachable():
        other = site.submit()
        for untold in (job_id, other):
            job = site.told(untold, "Kubernetes does not answer at http://127.0.0.1")
            assert (job["phase"], job["reason"]) == ("STARTING", "engine-unreachable")
        site.server.call("POST", f"/v1/jobs/{job_id}/suspend")
        assert site.told(job_id, "Kubernetes does not answer")["phase"] == "STOPPING"
    site.server.wait_phase(job_id, "SUSPENDED", deadline=60)
    site.running(other)
    wait_for(lambda: site.server.job(other)["reason"] is None, "nothing to be waited for", 60)
    site.cancel(other)
    assert site.types(other).count("engine-unreachable") == 1
