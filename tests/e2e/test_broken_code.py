"""A job whose code cannot work: how often it is tried, and how often it is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.cli import Cli
from tests.support.interpreters import LIBRARIES
from tests.support.server import Server

AGENTS = LIBRARIES


@pytest.mark.parametrize("watching", ["--wait", "--follow"])
def test_the_same_error_is_tried_twice_and_its_text_is_shown_once(
    server: Server, tmp_path: Path, watching: str
) -> None:
    cli = Cli(server.home, tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "plain.py").write_text('rate = None\nrate += 1  # "unsupported operand"\n')
    spec = {"name": "broken", "script": ["plain.py"], "code": {"path": "code"}, "world": {"device": "cpu", "ranks_per_node": 2},
            "resources": {"cpus_per_rank": 1}, "policy": {"backoff": 2.0}}  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    ended = cli("submit", "job.yaml", watching, expect=1)
    told = ended.text + ended.errors
    assert told.count("unsupported operand type") == 1
    assert "same error at the same line" in told
    job = ended.text.split()[0]
    assert cli("get", job, "--json").data["reason"] == "same-error"
    assert len(cli("attempts", job, "--json").data) == 2
