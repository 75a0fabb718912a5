"""``ratchet attempts``: what a narrow terminal shows of it, and remarks that several attempts share."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_client.cli.shared import output
from tests.support.scripted_server import JOB, Reply, ok, serving

ID = str(JOB["id"])
OLD, NEW = "a" * 64, "b" * 64
REASON = "the data set's order does not depend on it: set the seed of the sampler"


def attempt(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "job_id": ID, "number": number, "phase": "ENDED", "created_at": JOB["created_at"], "ended_at": JOB["created_at"],
        "outcome": "failed", "cause": "rank-killed", "last_step": 137, "steps_done": 137, "steps_lost": 37,
        "message": "rank 1 was killed by SIGKILL after step 137", **changes,
    }  # fmt: skip


def inexact(number: int) -> dict[str, Any]:
    parts = [{"component": "data", "rank": rank, "status": "not-exact", "reason": REASON} for rank in (0, 1)]
    report = {
        "verdict": "not-exact", "base": {"step": 100}, "world_size": 2, "components": parts,
        "differences": [{"key": "code_digest", "recorded": OLD, "current": NEW}],
    }  # fmt: skip
    redone = {"steps": 7, "compared": 0, "equal": 0, "reason": f"the resume is not exact: data of rank 0: {REASON}"}
    return attempt(number, resume_report=report, redone=redone)


def shown(*attempts: dict[str, Any], events: Sequence[dict[str, Any]] = ()) -> Result:
    def reply(request: BaseHTTPRequestHandler, _: int) -> Reply:
        return ok({"items": list(events) if "/events?" in request.path else list(attempts)[::-1]})

    with serving(reply) as server:
        return CliRunner().invoke(app, ["--server", server.url, "attempts", ID])


def test_attempts_table_on_narrow_terminal_prints_messages_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    done = shown(attempt(1), attempt(2, proof="exact, proved (37 of 37 redone steps)", message="all ranks completed"))
    head = done.stdout.splitlines()[0].split()
    assert head == ["ATTEMPT", "CAUSE", "BASE", "LAST", "DONE", "LOST", "RESUMED", "TIME"], done.output
    assert "attempt 1: rank 1 was killed by SIGKILL after step 137" in done.stderr
    monkeypatch.setenv("COLUMNS", "34")
    narrow = shown(attempt(1))
    assert "BASE" not in narrow.stdout.splitlines()[0] and "BASE" not in narrow.stderr, "not explained where not shown"


def test_attempts_note_shared_by_attempts_and_ranks_is_printed_once() -> None:
    done = shown(attempt(1), inexact(2), inexact(3))
    assert done.exit_code == 0, done.output
    assert (
        done.stderr.count(REASON) == 1
        and f"attempts 2, 3: did not resume exactly: ranks 0, 1: data: not-exact: {REASON}" in done.stderr
    )
    assert "code_digest was 'aaaaaaaaaaaa…', is 'bbbbbbbbbbbb…'" in done.stderr and OLD not in done.stderr
    assert "attempts 2, 3: 0 of 7 redone steps compared\n" in done.stderr


def started(number: int, **data: str) -> dict[str, Any]:
    return {
        "id": number, "job_id": ID, "at": JOB["created_at"], "type": "rank-started", "attempt": number, "message": "m",
        "data": {"rank": 0, **data},
    }  # fmt: skip


def test_attempts_say_how_each_started_and_why_it_was_cold() -> None:
    why = "no agent of this kind is parked yet"
    events = [started(4), started(3, start="parked"), started(2, start="parked"), started(1, start="cold", why=why)]
    done = shown(attempt(1), attempt(2), attempt(3), attempt(4), events=events)
    assert done.exit_code == 0, done.output
    assert f"attempt 1: cold start: {why}\n" in done.stderr and "attempts 2, 3: parked start\n" in done.stderr
    assert "attempt 4" not in done.stderr, "its launcher parks no agents"
