"""The containers' files against the code: every command line is one that the programs take."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_service import __main__ as service

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))


def commands() -> dict[str, list[str]]:
    found = {name: part["command"] for name, part in COMPOSE.items() if "build" in part}
    for path in DOCKERFILES:
        match = re.search(r"^CMD (\[.*\])$", path.read_text(), re.MULTILINE)
        assert match is not None, path
        found[path.name] = json.loads(match[1])
    return found


@pytest.mark.parametrize("name", commands())
def test_each_command_is_taken_by_the_command_line_and_by_the_service(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, argv, _env: became.append(argv))
    result = CliRunner().invoke(app, commands()[name])
    assert result.exit_code == 0, result.output
    (argv,) = became
    options = service._parser().parse_args(argv[argv.index("ratchet_service") + 1 :])
    assert options.command == commands()[name][0]
    if options.command == "serve":  # without torch: who trains is the other container
        assert options.no_reconciler and options.allow_remote and options.port == 8000


def test_what_is_built_and_copied_is_there() -> None:
    for part in COMPOSE.values():
        if "build" in part:
            assert ROOT / part["build"]["dockerfile"] in DOCKERFILES
    for path in DOCKERFILES:
        for line in path.read_text().splitlines():
            if line.startswith("COPY "):
                assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


def test_the_port_is_published_on_loopback_only_and_no_password_is_written_down() -> None:
    assert COMPOSE["api"]["ports"] == ["127.0.0.1:8000:8000"]
    assert all("ports" not in part for name, part in COMPOSE.items() if name != "api")
    assert COMPOSE["database"]["environment"]["POSTGRES_PASSWORD"].startswith("${RATCHET_DB_PASSWORD:?")
