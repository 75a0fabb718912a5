"""A job whose code cannot work: how often it is tried, and how often it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.cli import Cli
from tests.support.fork_server import LIBRARIES
from tests.support.server import Server

AGENTS = LIBRARIES


@pytest.mark.parametrize("watching", ["--wait", "--follow"])
def test_same_error_is_tried_twice_and_printed_once(server: Server, tmp_path: Path, watching: str) -> None:
    cli = Cli(server.home, tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "plain.py").write_text('rate = None\nrate += 1  # "unsupported operand"\n')
    spec = {"name": "broken", "script": ["plain.py"], "code": {"path": "code"}, "world": {"device": "cpu", "ranks_per_node": 2},
            "resources": {"cpus_per_rank": 1}, "policy": {"backoff": 2.0}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    ended = cli("submit", "job.yaml", watching, expect=1)
    told = ended.text + ended.errors
    assert told.count("unsupported operand type") == 1, told
    assert "same error at the same line" in told
    job = ended.text.split()[0]
    assert cli("get", job, "--json").data["reason"] == "same-error"
    assert len(cli("attempts", job, "--json").data) == 2
    log = [line.strip() for line in cli("logs", job, "--rank", "0").text.splitlines()]
    after = log[[n for n, line in enumerate(log) if "Traceback (most recent call last)" in line][-1] + 1]
    assert "plain.py" in after, "the first frame is the script's own"


def test_error_after_first_backward_counts_as_before_first_step(server: Server, tmp_path: Path) -> None:
    """Of rank 0 alone, as in what only it logs: the other one may have finished that step."""
    cli = Cli(server.home, tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(
        "import torch\nfrom ratchet_worker.session import Session\n"
        "with Session() as s:\n"
        "    model = s.wrap(torch.nn.Linear(2, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    s.register(optimizer=optimizer)\n"
        "    for step in s.steps(8):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        if s.rank == 0:\n"
        "            print({}['loss'])\n"
    )
    spec = {"name": "broken", "script": ["train.py"], "code": {"path": "code"}, "world": {"device": "cpu", "ranks_per_node": 2},
            "resources": {"cpus_per_rank": 1}, "policy": {"backoff": 0.05}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    job = cli("submit", "job.yaml", "--wait", expect=1).text.split()[0]
    told = cli("get", job, "--json").data
    assert (
        told["reason"] == "same-error"
        and f"`ratchet resume {job}`" in told["message"]
        and "--code DIR" in told["message"]
    )
    assert len(cli("attempts", job, "--json").data) == 2
