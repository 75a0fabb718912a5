"""``ratchet prove`` on two nodes of a real Slurm and of a modelled Kubernetes: the fault plan acts wherever the ranks run.

``RATCHET_TEST_PROVE=all`` runs it (``make exactness``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli
from tests.support.docs import ROOT
from tests.support.engine_services import on_kubernetes, on_slurm
from tests.support.server import Server
from tests.support.slurm import missing_reason

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("RATCHET_TEST_PROVE") != "all",
        reason="RATCHET_TEST_PROVE=all (make exactness) runs it",
    ),
]


Service = Callable[[Path], AbstractContextManager[tuple[Server, Any]]]
ENGINES: dict[str, Service] = {
    "slurm": on_slurm,
    "kubernetes": on_kubernetes,
}


@pytest.mark.parametrize("kind", ENGINES)
def test_prove_of_two_node_job_succeeds_on_engine(tmp_path: Path, kind: str) -> None:
    if kind == "slurm" and (reason := missing_reason()) is not None:
        pytest.skip(reason)
    (tmp_path / "spec.json").write_text(json.dumps(spec(kind)))
    with ENGINES[kind](tmp_path) as (server, _):
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
