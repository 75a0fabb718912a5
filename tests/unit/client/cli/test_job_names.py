"""JOB by name where several jobs have it: the one that goes on, and for commands that only read the newest."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from tests.support.scripted_server import JOB, Reply, Server, ok, problem, serving

pytestmark = pytest.mark.processes

NEWEST, MIDDLE, OLDEST = "job-000000000003", "job-000000000002", "job-000000000001"


def jobs(*phases: str) -> list[dict[str, Any]]:
    """Three of one name, newest first."""
    return [JOB | {"id": i, "name": "train", "phase": p} for i, p in zip((NEWEST, MIDDLE, OLDEST), phases, strict=True)]


def run(found: list[dict[str, Any]], *arguments: str, spec: Path | None = None) -> tuple[Result, Server]:
    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        url = urlsplit(request.path)
        if request.command == "POST" and url.path == "/v1/jobs":
            return ok(found[0])
        if url.path == "/v1/jobs":
            return ok(
                {"items": [job for job in found if job["name"] in parse_qs(url.query).get("name", [job["name"]])]}
            )
        for job in found:
            if url.path in (f"/v1/jobs/{job['id']}", f"/v1/jobs/{job['id']}/cancel"):
                return ok(job)
            if url.path.startswith(f"/v1/jobs/{job['id']}/") and request.command == "GET":
                return ok({"items": [], "series": [], "job_id": job["id"]})
        return problem(404, "not-here")

    with serving(script) as server:
        return CliRunner().invoke(app, ["--server", server.url, *arguments]), server


def acted_on(server: Server) -> set[str]:
    paths = [urlsplit(path).path.split("/") for _, path, _ in server.requests]
    return {parts[3] for parts in paths if len(parts) > 3}


@pytest.mark.parametrize("phase", ["QUEUED", "RUNNING", "SUSPENDED"])
def test_job_name_resolves_to_only_job_not_ended(phase: str) -> None:
    found = jobs("FAILED", phase, "SUCCEEDED")
    for command in (["get", "train", "--json"], ["cancel", "train", "--json"], ["events", "train"]):
        done, server = run(found, *command)
        assert (done.exit_code, acted_on(server)) == (0, {MIDDLE}), done.output


READING = ["get --json", "attempts", "logs", "events", "metrics", "files", "checkpoints ls"]


@pytest.mark.parametrize("command", READING)
def test_read_command_with_only_ended_jobs_uses_newest_and_notes_so(command: str) -> None:
    name, *options = command.split()
    done, server = run(jobs("FAILED", "CANCELLED", "SUCCEEDED"), name, *options[:1], "train", *options[1:])
    if options == ["--json"]:
        done, server = run(jobs("FAILED", "CANCELLED", "SUCCEEDED"), name, "train", *options)
    assert (done.exit_code, acted_on(server)) == (0, {NEWEST}), done.output
    assert f"3 jobs have the name train; this is the newest, {NEWEST}" in done.stderr


@pytest.mark.parametrize("command", ["cancel", "resume", "fork", "label -p", "delete", "wait", "checkpoint", "cp"])
def test_write_command_with_several_ended_jobs_of_name_is_refused(command: str) -> None:
    arguments = {"label -p": ["label", "train", "--priority", "1"], "cp": ["cp", "train:", "out"]}
    done, server = run(jobs("FAILED", "CANCELLED", "SUCCEEDED"), *arguments.get(command, [command.split()[0], "train"]))
    assert done.exit_code == 2 and acted_on(server) == set()
    assert all(job in done.stderr for job in (NEWEST, MIDDLE, OLDEST))


def test_several_active_jobs_with_same_name_are_ambiguous() -> None:
    for command in ("get", "cancel"):
        done, server = run(jobs("RUNNING", "SUSPENDED", "SUCCEEDED"), command, "train")
        assert done.exit_code == 2 and acted_on(server) == set() and MIDDLE in done.stderr


def test_submit_with_name_in_use_prints_a_warning(tmp_path: Path) -> None:
    spec = tmp_path / "train.yaml"
    spec.write_text("name: train\ntask: {entrypoint: 'a:B'}\n")
    done, _ = run(jobs("QUEUED", "FAILED", "SUCCEEDED"), "submit", str(spec))
    assert done.exit_code == 0 and done.stdout == f"{NEWEST}\n"
    assert f"{MIDDLE} (FAILED) has the name train, too: refer to this job by its id" in done.stderr
    done, _ = run(jobs("QUEUED", "FAILED", "SUCCEEDED")[:1], "submit", str(spec))
    assert done.exit_code == 0 and "has the name" not in done.stderr
