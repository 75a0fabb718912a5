"""What commands print elsewhere than on a terminal: a line per row, numbers that are read at a glance."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_client.cli.shared import output
from tests.support.scripted_server import HOOK, JOB, Reply, ok, serving

MESSAGE = "TypeError: batch\n- Evaluation strategy: epoch\n- Save strategy: steps " + "and so on " * 20


def test_table_row_is_one_line_with_long_cell_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["ID", "WHY"], [["job-1", MESSAGE], ["job-2", "waits"]], cut="WHY")
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == "ID     WHY" and second == "job-2  waits"
    assert (
        first.startswith("job-1  TypeError: batch - Evaluation strategy") and first.endswith("…") and len(first) < 110
    )


def test_table_without_cut_column_keeps_full_text_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["ATTEMPT", "MESSAGE"], [["1", MESSAGE]])
    assert capsys.readouterr().out.splitlines()[1] == "1        " + " ".join(MESSAGE.split())


def test_fields_are_grouped_and_empty_groups_leave_no_gap(capsys: pytest.CaptureFixture[str]) -> None:
    output.fields([("none", None)], [("id", "job-1"), ("owner", "")], [("none", None)], [("last step", 0)])
    assert capsys.readouterr().out.splitlines() == ["id         job-1", "", "last step  0"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (512, "512"), (999, "999"), (1000, "1 k"), (73473660, "73.5 M"), (1990560, "1.99 M"), (999_600, "1 M")],
)
def test_count_is_formatted_with_three_digits_and_unit(number: int, words: str) -> None:
    assert output.count(number) == words


def test_table_headers_and_empty_results_use_standard_terms() -> None:
    """``ratchet queue`` of nobody, and the heads of other tables."""
    checkpoint = {
        "id": "step-000000000007.a0001", "job_id": JOB["id"], "step": 7, "attempt": 1, "state": "committed", "reason": "schedule",
        "size": 9, "created_at": JOB["created_at"], "digest": "d" * 64, "files": 3,
    }  # fmt: skip
    answers = {
        "/v1/queue": {"items": [], "waiting": 0},
        "/v1/hooks": {"items": [HOOK]},
        "/checkpoints": {"items": [checkpoint]},
    }

    def answer(request: BaseHTTPRequestHandler, _: int) -> Reply:
        path = request.path.partition("?")[0]
        return ok(next((body for end, body in answers.items() if path.endswith(end)), JOB))

    def told(*words: str) -> str:
        done = CliRunner().invoke(app, ["--server", server.url, *words])
        assert done.exit_code == 0, done.output
        return done.stdout + done.stderr

    with serving(answer) as server:
        assert told("queue") == "the queue is empty\n"
        assert "  BACKENDS  " in told("hooks")
        head = told("checkpoints", "ls", str(JOB["id"])).splitlines()[0]
    assert "  PAUSE  SAVE TIME  " in head and "  FLAGS  " in head
