"""The modelled cluster itself: it refuses what a real server was seen to refuse, and leaves no process behind."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.support.kube.api import KubeServer
from tests.support.kube.recorded_histories import Call, history
from tests.support.kube.store import JOBS, Object, Store
from tests.support.server import processes_below, wait_for


def good() -> Object:
    """A Job that the real server took."""
    job = next(entry.body for entry in history("complete") if isinstance(entry, Call))
    made: Object = copy.deepcopy(job)
    return made


def pod(job: Object) -> Object:
    found: Object = job["spec"]["template"]["spec"]
    return found


def rules(job: Object) -> list[Object]:
    found: list[Object] = job["spec"]["podFailurePolicy"]["rules"]
    return found


def limits(job: Object) -> Object:
    found: Object = pod(job)["containers"][0]["resources"]
    return found


def without_policy(job: Object) -> None:
    job["spec"] |= {"completionMode": "NonIndexed", "backoffLimitPerIndex": 1}


FAULTS: dict[str, tuple[Callable[[Object], object], int, str]] = {
    "enum": (lambda j: j["spec"].update(completionMode="indexed"), 422, "spec.completionMode"),
    "restart policy": (lambda j: pod(j).update(restartPolicy="OnFailure"), 422, "restartPolicy"),
    "replacement": (
        lambda j: j["spec"].update(podReplacementPolicy="TerminatingOrFailed"),
        422,
        "podReplacementPolicy",
    ),
    "fail index": (lambda j: rules(j)[0].update(action="FailIndex"), 422, "rules[0].action"),
    "limit per index": (without_policy, 422, "spec.backoffLimitPerIndex"),
    "exit code 0": (lambda j: rules(j)[1]["onExitCodes"].update(values=[0, 143]), 422, "onExitCodes.values[0]"),
    "container": (lambda j: rules(j)[1]["onExitCodes"].update(containerName="wrong"), 422, "containerName"),
    "long name": (lambda j: j["metadata"].update(name="n" * 62), 422, "metadata.name"),
    "GPU request": (lambda j: limits(j).update(requests={"nvidia.com/gpu": "2"}), 422, "resources.requests"),
    "quantity": (lambda j: limits(j)["limits"].update(memory="1 Gi"), 400, "quantities"),
    "subdomain": (lambda j: pod(j).update(subdomain="a_b"), 422, "subdomain"),
    "no containers": (lambda j: pod(j).update(containers=[]), 422, "containers"),
}


def test_fake_cluster_refuses_requests_that_real_server_refuses(tmp_path: Path) -> None:
    server = KubeServer(Store())
    try:
        with config.new_client_from_config(str(server.kubeconfig(tmp_path / "kubeconfig.yaml"))) as api:
            batch = client.BatchV1Api(api)
            for name, (spoil, code, words) in FAULTS.items():
                bad = good()
                spoil(bad)
                with pytest.raises(ApiException) as refused:
                    batch.create_namespaced_job("default", bad)
                assert (refused.value.status, words in refused.value.body) == (code, True), (name, refused.value.body)
            batch.create_namespaced_job("default", good())
            with pytest.raises(ApiException, match="AlreadyExists"):
                batch.create_namespaced_job("default", good())
        assert len(server.store.select(JOBS)) == 1
    finally:
        server.close()


OWNER = """
import sys, time
from pathlib import Path
from tests.support.kube import operations
from tests.support.kube.cluster import Cluster
from tests.support.kube.store import JOBS
folder = Path(sys.argv[1])
with Cluster(folder / "cluster") as cluster:
    container = {"name": "c", "image": "i:1", "command": ["sh", "-c", "setsid sleep 1000 & trap '' TERM; sleep 1000 & wait"]}
    container["env"] = [{"name": "OF", "value": str(folder)}]
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    spec = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "template": template}
    operations.create(cluster.store, JOBS, "default", {"metadata": {"name": "j"}, "spec": spec})
    time.sleep(1000)
"""


def test_no_pod_process_outlives_a_killed_fake_cluster(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=Path(__file__).parents[3])
    try:
        wait_for(lambda: len(processes_below(tmp_path)) >= 7, "two pods with three processes each", 60)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(30)
    wait_for(lambda: not processes_below(tmp_path), "the pods' processes to go", 30)
