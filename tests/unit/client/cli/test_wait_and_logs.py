"""What ``wait`` and ``logs`` tell, of answers that come one after the other."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from ratchet_client import RatchetClient
from ratchet_client.cli.app import app
from ratchet_client.cli.commands import wait
from tests.support.scripted_server import JOB, Reply, ok, problem, serving

pytestmark = pytest.mark.processes

ID = str(JOB["id"])
ERROR = "user-error: TypeError: unsupported operand type(s) for +=: NoneType and int at plain.py:2"


def test_wait_prints_repeated_error_text_once() -> None:
    looks = [
        {"phase": "QUEUED"},
        {"phase": "RUNNING"},
        {
            "phase": "QUEUED",
            "reason": "backoff",
            "message": f"The last attempt ended with {ERROR}. Tried again in 2 s.",
        },
        {
            "phase": "FAILED",
            "reason": "same-error",
            "message": f"The last attempt ended with {ERROR}, the second in a row.",
        },
    ]
    left = iter(looks)

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        if "attempts" in request.path:
            attempt = {"job_id": ID, "number": 1, "phase": "ENDED", "created_at": JOB["created_at"], "message": ERROR}
            return ok({"items": [attempt]} if request.path.partition("?")[0].endswith("attempts") else attempt)
        if request.path == f"/v1/jobs/{ID}":
            return ok(JOB | next(left, looks[-1]))
        return ok({"job_id": ID, "series": [], "items": []})

    with serving(script) as server:
        done = CliRunner().invoke(app, ["--server", server.url, "wait", ID])
    assert (
        done.exit_code == 1 and [phase for phase in ("QUEUED", "RUNNING", "FAILED") if phase not in done.stderr] == []
    )
    assert (done.stderr.count(ERROR), done.stderr.count("(as above)")) == (1, 1), done.stderr


def test_logs_without_output_or_matches_print_an_explanation() -> None:
    world = {"world": {"nodes": 2, "ranks_per_node": 1}}

    newest = {"attempt": 1}

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        return ok(JOB | newest | {"spec": world} if request.path == f"/v1/jobs/{ID}" else {"items": []})

    with serving(script) as server:

        def told(*options: str) -> str:
            return CliRunner().invoke(app, ["--server", server.url, "logs", ID, *options]).stderr

        assert "it has printed nothing" in told() and "it has printed nothing" in told("--tail", "5")
        assert "no such line" in told("--grep", "loss") and "rank 1 has printed nothing" in told("--rank", "1")
        assert f"--rank 2: {ID} has 2 ranks, from 0 on" in " ".join(told("--rank", "2").replace("│", " ").split())
        assert "--attempt all" not in told()
        newest["attempt"] = 2
        assert "in attempt 2, the newest; --attempt all" in told() and "--attempt all" not in told("--attempt", "all")


def test_delete_reports_deleted_and_kept_checkpoints() -> None:
    answers = [{"id": ID, "checkpoints": "/runs/my jobs/checkpoints"}, {"id": ID}, {"id": ID}]
    left = iter(answers)
    with serving(lambda *_: ok(next(left))) as server:

        def deleted(*options: str) -> str:
            return CliRunner().invoke(app, ["--server", server.url, "delete", ID, *options]).output

        kept, none, gone = deleted("--keep-checkpoints"), deleted("--keep-checkpoints"), deleted()
    assert (
        "ratchet checkpoints verify '/runs/my jobs/checkpoints'; remove them: rm -r '/runs/my jobs/checkpoints'" in kept
    )
    assert none == f"{ID} is deleted, with its logs\nit had no checkpoints\n"
    assert gone == f"{ID} is deleted, with its logs and its checkpoints\n"


def test_wait_on_failed_job_suggests_logs_of_failed_rank() -> None:
    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        if "attempts" in request.path:
            attempt = {"job_id": ID, "number": 1, "phase": "ENDED", "created_at": JOB["created_at"], "rank": 1}
            return ok(attempt if request.path.endswith("/1") else {"items": [attempt]})
        if request.path == f"/v1/jobs/{ID}":
            return ok(JOB | {"phase": "FAILED", "message": "NameError"})
        return ok({"job_id": ID, "series": [], "items": []})

    with serving(script) as server:
        done = CliRunner().invoke(app, ["--server", server.url, "wait", ID])
    assert f"see: ratchet attempts {ID}; ratchet logs {ID} --rank 1\n" in done.stderr


def test_wait_on_resumed_job_skips_events_of_earlier_attempts() -> None:
    types = [("submitted", None), ("launch", 1), ("attempt-ended", 1), ("resume", 1), ("launch", 2), ("resumed", 2)]
    for seen, after in ((types, 4), (types[:3], None), (types[:1], None)):
        events = [
            {"id": i, "job_id": ID, "at": JOB["created_at"], "type": t, "attempt": n, "message": "m"}
            for i, (t, n) in enumerate(seen, 1)
        ]
        job = JOB | {"attempt": max(n or 0 for _, n in seen)}

        def script(
            request: BaseHTTPRequestHandler, _: int, job: dict[str, Any] = job, events: list[dict[str, Any]] = events
        ) -> Reply:
            if request.path == f"/v1/jobs/{ID}":
                return ok(job)
            query = parse_qs(urlsplit(request.path).query)
            assert query["limit"] == ["1"], "a long history is not read"
            return ok({"items": [e for e in events if str(e["attempt"]) == query["attempt"][0]][:1]})

        with serving(script) as server, RatchetClient(server.url) as client:
            assert wait._event_before_newest_attempt(client, ID) == after


def test_wait_prints_note_on_kept_working_directory_files() -> None:
    text = "files in its working directory that the job has changed are not replaced: notes.txt"
    kept = {"id": 7, "job_id": ID, "at": JOB["created_at"], "type": "note.work-kept", "attempt": 2, "message": text}

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        if request.path == f"/v1/jobs/{ID}":
            return ok(JOB | {"phase": "SUCCEEDED", "attempt": 2})
        return ok({"job_id": ID, "series": [], "items": [kept] if "type=note.work-kept" in request.path else []})

    with serving(script) as server:
        assert text in CliRunner().invoke(app, ["--server", server.url, "wait", ID]).stderr


def test_job_commands_print_resulting_job_state() -> None:
    ended = JOB | {"phase": "CANCELLED", "labels": {"team": "vision"}, "priority": 3}
    with serving(lambda *_: ok(ended)) as server:

        def told(*arguments: str) -> str:
            return CliRunner().invoke(app, ["--server", server.url, *arguments]).stdout

        assert told("cancel", ID) == f"{ID} is cancelled; CANCELLED, step 0\n"
        assert told("suspend", ID) == f"{ID} will be suspended; CANCELLED, step 0\n"
        assert told("label", ID, "team=vision").startswith(f"{ID} has priority 3 and labels team=vision;")


def test_dry_run_with_invalid_spec_and_json_option_prints_json(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: n\n")
    wrong = [{"pointer": f"/{key}", "code": "missing", "detail": "this key is required"} for key in ("task", "world")]
    with serving(lambda *_: problem(422, "invalid-spec", errors=wrong)) as server:
        command = ["--server", server.url, "submit", str(spec), "--dry-run"]
        done, plain = CliRunner().invoke(app, [*command, "--json"]), CliRunner().invoke(app, command)
    assert (done.exit_code, plain.exit_code, plain.stdout) == (5, 5, "")
    assert json.loads(done.stdout)["errors"] == wrong and "/world: this key is required" in done.stderr


def test_verification_of_all_checkpoints_skips_those_that_retention_deletes_meanwhile() -> None:
    names = [f"step-00000000000{step}.a0001" for step in (1, 2, 3)]
    one = {
        "job_id": ID, "attempt": 1, "step": 1, "state": "committed", "size": 1, "files": 1, "reason": "interval",
        "digest": "d", "created_at": JOB["created_at"],
    }  # fmt: skip
    gone = {names[0]: (404, "checkpoint-not-found"), names[1]: (409, "checkpoint-gone")}

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        if request.command == "GET":
            return ok({"items": [one | {"id": name} for name in names]})
        name = request.path.split("/")[-2]
        if name in gone:
            return problem(*gone[name])
        return ok({"id": name, "verification": "ok", "bytes_checked": 1, "seconds": 0.1})

    with serving(script) as server:
        command = ["--server", server.url, "checkpoints", "verify", ID]
        done = CliRunner().invoke(app, command)
        gone[names[1]] = 409, "wrong-phase"
        other = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.stdout == f"{names[2]}: ok (1 byte in 0.10 s)\n", done.output
    assert f"{names[0]}: told: checkpoint-not-found\n" in done.stderr
    assert f"{names[1]}: told: checkpoint-gone\n" in done.stderr
    assert other.exit_code == 4 and "told: wrong-phase" in other.stderr
