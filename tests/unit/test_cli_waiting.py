"""What ``wait`` and ``logs`` tell, of answers that come one after the other."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

from typer.testing import CliRunner

from ratchet_client.cli.app import app
from tests.support.scripted import JOB, Reply, ok, serving

ID = str(JOB["id"])
ERROR = "user-error: TypeError: unsupported operand type(s) for +=: NoneType and int at plain.py:2"


def test_the_text_of_an_error_is_printed_once_by_wait() -> None:
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
            return ok({"items": [attempt]})
        if request.path == f"/v1/jobs/{ID}":
            return ok(JOB | next(left, looks[-1]))
        return ok({"job_id": ID, "series": [], "items": []})

    with serving(script) as server:
        done = CliRunner().invoke(app, ["--server", server.url, "wait", ID])
    assert (
        done.exit_code == 1 and [phase for phase in ("QUEUED", "RUNNING", "FAILED") if phase not in done.stderr] == []
    )
    assert (done.stderr.count(ERROR), done.stderr.count("(as above)")) == (1, 1), done.stderr


def test_a_job_that_printed_nothing_is_told_so_and_a_filter_that_nothing_fits_too() -> None:
    world = {"world": {"nodes": 2, "ranks_per_node": 1}}

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        return ok(JOB | {"spec": world} if request.path == f"/v1/jobs/{ID}" else {"items": []})

    with serving(script) as server:

        def told(*options: str) -> str:
            return CliRunner().invoke(app, ["--server", server.url, "logs", ID, *options]).stderr

        assert "it has printed nothing" in told() and "it has printed nothing" in told("--tail", "5")
        assert "no such line" in told("--grep", "loss") and "no such line" in told("--rank", "1")
        assert f"--rank 2: {ID} has 2 ranks, from 0 on" in " ".join(told("--rank", "2").replace("│", " ").split())
        assert "--attempt all" in told() and "--attempt all" not in told("--attempt", "all")


def test_a_deletion_tells_what_there_was_and_what_can_be_done_with_what_is_kept() -> None:
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
