"""The containers' files against the code: every command line is one that the programs take."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet_contract.paths import HomePaths
from ratchet_service.launchers.table import load
from tests.support.deployment import options_of

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
    options = options_of(commands()[name], monkeypatch)
    if options.command == "serve":  # without torch: who trains is the other container
        assert options.no_reconciler and options.insecure_http and options.port == 8000


def test_what_is_built_and_copied_is_there() -> None:
    for part in COMPOSE.values():
        if "build" in part:
            assert ROOT / part["build"]["dockerfile"] in DOCKERFILES
    for path in DOCKERFILES:
        for line in path.read_text().splitlines():
            if line.startswith("COPY "):
                assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_all_packages_installs_extras_that_exist_and_runs_as_one_user_of_all(path: Path) -> None:
    text = path.read_text()
    packages = {folder.parent.name for folder in ROOT.glob("[a-z]*/ratchet_*/")}
    assert packages <= set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    (extras,) = re.findall(r'pip install --no-cache-dir "\.\[([\w,]+)\]"', text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"service", "postgres", "kubernetes"} <= set(extras.split(",")) <= set(known)
    assert "USER 10001:10001" in text and "--gid 10001" in text and "--uid 10001" in text


def test_the_build_arguments_that_compose_gives_are_those_that_the_files_take() -> None:
    for part in COMPOSE.values():
        build = part.get("build", {})
        text = (ROOT / build["dockerfile"]).read_text() if build else ""
        assert set(build.get("args", {})) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))


def test_api_and_trainer_read_the_same_launchers_file_which_names_what_trains_there(tmp_path: Path) -> None:
    for name in ("api", "trainer"):
        where = COMPOSE[name]["environment"]["RATCHET_LAUNCHERS"]
        (mounted,) = [v for v in COMPOSE[name]["volumes"] if v.split(":")[1] == where]
        source, _, mode = mounted.split(":")
        assert mode == "ro"
        assert list(load(HomePaths(tmp_path), ROOT / source)) == ["local"]


def test_the_port_is_published_on_loopback_only_and_no_password_is_written_down() -> None:
    assert COMPOSE["api"]["ports"] == ["127.0.0.1:8000:8000"]
    assert all("ports" not in part for name, part in COMPOSE.items() if name != "api")
    assert COMPOSE["database"]["environment"]["POSTGRES_PASSWORD"].startswith("${RATCHET_DB_PASSWORD:?")


def test_the_unit_of_a_login_node_starts_a_service_with_the_launchers_that_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ROOT / "deploy" / "slurm"
    (command,) = re.findall(r"^ExecStart=\S+/ratchet (.*)$", (folder / "ratchet.service").read_text(), re.MULTILINE)
    options = options_of(command.replace("%h", str(tmp_path)).replace("%H", "login").split(), monkeypatch)
    assert options.url == f"https://login:{options.port}" and options.code_root == [str(tmp_path)]
    assert options.tls_cert and options.tls_key and options.ca_file and not options.insecure_http
    assert options.launchers == tmp_path / "ratchet" / "launchers.yaml"
    assert list(load(HomePaths(tmp_path), folder / "launchers.yaml")) == ["local", "slurm"]
