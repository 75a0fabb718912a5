"""The client against a scripted HTTP server on a real socket: retries, idempotency keys, moved services, broken streams."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_client.http import transport
from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Transport
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.api.requests import PatchRequest
from ratchet_contract.code import tree
from ratchet_contract.code.archive import write_archive
from ratchet_contract.errors import Conflict, NotFound, Refused, SpecError
from tests.support.scripted_server import HOOK, JOB, Reply, ok, problem, serving


def test_post_is_retried_with_same_idempotency_key() -> None:
    replies = [problem(503, "starting"), (0, "", b""), problem(409, "idempotency-in-progress")]
    done = ok({"id": "c", "verification": "ok", "bytes_checked": 1, "seconds": 0.1})
    with serving(lambda _, n: [*replies, done][n - 1]) as server, RatchetClient(server.url) as client:
        assert client.verify("job-000000000001", "c").verification == "ok"
    keys = {headers["Idempotency-Key"] for _, _, headers in server.requests}
    assert len(server.requests) == 4 and len(keys) == 1


def test_patch_with_lost_response_is_retried() -> None:
    with serving(lambda _, n: (0, "", b"") if n == 1 else ok(JOB)) as server, RatchetClient(server.url) as client:
        assert client.patch("job-000000000001", PatchRequest(priority=1)).id == "job-000000000001"
        assert [method for method, _, _ in server.requests] == ["PATCH", "PATCH"]


@pytest.mark.parametrize("reply", [(0, "", b""), problem(503, "busy")])
def test_delete_that_may_have_arrived_is_not_retried(reply: Reply) -> None:
    with serving(lambda *_: reply) as server, RatchetClient(server.url) as client:
        with pytest.raises((ServiceUnreachable, ServiceFault)):
            client.delete("job-000000000001")
        assert len(server.requests) == 1


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_bytes(b"#" * 3_000_000)
    return tmp_path / "mine"


def test_code_upload_with_lost_response_is_retried_from_start(project: Path) -> None:
    replies = [problem(404, "code-not-found"), (0, "", b""), problem(503, "busy"), (201, "text/plain", b""), ok(JOB)]
    with serving(lambda _, n: replies[n - 1]) as server, RatchetClient(server.url) as client:
        client.submit({"name": "n", "script": ["train.py"], "code": {"path": str(project)}}, upload=True)
    found = tree.list_entries(project)
    assert [method for method, _, _ in server.requests] == ["GET", "PUT", "PUT", "PUT", "POST"]
    assert {path for _, path, _ in server.requests[:4]} == {f"/v1/code/{tree.tree_digest(found)}"}
    assert server.bodies[1:4] == [b"".join(write_archive(found))] * 3
    assert json.loads(server.bodies[4])["code"] == {"path": str(project), "digest": tree.tree_digest(found)}


def test_code_changed_during_upload_is_refused(project: Path) -> None:
    def script(request: BaseHTTPRequestHandler, number: int) -> Reply:
        (project / "train.py").write_bytes(b"#" * 4_000_000)
        return problem(404, "code-not-found")

    with serving(script) as server, RatchetClient(server.url) as client, pytest.raises(SpecError) as caught:
        client.submit({"name": "n", "script": ["train.py"], "code": {"path": str(project)}}, upload=True)
    assert [(e.pointer, e.code) for e in caught.value.errors] == [("/code/path", "unreadable")]
    assert "has changed" in caught.value.detail


def test_problem_responses_become_exceptions_with_code_and_field_errors() -> None:
    fields = [{"pointer": "/hook/name", "code": "unknown-hook", "detail": "no hook is named 'x'"}]
    replies = [
        problem(422, "invalid-spec", errors=fields), problem(404, "job-not-found"), problem(409, "wrong-phase"),
        problem(500, "internal-error"), (200 + 300, "text/html", b"<html>"),
    ]  # fmt: skip
    with serving(lambda _, n: replies[n - 1]) as server, RatchetClient(server.url) as client:
        with pytest.raises(SpecError) as caught:
            client.submit({})
        assert caught.value.errors[0].pointer == "/hook/name"
        with pytest.raises(NotFound, match="told: job-not-found"):
            client.job("job-000000000001")
        with pytest.raises(Conflict) as conflict:
            client.preempt("job-000000000001")
        assert conflict.value.code == "wrong-phase"
        for _ in range(2):
            with pytest.raises(ServiceFault):
                client.job("job-000000000001")


def test_service_that_was_never_started_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waited"))
    monkeypatch.setattr(transport, "time", clock)
    with RatchetClient(home=tmp_path, retry_for=20) as client, pytest.raises(ServiceUnreachable, match="ratchet serve"):
        client.hooks()


def test_client_finds_service_restarted_on_another_port(tmp_path: Path) -> None:
    def announce(url: str) -> None:
        text = json.dumps({"protocol": 1, "url": url, "pid": 1, "started_at": "2026-01-01T00:00:00Z"})
        (tmp_path / "service.json").write_text(text)

    with RatchetClient(home=tmp_path, retry_for=20) as client:
        with serving(lambda *_: ok({"items": [HOOK]})) as first:
            announce(first.url)
            assert [h.name for h in client.hooks()] == ["allreduce"]
        with serving(lambda *_: ok({"items": [HOOK, HOOK]})) as second:
            timer = threading.Timer(0.3, announce, [second.url])  # while the client is already trying
            timer.start()
            assert len(client.hooks()) == 2
            timer.join()
        with serving(lambda *_: (204, "", b"")) as third:
            timer = threading.Timer(0.3, announce, [third.url])
            timer.start()
            client.delete_quota("ada")  # without a connection it cannot have arrived
            assert len(third.requests) == 1
            timer.join()


def test_service_killed_during_response_is_reported_unreachable(tmp_path: Path) -> None:
    with serving(lambda _, n: ok({"items": []}) if n == 1 else (0, "", b"")) as server:
        for home, url in ((tmp_path, None), (None, server.url)):
            server.requests.clear()
            if home is not None:
                text = json.dumps({"protocol": 1, "url": server.url, "pid": 1, "started_at": "2026-01-01T00:00:00Z"})
                (home / "service.json").write_text(text)
            with RatchetClient(url, home, retry_for=0) as client:
                assert client.hooks() == []
                with pytest.raises(ServiceUnreachable, match="ratchet serve") as caught:
                    client.hooks()
                assert "speak HTTP" not in caught.value.detail


@pytest.mark.parametrize("server", ["http://*ü.x", "http://a..b", "http://xn--"])
def test_server_address_with_impossible_host_name_is_refused(server: str) -> None:
    transport = Transport(server, None, timeout=1.0, retry_for=0.0)
    with pytest.raises(Refused, match=r"server address .* is not valid"):
        transport.request("GET", "/v1/jobs")
    with pytest.raises(Refused, match=r"server address .* is not valid"), transport.stream("/v1/jobs", None, {}):
        pass


def test_paginated_list_is_read_to_last_page() -> None:
    def script(handler: BaseHTTPRequestHandler, n: int) -> Reply:
        return ok({"items": [HOOK], "next_cursor": None if "cursor=two" in handler.path else "two"})

    with serving(script) as server, RatchetClient(server.url) as client:
        assert len(client.hooks()) == 2


def test_broken_event_stream_resumes_from_last_event_id() -> None:
    def block(number: int) -> str:
        data = {"id": f"1.0.{number}", "attempt": 1, "rank": 0, "text": f"line {number}"}
        return f"id: 1.0.{number}\nevent: log\ndata: {json.dumps(data)}\n\n"

    parts = [": hello\n\n" + block(1) + block(2) + "id: 1.0.3\ndata: {cut", block(3) + "event: end\ndata: {}\n\n"]

    def script(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        if handler.path == "/v1/jobs/job-000000000001":
            return ok(JOB)
        return 200, "text/event-stream", parts.pop(0).encode()

    with serving(script) as server, RatchetClient(server.url) as client:
        assert [entry.text for entry in client.follow_logs("job-000000000001")] == ["line 1", "line 2", "line 3"]
    streams = [headers.get("Last-Event-ID") for _, path, headers in server.requests if "/logs" in path]
    assert streams == [None, "1.0.2"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_followed_log_text_keeps_characters_at_which_python_splits_lines(end: str) -> None:
    """They stand unescaped in the service's JSON."""
    text = "a\u2028b\u2029c\x85d"
    data = json.dumps({"id": "1.0.9", "attempt": 1, "rank": 0, "text": text}, ensure_ascii=False)
    body = end.join(["id: 1.0.9", "event: log", f"data: {data}", "", "event: end", "data: {}", "", ""]).encode()
    with serving(lambda *_: (200, "text/event-stream", body)) as server, RatchetClient(server.url) as client:
        assert [entry.text for entry in client.follow_logs("job-000000000001")] == [text]


def test_event_stream_in_single_bytes_with_comments_and_several_data_lines_has_each_event_once() -> None:
    def event(number: int, *data: str) -> list[str]:
        return [f"id: {number}", "event: log", *(f"data: {line}" for line in data), ""]

    lines = [": hello", "", *event(1, '{"id": "1.0.1", "attempt": 1, "rank": 0,', '"text": "é one"}'), ": alive", ""]
    lines += ["retry: 500", "", *event(2, '{"id": "1.0.2", "attempt": 1, "rank": 0, "text": "two"}'), ": alive", ""]
    body = "\r\n".join([*lines, "event: end", "data: {}", "", ""]).encode()

    def script(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for byte in body:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
        handler.close_connection = True
        return 0, "", b""

    with serving(script) as server, RatchetClient(server.url) as client:
        assert [entry.text for entry in client.follow_logs("job-000000000001")] == ["é one", "two"]
