"""``ratchet prove`` on two nodes of a real Slurm and of a modelled Kubernetes: the fault plan acts wherever the ranks run.

``RATCHET_TEST_PROVE=all`` runs it (``make exactness``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli
from tests.support.docs import ROOT
from tests.support.engines import STRANGER
from tests.support.kube.cluster import Cluster
from tests.support.relay import Relay
from tests.support.server import Server
from tests.support.slurm import missing, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("RATCHET_TEST_PROVE") != "all", reason="RATCHET_TEST_PROVE=all runs it"),
]


@contextmanager
def on_slurm(folder: Path) -> Iterator[Server]:
    server = Server(folder / "home", "--launchers", str(folder / "launchers.json"))
    (folder / "launchers.json").write_text(json.dumps({"slurm": {"poll_seconds": 0.3, "file_seconds": 2}}))
    with slurm_cluster(node_timeout=30) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        try:
            yield server.start()
        finally:
            server.stop()


@contextmanager
def on_kubernetes(folder: Path) -> Iterator[Server]:
    home = folder / "home"
    server = Server(home, "--launchers", str(folder / "launchers.json"))
    with Relay(lambda: server.url) as relay, Cluster(folder / "cluster", claims={"home": home}) as cluster:
        settings = {"claim": "home", "url": relay.url, "kubeconfig": str(cluster.kubeconfig), "image": "worker:1"}
        if os.getuid() == 0:
            settings |= {"run_as_user": STRANGER, "run_as_group": STRANGER}
        (folder / "launchers.json").write_text(json.dumps({"kubernetes": settings}))
        try:
            yield server.start()
        finally:
            server.stop()


ENGINES = {"slurm": on_slurm, "kubernetes": on_kubernetes}


@pytest.mark.parametrize("kind", ENGINES)
def test_a_job_of_two_nodes_is_proved(tmp_path: Path, kind: str) -> None:
    if kind == "slurm" and (reason := missing()) is not None:
        pytest.skip(reason)
    (tmp_path / "spec.json").write_text(json.dumps(spec(kind)))
    with ENGINES[kind](tmp_path) as server:
        proof = Cli(server.home, tmp_path)("prove", str(tmp_path / "spec.json"), "--json", deadline=400).data
    assert (proof["verdict"], proof["comparison"]["identical"]) == ("proved", True), proof
    assert [text.split(" after")[0] for text in proof["interruptions"]] == [
        "rank 1 killed", "rank 0 killed in the evaluation", "the agent of rank 1 killed", "preempted",
    ]  # fmt: skip
    assert proof["redone"] >= 6


def spec(kind: str) -> dict[str, Any]:
    return {
        "name": "proved",
        "code": {"path": str(ROOT / "tests" / "support" / "prove_job")},
        "script": ["train.py"],
        "world": {"nodes": 2, "ranks_per_node": 1, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "launcher": {"kind": kind},
        "hook": {
            "name": "powerSGD",
            "matrix_approximation_rank": 1,
            "start_powerSGD_iter": 3,
            "min_compression_rate": 1,
        },
    }
