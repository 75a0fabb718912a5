"""Jobs whose code lies on their nodes (``code.source: nodes``): real agents and ranks, of one node and of two."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.code import tree
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.attempt_cause import combine_ends
from tests.support.attempts import Attempt
from tests.support.fork_server import RANKS
from tests.support.launch import Job
from tests.support.server import wait_for

SCRIPT = """
import sys
from pathlib import Path
import torch
from ratchet_worker.session import Session

Path(sys.argv[1]).touch()
with Session() as s:
    net = torch.nn.Linear(2, 2)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    s.register(optimizer=optimizer)
    for step in s.steps(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    root.mkdir()
    (root / "train.py").write_text(SCRIPT)
    return root


def spec(code: Path, **more: Any) -> dict[str, Any]:
    script = ["train.py", str(code.parent / "began")]
    return {"task": None, "script": script, "code": {"path": str(code), "source": "nodes"}, **more}


def digest(code: Path) -> str:
    return tree.tree_digest(tree.list_entries(code))


def test_code_changed_on_the_node_makes_resume_not_exact(code: Path, tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, spec(code, world={"ranks_per_node": 1, "device": "cpu"}), code)
    jobs.append(job)
    attempt = job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    before = digest(code)
    (code / "train.py").write_text(f"{SCRIPT}\n")

    attempt = job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    report = attempt.report()
    assert report.verdict == "not-exact"
    assert [(d.key, d.recorded, d.current) for d in report.differences] == [("code_digest", before, digest(code))]


@pytest.fixture
def two_nodes(code: Path, tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path, [{}, {}], nodes=2, spec=spec(code), code_dir=str(code))
    yield made
    made.close()


def test_different_code_on_two_nodes_ends_the_attempt_before_the_script_begins(code: Path, two_nodes: Attempt) -> None:
    def start(node: int) -> None:
        command = [sys.executable, "-P", "-m", "ratchet_worker.agent", str(two_nodes.paths.launch_file)]
        with two_nodes.paths.agent_log.open("ab") as log:
            two_nodes.agents.append(RANKS.start([*command, "--node", str(node)], log.fileno(), env=dict(os.environ)))

    two_nodes.service.start()
    start(0)
    wait_for(lambda: two_nodes.service.addresses.keys() == {0}, "node 0, with its code's digest", 30)
    first = digest(code)
    (code / "train.py").write_text(f"{SCRIPT}\n")
    start(1)
    wait_for(lambda: all(agent.poll() is not None for agent in two_nodes.agents), "both agents to end", 60)
    end = combine_ends([two_nodes.result(node) for node in (0, 1)], 2)
    assert end is not None and end.cause is Cause.USER_ERROR, two_nodes.log()
    assert f"node 0 has {first[:16]}; node 1 has {digest(code)[:16]}" in str(end.message), end
    assert not (code.parent / "began").exists()
