"""A job of two nodes on Kubernetes, through the real service, ends with the bits of a local run though a pod is evicted in its
middle. The cluster is modelled (``tests/support/kube``), since none can run here: its API is real HTTP, its pods are processes
that see only what their volumes show, as the user that their manifest names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_store.read.compare import Comparison, compare, render
from tests.e2e.exactness import final_checkpoint, run_undisturbed
from tests.support import file_writing_task
from tests.support.engine_services import on_kubernetes
from tests.support.exact_cells import ON_ENGINES, Cell
from tests.support.kube.cluster import Cluster
from tests.support.server import Server

SPEC = Cell(ON_ENGINES, "many", 2, "digits").spec("pods")
TOPOLOGY = {"/facts/nodes", "/facts/ranks_per_node"}

pytestmark = pytest.mark.slow


@dataclass
class Run:
    """What became of the disturbed job, and what was asked of the API server for it."""

    attempts: list[dict[str, Any]]
    comparison: Comparison
    plan: dict[str, Any]
    lists: int
    watches: int
    pods_left: int
    notes: dict[str, str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("kubernetes")
    (folder / "code").mkdir()
    file_writing_task.write_task(folder / "code")
    task = {**SPEC["task"], "entrypoint": file_writing_task.ENTRYPOINT}
    spec = {**SPEC, "task": task, "code": {"path": str(folder / "code")}}
    with on_kubernetes(folder) as (server, cluster):
        yield disturbed(server, cluster, spec, run_undisturbed(server, spec))


def disturbed(server: Server, cluster: Cluster, spec: dict[str, Any], reference: Path) -> Run:
    world = {**spec["world"], "nodes": 2, "ranks_per_node": 1}
    spec = {**spec, "world": world, "launcher": {"kind": "kubernetes"}}
    plan = server.call("POST", "/v1/jobs?dry_run=true", json=spec, expect=200).json()
    job_id = server.submit(spec)
    server.wait_step(job_id, 12)
    cluster.evict(cluster.pods(f"{job_id}-a0001")[1])
    server.wait_phase(job_id, "SUCCEEDED", deadline=180)
    comparison = compare(reference, final_checkpoint(server, job_id))
    running = [pod for pod in cluster.pods() if pod["status"]["phase"] == "Running"]
    api = cluster.api
    asked = api.count("list"), api.count("watch")
    return Run(
        server.attempts(job_id),
        comparison,
        plan,
        *asked,
        len(running),
        file_writing_task.fetch_note_files(server, job_id),
    )


def test_kubernetes_run_has_same_bits_as_local_run(run: Run) -> None:
    assert run.comparison.tensors and not run.comparison.different, render(run.comparison)
    assert {state.pointer for state in run.comparison.states} == TOPOLOGY  # nothing else of what a rank remembers


def test_evicted_pod_is_the_cause_and_loses_no_step(run: Run) -> None:
    evicted, last = run.attempts
    assert (evicted["cause"], evicted["outcome"], evicted["steps_lost"]) == ("evicted", "preempted", 0), run.attempts
    assert "node 1" in evicted["message"] or "-1-" in evicted["message"], evicted["message"]
    assert (last["cause"], last["resume_report"]["verdict"]) == ("completed", "exact")
    assert run.pods_left == 0


def test_files_of_all_pods_are_collected(run: Run) -> None:
    assert run.notes == {"rank-0.txt": "0", "rank-1.txt": "1"}


def test_dry_run_plan_has_kubernetes_manifests(run: Run) -> None:
    kinds = [manifest["kind"] for manifest in run.plan["launch"]["request"]["manifests"]]
    assert "Job" in kinds and "Service" in kinds


def test_api_server_is_watched_and_not_polled(run: Run) -> None:
    """A list and a watch of each of three kinds; two more lists to prove that each attempt is dead, twice at most."""
    assert run.lists <= 3 + 2 * 2 * len(run.attempts), run.lists
    assert run.watches <= 3, run.watches
