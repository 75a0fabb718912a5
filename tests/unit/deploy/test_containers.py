"""The containers' files against the code: every command line is one that the programs take."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from sqlalchemy.engine import make_url

from deploy import constraints
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.policy import PolicySpec
from ratchet_contract.version import RATCHET_VERSION
from ratchet_service import __main__ as service
from ratchet_service.commands.serve import uses_agent_host
from ratchet_service.db.engine import PING_SECONDS
from ratchet_service.launchers.registry import load
from tests.support.container_commands import options_of

ROOT = Path(__file__).parents[3]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
COMPOSE: dict[str, Any] = FILE["services"]
BUILT = [name for name, part in COMPOSE.items() if "build" in part]
OURS = [name for name, part in COMPOSE.items() if part["image"].startswith("ratchet-")]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXACT_TAG = re.compile(r"[\w./-]+:\d+\.\d+(\.\d+)?-[\w-]+")
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))


def commands() -> dict[str, list[str]]:
    found = {name: COMPOSE[name]["command"] for name in OURS}
    for path in DOCKERFILES:
        match = re.search(r"^CMD (\[.*\])$", path.read_text(), re.MULTILINE)
        assert match is not None, path
        found[path.name] = json.loads(match[1])
    return found


@pytest.mark.parametrize("name", commands())
def test_compose_commands_are_accepted_by_parsers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(commands()[name], monkeypatch)
    if options.command == "serve":  # without torch: who trains is the other container
        assert options.no_reconciler and options.insecure_http and options.port == 8000


def lines_of(path: Path) -> list[str]:
    """The instructions of a Dockerfile, one a line."""
    text = re.sub(r"\\\n\s*", "", path.read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_dockerfiles_and_copied_sources_exist() -> None:
    for name in BUILT:
        assert ROOT / COMPOSE[name]["build"]["dockerfile"] in DOCKERFILES
    for path in DOCKERFILES:
        for line in lines_of(path):
            if line.startswith("COPY ") and "--from" not in line:
                assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_all_packages_and_runs_as_one_user_of_all(path: Path) -> None:
    lines = lines_of(path)
    packages = {folder.parent.name for folder in ROOT.glob("[a-z]*/ratchet_*/")}
    assert {f"COPY {name} {name}" for name in packages} <= set(lines)
    ports = [line.split()[1] for line in lines if line.startswith("EXPOSE ")]
    assert ports == (["8000"] if path.suffix == ".service" else [])
    assert "USER 10001:10001" in lines and any("--gid 10001" in line and "--uid 10001" in line for line in lines)
    assert f'org.opencontainers.image.version="{RATCHET_VERSION}"' in path.read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_installs_dependencies_before_source_layers(path: Path) -> None:
    """In the last stage, all that takes packages from an index comes before what Ratchet is, and within the constraints."""
    lines = lines_of(path)
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    own = next(i for i, line in enumerate(last) if "from=wheel" in line)
    installs = [(i, line) for i, line in enumerate(last) if "pip install" in line]
    for i, line in installs:
        assert (i < own and "-c constraints.txt" in line) or (i >= own and "--no-deps" in line), line
    copied = [line for line in last[:own] if line.startswith("COPY ")]
    assert {source for line in copied for source in line.split()[1:-1]} <= {
        "pyproject.toml",
        "deploy/requirements.py",
        "deploy/constraints.txt",
    }


def test_image_bases_are_pinned_to_exact_version() -> None:
    for path in DOCKERFILES:
        (base,) = {line.partition("=")[2] for line in lines_of(path) if line.startswith("ARG PYTHON=")}
        assert EXACT_TAG.fullmatch(base), base
        assert {line.split()[1] for line in lines_of(path) if line.startswith("FROM ")} == {"${PYTHON}"}
    assert EXACT_TAG.fullmatch(COMPOSE["database"]["image"])
    assert all(COMPOSE[name]["image"].endswith(f":{RATCHET_VERSION}") for name in OURS)


def test_constraints_pin_every_image_package_to_allowed_version() -> None:
    text = (ROOT / "deploy" / "constraints.txt").read_text()
    assert "--hash" not in text and "://" not in text and "@" not in text
    pins = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[name] = Version(version)
    wanted = [*constraints.requirements(), constraints.BUILD]
    for line in wanted:
        requirement = Requirement(line)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, line
    assert set(constraints.closure(wanted, constraints.OF_TORCH)) <= set(pins), (
        "python deploy/constraints.py > deploy/constraints.txt"
    )
    extras = {
        extra
        for path in DOCKERFILES
        for extra in re.findall(r"^ARG EXTRAS=(\S+)", path.read_text(), re.M)[0].split(",")
    }
    given = {extra for name in BUILT for extra in COMPOSE[name]["build"]["args"]["EXTRAS"].split(",")}
    assert given <= extras <= set(constraints.EXTRAS)


def test_image_requirements_match_project_extras() -> None:
    command = [sys.executable, str(ROOT / "deploy" / "requirements.py"), "service,postgres"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    optional = PROJECT["optional-dependencies"]
    assert told[:-1] == [*PROJECT["dependencies"], *optional["service"], *optional["postgres"]]


def durations(text: str) -> int:
    """Seconds of ``5m`` or ``15s``."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def test_compose_services_restart_and_have_health_checks() -> None:
    for name, part in COMPOSE.items():
        assert part["restart"] == "unless-stopped", name
        check = part["healthcheck"]
        seconds = {key: durations(check[key]) for key in ("start_period", "start_interval", "interval", "timeout")}
        # a first start migrates a large database; a part that is not well is known within a minute, at little cost
        assert seconds["start_period"] >= 120 and seconds["start_interval"] <= 2, name
        assert seconds["interval"] >= 10 and (seconds["interval"] + seconds["timeout"]) * check["retries"] <= 100, name
        # else Docker's daemon may have other limits, or none
        assert part["logging"] == {"driver": "local", "options": {"max-size": "20m", "max-file": "5"}}, name
        assert part["pids_limit"] > 0, name
        assert part["mem_limit"], name  # nobody takes the others' memory
    database = COMPOSE["database"]["healthcheck"]["test"]
    assert "pg_isready" in database and "127.0.0.1" in database, "on its socket a server answers that goes again"


def test_containers_drop_capabilities_and_are_read_only() -> None:
    for name in OURS:
        part = COMPOSE[name]
        assert part["cap_drop"] == ["ALL"] and part["read_only"] is True, name
        assert "no-new-privileges:true" in part["security_opt"], name
    assert FILE["name"] == "ratchet", "else another clone's directory is another project, with empty volumes"


SERVICE_COMMAND = re.compile(
    r"python3? -m ratchet_service ((?:token|backup|restore|serve|reconcile|agent-host)\b[^#`)\n]*)"
)
PAGES = [ROOT / "README.md", ROOT / "docker-compose.yml", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")]


def test_documented_service_commands_are_accepted_by_parser() -> None:
    shown = [(path, line) for path in PAGES for line in SERVICE_COMMAND.findall(path.read_text())]
    assert {path.name for path, _ in shown} >= {"docker-compose.yml", "containers.md", "security.md", "backup.md"}
    for path, line in shown:
        assert "$" not in line, f"{path}: {line}: a user's name may be empty, or hold what an owner's may not"
        try:
            service._parser().parse_args(shlex.split(line))
        except SystemExit:
            pytest.fail(f"{path}: {line}")


def test_pages_do_not_export_result_of_command_that_may_fail() -> None:
    """``export NAME=$(false)`` succeeds."""
    for path in PAGES:
        assert not re.search(r"export \w+=\$\(", path.read_text()), path


def test_extra_compose_files_override_only_existing_services() -> None:
    for path in (ROOT / "deploy" / "compose").glob("*.yaml"):
        parts = yaml.safe_load(path.read_text()).get("services", {})
        assert set(parts) <= set(COMPOSE), path


def test_compose_readiness_timeout_exceeds_database_ping_timeout() -> None:
    for name in OURS:
        test = " ".join(COMPOSE[name]["healthcheck"]["test"])
        if "/readyz" in test:
            (within,) = re.findall(r"timeout=(\d+)", test)
            assert 2 * PING_SECONDS < int(within) < int(COMPOSE[name]["healthcheck"]["timeout"].removesuffix("s")), name


def test_compose_build_arguments_are_declared_in_dockerfiles() -> None:
    for part in COMPOSE.values():
        build = part.get("build", {})
        text = (ROOT / build["dockerfile"]).read_text() if build else ""
        assert set(build.get("args", {})) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))


def test_compose_api_and_reconciler_mount_same_launchers_file(
    tmp_path: Path,
) -> None:
    for name in ("api", "reconciler"):
        where = COMPOSE[name]["environment"]["RATCHET_LAUNCHERS"]
        (mounted,) = [v for v in COMPOSE[name]["volumes"] if v.split(":")[1] == where]
        source, _, mode = mounted.split(":")
        assert mode == "ro"
        launchers = load(HomePaths(tmp_path), ROOT / source)
        assert list(launchers) == ["local"] and uses_agent_host(launchers)


def test_compose_agents_container_has_no_database_access() -> None:
    agents, database = COMPOSE["agents"], COMPOSE["database"]
    assert set(agents["environment"]) == {"RATCHET_HOME"} and "env_file" not in agents
    assert set(agents["networks"]).isdisjoint(database["networks"]), "it would reach the server"
    assert all("pid" not in part for part in COMPOSE.values()), "it would see their processes"
    assert agents["command"][0] == "agent-host" and agents["volumes"] == ["ratchet:/var/lib/ratchet"]


def test_compose_agents_stop_grace_period_covers_job_stop_grace() -> None:
    minutes = int(COMPOSE["agents"]["stop_grace_period"].removesuffix("m"))
    assert 60 * minutes >= PolicySpec().stop_grace + 20
    assert "depends_on" not in COMPOSE["agents"], "it would be restarted with that"


def test_compose_publishes_port_on_loopback_and_contains_no_password() -> None:
    assert COMPOSE["api"]["ports"] == ["127.0.0.1:${RATCHET_PORT:-8000}:8000"]
    assert all("ports" not in part for name, part in COMPOSE.items() if name != "api")
    password = COMPOSE["database"]["environment"]["POSTGRES_PASSWORD"]
    assert password.startswith("${RATCHET_DB_PASSWORD:?")
    for part in COMPOSE.values():  # beside the URL, where no character of it means anything
        if "RATCHET_DATABASE_URL" in part["environment"]:
            assert part["environment"]["PGPASSWORD"] == password
            assert make_url(part["environment"]["RATCHET_DATABASE_URL"]).password is None


def test_env_file_is_ignored_by_git_and_docker() -> None:
    variables = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    example = (ROOT / ".env.example").read_text()
    assert all(f"{name}=" in example for name in variables)
    assert all(".env" in (ROOT / name).read_text().splitlines() for name in (".gitignore", ".dockerignore"))


def test_slurm_systemd_unit_starts_service_with_sample_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ROOT / "deploy" / "slurm"
    (command,) = re.findall(r"^ExecStart=\S+/ratchet (.*)$", (folder / "ratchet.service").read_text(), re.MULTILINE)
    options = options_of(command.replace("%h", str(tmp_path)).replace("%H", "login").split(), monkeypatch)
    assert options.url == f"https://login:{options.port}" and options.code_root == [tmp_path]
    assert options.tls_cert and options.tls_key and options.ca_file and not options.insecure_http
    assert options.launchers == tmp_path / "ratchet" / "launchers.yaml"
    assert list(load(HomePaths(tmp_path), folder / "launchers.yaml")) == ["local", "slurm"]
