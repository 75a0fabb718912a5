"""A report of a job that has very much of everything: bounded, with the newest parts, and it says what is not in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ratchet_client.http.transport import Transport
from ratchet_client.resources.job_report import _end_of, write_report
from tests.support.reports import recorded_text

ATTEMPTS, CHECKPOINTS, EVENTS, FILES, SERIES, RANKS = 300, 2000, 20_000, 10_000, 500, 32
TEXT = "x" * 1000
POINT = {"step": 123456, "attempt": 1, "value": 0.123456789, "at": "2026-01-01T00:00:00.123456Z"}


class Huge:
    """Answers as a service would for this job."""

    target = SimpleNamespace(url=lambda: "http://host")

    def request(self, method: str, path: str, *, params: dict[str, Any] | None = None) -> Any:
        assert method == "GET"
        if path == "/web/report.html":
            return SimpleNamespace(text='<script type="application/json" id="recorded"></script>')
        return SimpleNamespace(json=lambda: self._body(path.removeprefix("/v1/jobs/j").strip("/"), params or {}))

    def _body(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        part, _, name = path.partition("/")
        if part == "healthz":
            return {"version": "1"}
        if part == "metrics":
            series = [{"name": str(n), "total": 10_000, "points": [POINT] * asked["max_points"]} for n in range(SERIES)]
            return {"series": series}
        if part == "trackers":
            return {"items": [{"run": f"j-{n}", "error": TEXT} for n in range(3000)], "next_cursor": None}
        if part == "hook" and not name:
            return {"ranks": [{}] * RANKS}
        if part in ("attempts", "checkpoints") and name:
            return {"environment": {"packages": [TEXT] * 5}, "manifest": {"tensors": [TEXT] * 300}}
        if not part:  # read before the newest attempt began
            return {"id": "j", "attempt": ATTEMPTS - 1, "work_dir": "/w"}
        begin, limit = int(asked.get("cursor") or 0), int(asked["limit"])
        items = [item for n, item in enumerate(self._items(path, asked)) if begin <= n <= begin + limit]
        return {"items": items[:limit], "next_cursor": str(begin + limit) if len(items) > limit else None}

    def _items(self, path: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if path == "attempts":
            return ({"number": n, "environment": None, "report": TEXT * 60} for n in range(ATTEMPTS, 0, -1))
        if path == "checkpoints":
            state = asked.get("state", "committed")
            return (
                {"id": str(n), "step": n, "attempt": 1, "state": state, "x": TEXT * 2}
                for n in range(CHECKPOINTS, 0, -1)
            )
        if path == "events":
            assert asked["sort"] == "-id"
            return ({"id": n, "message": TEXT} for n in reversed(range(EVENTS)))
        if path == "files":
            return ({"path": f"{n}{TEXT}"} for n in range(FILES))
        if path == "hook/history":
            return ({"summary": {"step": n // RANKS, "x": TEXT}} for n in range(asked["max_points"] * RANKS))
        return (
            {
                "id": f"1.{rank}.{1001 * (n + 1)}",
                "attempt": asked["attempt"],
                "rank": rank,
                "text": TEXT,
                "left_out": None,
            }
            for rank in range(RANKS)
            for n in range(100 - asked["tail"], 100)
        )


def test_report_of_a_huge_job_is_bounded_and_has_its_newest_parts(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    left_out = write_report(cast(Transport, Huge()), "/v1/jobs/j", file, log_bytes=8000, force=False)
    found = json.loads(recorded_text(file))
    assert 20 << 20 < file.stat().st_size < 40 << 20 and left_out == found["left_out"]
    attempts = found["attempts"]
    assert [one["number"] for one in attempts[:3]] == [300, 299, 298] and 100 < len(attempts) < ATTEMPTS
    assert ["environment" in one for one in attempts] == [n < 50 for n in range(len(attempts))]
    stored = [one for one in found["checkpoints"] if one["state"] == "committed"]
    assert stored[0]["step"] == CHECKPOINTS and [one for one in stored if "manifest" in one] == stored[:13]
    assert found["events"][-1]["id"] == EVENTS - 1 and found["events"][0]["id"] > 0
    assert {len(one["points"]) for one in found["metrics"]} == {120} and len(found["metrics"]) == SERIES
    assert found["log_attempts"][-1] == ATTEMPTS and 1 < len(found["log_attempts"]) < ATTEMPTS
    assert len(found["logs"]) == len(found["log_attempts"]) * RANKS * 8 and found["logs"][0]["left_out"] == 93 * 1001
    assert f"the logs of all attempts before attempt {found['log_attempts'][0]}" in left_out
    for what in ("attempts", "checkpoints", "metrics", "hook", "trackers", "events", "files", "logs"):
        assert any(what in text for text in left_out), (what, left_out)


def test_report_of_a_huge_job_is_bounded_also_if_its_text_needs_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.client.resources.test_job_report.TEXT", "<" * 1000)
    file = tmp_path / "report.html"
    write_report(cast(Transport, Huge()), "/v1/jobs/j", file, log_bytes=1000, force=False)
    assert 20 << 20 < file.stat().st_size < 40 << 20


def line(end: int, left_out: int | None = None) -> dict[str, Any]:
    """A line of nine characters, or a gap, that ends at the byte ``end`` of its log."""
    return {"id": f"1.0.{end}", "attempt": 1, "rank": 0, "text": "x" * 9, "left_out": left_out}


@pytest.mark.parametrize("grown", [0, 3])
def test_beginning_of_a_log_is_counted_also_if_the_log_grew_while_it_was_read(grown: int) -> None:
    lines = [line(10 * n) for n in range(101, 111 + grown)]
    kept = _end_of(lines, 10, 1000)
    assert kept[0]["left_out"] == 1010 and kept[1:] == lines[1:]


def test_bytes_before_a_gap_of_the_log_are_counted_as_left_out() -> None:
    """The service gives no line before a gap."""
    lines = [line(5000, left_out=4000), line(5010), line(5020)]
    kept = _end_of(lines, 10, 1000)
    assert kept[0]["left_out"] == 5000 and kept[1:] == lines[1:]
