"""What the client's user leans on: lazy iterators that close what they opened, polling across outages, specs from anywhere."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.http.errors import NOT_A_SERVICE, DeadlineReached, ServiceFault, ServiceUnreachable
from ratchet_client.resources.client import RatchetClient
from ratchet_client.resources.spec_file import spec_body
from ratchet_contract.errors import NotFound, SpecError
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec.parse import parse_spec
from tests.support.scripted_server import JOB, Reply, ok, problem, serving

VIEW = {"job_id": "job-000000000001", "name": "allreduce", "wrapper": None, "parameters": {}, "stateful": False}
POINT = {"attempt": 1, "at": "2026-01-01T00:00:00Z"}
SERIES = [{"name": "loss", "points": [{"step": s, "value": 1.0 / s, **POINT} for s in (1, 2)]}]


class Script:
    """A job that goes through ``phases``, one per look; ``None`` is a connection that breaks, a tuple a reply of its own."""

    def __init__(self, *phases: str | Reply | None) -> None:
        self.left = list(phases)

    def __call__(self, handler: BaseHTTPRequestHandler, _: int) -> Reply:
        path = handler.path.partition("?")[0]
        if path.endswith("/hook"):
            return ok(VIEW)
        if path.endswith("/metrics"):
            return ok({"job_id": "job-000000000001", "series": SERIES})
        phase = self.left[0] if len(self.left) == 1 else self.left.pop(0)
        if isinstance(phase, tuple):
            return phase
        return (0, "", b"") if phase is None else ok({**JOB, "phase": phase})


def test_poll_survives_outage_and_stops_at_job_end() -> None:
    script = Script("QUEUED", "RUNNING", None, None, None, "RUNNING", "SUCCEEDED")
    with serving(script) as server, RatchetClient(server.url, retry_for=0.0) as client:
        seen = list(client.poll("job-000000000001", every=0.01))
    assert [now.job.phase for now in seen] == ["QUEUED", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert seen[-1].metrics == {"loss": 0.5} and seen[-1].hook.name == "allreduce"
    with pytest.raises(TypeError):
        seen[-1].metrics["loss"] = 0.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        seen[-1].job = seen[0].job  # type: ignore[misc]


PROXY = 502, "text/html", b"<html>Bad Gateway</html>"
"""As a proxy answers while the service behind it restarts."""


@pytest.mark.parametrize("outage", [PROXY, problem(503, "database-unavailable"), problem(500, "internal-error")])
def test_poll_wait_and_followed_events_survive_server_errors(outage: Reply) -> None:
    with (
        serving(Script("RUNNING", outage, outage, "SUCCEEDED")) as server,
        RatchetClient(server.url, retry_for=0.0) as c,
    ):
        assert [now.job.phase for now in c.poll("job-000000000001", every=0.01)] == ["RUNNING", "SUCCEEDED"]
    with (
        serving(Script("RUNNING", outage, outage, "SUCCEEDED")) as server,
        RatchetClient(server.url, retry_for=0.0) as c,
    ):
        assert c.wait("job-000000000001", deadline=20).phase == "SUCCEEDED"
    replies = [outage, outage, (200, "text/event-stream", b"event: end\ndata: {}\n\n")]
    with serving(lambda _, n: replies[n - 1]) as server, RatchetClient(server.url) as c:
        assert list(c.follow_events("job-000000000001")) == [] and len(server.requests) == 3


def test_wait_reports_a_lasting_server_error_and_another_program_at_once() -> None:
    with serving(Script("RUNNING", PROXY)) as server, RatchetClient(server.url, retry_for=0.0) as client:
        with pytest.raises(ServiceFault, match="answers 502: a proxy there gets no response from the service"):
            client.wait("job-000000000001")
        with pytest.raises(DeadlineReached, match="answers 502"):
            client.wait("job-000000000001", deadline=0.2)
    foreign = Script("RUNNING", (404, "text/html", b""))
    with serving(foreign) as server, RatchetClient(server.url) as client, pytest.raises(ServiceFault) as caught:
        client.wait("job-000000000001", deadline=20)
    assert caught.value.code == NOT_A_SERVICE


def test_poll_stops_at_requested_phase_or_deadline() -> None:
    with serving(Script("QUEUED", "RUNNING")) as server, RatchetClient(server.url) as client:
        assert [now.job.phase for now in client.poll("job-000000000001", every=0.01, until=[JobPhase.RUNNING])] == [
            "QUEUED",
            "RUNNING",
        ]
        with pytest.raises(DeadlineReached, match=r"job job-000000000001 was not at its end.*RUNNING"):
            list(client.poll("job-000000000001", every=0.01, deadline=0.05))


def test_poll_looks_last_at_a_deadline_that_comes_before_the_next_interval() -> None:
    seen, begin = [], time.monotonic()
    with (
        serving(Script("QUEUED", "RUNNING")) as server,
        RatchetClient(server.url) as client,
        pytest.raises(DeadlineReached, match=r"after 3 s: it is RUNNING"),
    ):
        for now in client.poll("job-000000000001", every=60, deadline=3):
            seen.append(now.job.phase)
    assert seen == ["QUEUED", "RUNNING"] and time.monotonic() - begin >= 3


def test_wait_without_deadline_raises_when_service_stays_unreachable() -> None:
    with serving(Script("RUNNING", None)) as server, RatchetClient(server.url, retry_for=0.0) as client:
        with pytest.raises(ServiceUnreachable):
            client.wait("job-000000000001")
        with pytest.raises(DeadlineReached, match="no answer"):
            client.wait("job-000000000001", deadline=0.2)


def test_series_returns_step_and_value_lists_per_metric() -> None:
    with serving(Script("RUNNING")) as server, RatchetClient(server.url) as client:
        assert client.series("job-000000000001", "loss") == {"loss": ([1, 2], [1.0, 0.5])}
        assert "max_points=10000" in server.requests[0][1] and "name=loss" in server.requests[0][1]


def test_summaries_search_and_ranges_of_steps_are_requested() -> None:
    def script(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        return ok({"job_id": "a", "series": []} if "/metrics" in handler.path else {"items": [], "next_cursor": None})

    with serving(script) as server, RatchetClient(server.url) as client:
        assert list(client.jobs(search="dig", include=["summary"])) == []
        client.metrics("job-000000000001", from_step=3, to_step=9)
        assert list(client.hook_history("job-000000000001", max_points=5, from_step=3, to_step=9)) == []
    jobs, metrics, history = (request[1] for request in server.requests)
    assert "search=dig&include=summary" in jobs and metrics.endswith("from_step=3&to_step=9")
    assert "max_points=5&from_step=3&to_step=9" in history


def test_job_pages_are_requested_lazily() -> None:
    def script(handler: BaseHTTPRequestHandler, n: int) -> Reply:
        return ok({"items": [{**JOB, "id": f"j{n}.{i}"} for i in range(2)], "next_cursor": str(n)})

    with serving(script) as server, RatchetClient(server.url) as client:
        jobs = client.jobs()
        assert not server.requests
        assert [next(jobs).id, next(jobs).id] == ["j1.0", "j1.1"] and len(server.requests) == 1
        assert next(jobs).id == "j2.0" and len(server.requests) == 2


def test_closing_event_iterator_closes_connection() -> None:
    gone = threading.Event()

    def script(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        data = json.dumps(
            {"id": 1, "job_id": "job-000000000001", "at": "2026-01-01T00:00:00Z", "type": "submitted", "message": "m"}
        )
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(f"id: 1\ndata: {data}\n\n".encode())
        handler.wfile.flush()
        assert handler.rfile.read(1) == b""  # until the client hangs up
        gone.set()
        return 0, "", b""

    with serving(script) as server, RatchetClient(server.url) as client:
        events = client.follow_events("job-000000000001")
        assert not server.requests
        assert next(events).type == "submitted"
        events.close()
        assert gone.wait(20), "the connection is still open"


def test_broken_log_download_is_restarted_and_leaves_no_partial_file(tmp_path: Path) -> None:
    def script(handler: BaseHTTPRequestHandler, n: int) -> Reply:
        if n > 1:
            return 200, "text/plain", b"[1.0] one\n[1.0] two\n"
        handler.send_response(200)
        handler.send_header("Content-Length", "20")
        handler.end_headers()
        handler.wfile.write(b"[1.0] o")
        return 0, "", b""

    with serving(script) as server, RatchetClient(server.url) as client:
        file = client.download_logs("job-000000000001", tmp_path / "job.log")
        assert file.read_text() == "[1.0] one\n[1.0] two\n" and "attempt=all" in server.requests[0][1]
        assert [path.name for path in tmp_path.iterdir()] == ["job.log"]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_downloaded_log_has_the_permissions_of_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        with serving(lambda *_: (200, "text/plain", b"secret\n")) as server, RatchetClient(server.url) as client:
            file = client.download_logs("job-000000000001", tmp_path / "job.log")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_service_with_database_unavailable_is_not_ready() -> None:
    with (
        serving(lambda *_: problem(503, "database-unavailable")) as server,
        RatchetClient(server.url, retry_for=0.0) as client,
    ):
        assert not client.ready()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "here" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path


def test_spec_relative_path_resolves_from_spec_file_or_cwd(project: Path) -> None:
    data: dict[str, Any] = {
        "name": "n",
        "script": ["train.py"],
        "code": {"path": "mine"},
        "python": "./venv/bin/python",
    }
    (project / "spec.yaml").write_text(json.dumps(data))
    from_file = spec_body(project / "spec.yaml")
    assert from_file["code"]["path"] == str(project / "mine")
    assert spec_body("../spec.yaml")["code"] == from_file["code"]
    assert from_file["python"] == str(project / "venv/bin/python")
    here = str(project / "here" / "mine")
    assert spec_body(data)["code"]["path"] == here and data["code"]["path"] == "mine"
    assert spec_body(parse_spec(data))["code"]["path"] == here
    assert spec_body({**data, "code": {"path": Path("mine")}})["code"]["path"] == here


def test_missing_or_non_json_spec_is_refused_before_request(project: Path) -> None:
    with pytest.raises(NotFound, match=r"cannot read missing\.yaml"):
        spec_body("missing.yaml")
    with pytest.raises(SpecError, match="JSON cannot represent"):
        spec_body({"name": "n", "labels": {"at": object()}})
