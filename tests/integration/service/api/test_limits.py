"""What a caller may have of the service: slow bodies and heads, long texts, paths and stores that are nobody's to name."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
import uvicorn
from obstore.store import S3Store

from ratchet_contract.errors import SpecError
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.api import request_body
from ratchet_service.api import server as service_server
from ratchet_service.api.rate_limit import Buckets
from ratchet_service.api.server import MAX_HEADERS, HeadDeadline
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db.models import Attempt
from ratchet_service.db.sanitize import MAX_TEXT
from ratchet_service.launchers.registry import load
from ratchet_service.observability.health import Health
from ratchet_service.preflight.paths import Roots
from ratchet_service.preflight.report import Report
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
from tests.support.api import Api, FakeSubmission, Server, spec
from tests.support.server import wait_for


class Hasty(HeadDeadline):
    head_seconds = rest_seconds = 0.3


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server as ``serve`` configures it, with short deadlines; host and port."""
    monkeypatch.setattr(request_body, "PART_SECONDS", 0.3)
    server = Server(create_app(Settings(home=tmp_path), FakeSubmission()))
    config = server._server.config
    server._server.config = uvicorn.Config(
        config.app, "127.0.0.1", 0, log_level="critical", timeout_graceful_shutdown=1, ws="none", http=Hasty,
        h11_max_incomplete_event_size=MAX_HEADERS,
    )  # fmt: skip
    with server as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


def exchange(address: tuple[str, int], *parts: bytes) -> bytes:
    """Everything that comes back until the server ends the connection, which it must do by itself."""
    with socket.create_connection(address, timeout=20) as connection:
        found = b""
        for i, part in enumerate(parts):
            if i:
                found += connection.recv(65536)  # the answer to the part before
            connection.sendall(part)
        try:
            while data := connection.recv(65536):
                found += data
        except ConnectionResetError:
            pass
        return found


def test_connection_with_slow_or_too_large_request_head_is_closed(limited: tuple[str, int]) -> None:
    assert exchange(limited) == b""
    assert exchange(limited, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ") == b""
    whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert exchange(limited, whole, b"GET /healthz HT").startswith(b"HTTP/1.1 200")  # and then it waits no longer
    assert exchange(limited, whole[:-2] + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_too_large_head_is_answered_with_a_problem_that_arrives(limited: tuple[str, int]) -> None:
    url = f"http://{limited[0]}:{limited[1]}/healthz"
    for _ in range(5):
        answer = httpx.get(url, headers={"X-Large": "x" * 32 * MAX_HEADERS})
        assert answer.headers["content-type"] == "application/problem+json"
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed-head")
    assert b'"code":"malformed-head"' in exchange(limited, b"GET /\x00 HTTP/1.1\r\nHost: a b\r\n\r\n")


def test_request_with_a_stalled_body_answers_408(limited: tuple[str, int]) -> None:
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    answer = exchange(limited, head + b"{")
    assert answer.startswith(b"HTTP/1.1 408") and b"body-too-slow" in answer


def test_client_disconnect_during_the_body_counts_as_499_without_error_log(
    limited: tuple[str, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "PART_SECONDS", 60.0)  # who leaves is not to be taken for who is slow
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    asked = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    counted = b'ratchet_http_requests_total{method="POST",route="/v1/jobs",status="499"}'

    def left() -> bool:
        """Again where a busy machine made the head late: such a connection is ended before it is a request."""
        with socket.create_connection(limited, timeout=20) as connection:
            connection.sendall(head + b"{")
        return counted in exchange(limited, asked)

    wait_for(left, "a request to be counted", 60)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_body_still_sent_after_the_answer_ends_the_connection(limited: tuple[str, int]) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: "
    with socket.create_connection(limited, timeout=20) as connection:
        connection.sendall(head + b"1000000\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        end = time.monotonic() + 10
        with pytest.raises(OSError):  # reset, or a broken pipe
            while time.monotonic() < end:
                connection.sendall(b" ")
                time.sleep(0.05)
    with socket.create_connection(limited, timeout=20) as connection:  # one that comes whole leaves it open
        connection.sendall(head + b"2\r\n\r\n{")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        connection.sendall(b"}")
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(1.5 * Hasty.rest_seconds)


def test_connections_above_three_quarters_of_the_descriptor_limit_are_answered_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(home=tmp_path), FakeSubmission())
    shutdown = service_server.Shutdown(Health(), 0.0, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (100, 100))
        config = service_server.Server(app, HomePaths(tmp_path), "", None, shutdown).config
    server = Server(app)
    config.port, server._server.config = 0, config
    with server as url, ExitStack() as held:
        host, _, port = url.removeprefix("http://").rpartition(":")
        for _ in range(73):
            held.enter_context(socket.create_connection((host, int(port))))
        assert httpx.get(f"{url}/healthz").status_code == 200
        held.enter_context(socket.create_connection((host, int(port))))
        refused = httpx.get(f"{url}/healthz")
    assert refused.status_code == 503
    assert refused.headers["content-type"].startswith("text/plain"), "docs/api.md says so of this error alone"


def test_rate_limit_buckets_refill_and_their_number_is_bounded() -> None:
    buckets = Buckets(2.0, 2)
    for now in (0.0, 0.0, 0.5, 1.0):
        buckets.take("a", now)
    with pytest.raises(Exception, match="2 requests per second") as refused:
        buckets.take("a", 1.1)
    assert 0.3 < getattr(refused.value, "extra")["retry_after"] < 0.5  # noqa: B009
    for i in range(30_000):
        buckets.take(str(i), 2.0)
    assert len(buckets._levels) == 10_000


def test_long_message_of_an_attempt_result_is_cut(api: Api) -> None:
    job_id = api.submit()
    api.attempt(job_id)
    result: dict[str, Any] = {"job_id": job_id, "attempt": 1, "cause": "exception", "message": "x" * 1_000_000, "last_step": 1,
                              "started_at": "2030-01-01T00:00:00Z", "ended_at": "2030-01-01T00:00:01Z", "ranks": []}  # fmt: skip
    assert api.report(job_id, phase="ENDED", result=result).status_code == 200
    with api.database.read() as session:
        stored = session.get_one(Attempt, (job_id, 1)).results["0"]["message"]
    assert len(stored) == MAX_TEXT and stored.endswith("(cut)")


# --- what a spec may name ------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("home", "allowed", "elsewhere")}
    for path in found.values():
        (path / "project").mkdir(parents=True)
        (path / "project" / "model.safetensors").touch()
    (found["allowed"] / "out").symlink_to(found["elsewhere"])
    (found["elsewhere"] / "in").symlink_to(found["allowed"])
    return found


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("allowed/project", True),
        ("allowed", True),
        ("elsewhere/in/project", True),
        ("allowed/../allowed/project", True),
        ("elsewhere/project", False),
        ("allowed/out/project", False),
        ("allowed/../elsewhere", False),
        ("allowedly", False),
        ("home/project", False),
        (".", False),
    ],
)
def test_paths_of_a_spec_must_resolve_below_an_allowed_root(places: dict[str, Path], path: str, allowed: bool) -> None:
    text = f"{places['home'].parent}/{path}"
    roots = Roots(places["home"], (places["allowed"],), ())
    volume = {"mount_path": "/data", "host_path": text}
    more: dict[str, Any] = {
        "code": {"path": text},
        "start_from": {"path": f"{text}/model.safetensors"},
        "volumes": [volume],
    }
    report = Report()
    roots.check(parse_spec(spec(**more)), report)
    pointers = [] if allowed else ["/code/path", "/start_from/path", "/volumes/0/host_path"]
    assert [p.pointer for p in report.problems] == pointers
    assert {p.code for p in report.problems} <= {"path-not-allowed"}


def test_run_directory_is_refused_as_code_unless_a_root_lies_within(places: dict[str, Path]) -> None:
    def problems(root: Path, path: Path) -> list[str]:
        report = Report()
        Roots(places["home"], (root,), ()).check(parse_spec(spec(code={"path": str(path)})), report)
        return [p.code for p in report.problems]

    around, home = places["home"].parent, places["home"]
    assert problems(around, places["elsewhere"]) == []
    assert (
        problems(around, around) == problems(around, home) == problems(home, home / "project") == ["path-not-allowed"]
    )
    assert problems(home / "project", home / "project") == []


@pytest.mark.parametrize(
    ("uri", "allowed"),
    [("s3://team/jobs", True), ("s3://team/jobs/a", True), ("s3://team/jobs-of-others", False), ("s3://team", False),
     ("gs://team/jobs", False)],
)  # fmt: skip
def test_checkpoint_uri_is_matched_to_allowed_prefixes_by_whole_parts(uri: str, allowed: bool) -> None:
    report = Report()
    Roots(Path("/h"), None, ("s3://team/jobs/",)).check(parse_spec(spec(checkpoint={"uri": uri})), report)
    assert [p.pointer for p in report.problems] == ([] if allowed else ["/checkpoint/uri"])


@pytest.mark.parametrize("way_out", ["..", ".", "", "../others"])
def test_checkpoint_uri_with_dot_or_empty_parts_is_refused(way_out: str) -> None:
    with pytest.raises(SpecError, match="checkpoint/uri"):
        parse_spec(spec(checkpoint={"uri": f"s3://team/jobs/{way_out}/others"}))


def test_object_store_does_not_decode_percent_encoded_dots_in_the_prefix() -> None:
    """What is asked of the store is the prefix as it was compared, letter by letter."""
    store = S3Store("team", prefix="jobs/%2e%2e/others", region="r", access_key_id="a", secret_access_key="b")
    assert "/team/jobs/%252e%252e/others/file?" in obstore.sign(store, "GET", "file", timedelta(seconds=60))


def test_code_outside_the_roots_is_refused_before_the_code_is_imported(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    settings.paths.code.mkdir(parents=True)
    ports = LocalSubmission(
        settings.paths, Machine((), 2), load(settings.paths, None), roots=Roots(settings.home, (), ())
    )
    hook = {"name": "custom", "hook": "danger:hook"}
    (tmp_path / "danger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    named = parse_spec(spec(code={"path": str(tmp_path)}, hook=hook))
    _, _, problems = ports.resolve(named)
    assert [(p.pointer, p.code) for p in problems] == [("/code/path", "path-not-allowed")]
    assert "--code-root" in problems[0].detail and "--upload" in problems[0].detail
    assert not (tmp_path / "ran").exists()
    assert "path-not-allowed" not in [
        p.code for p in ports.resolve(named, "0" * 64)[2]
    ]  # a fork, whose parent has a snapshot
    live = parse_spec(spec(code={"path": str(tmp_path), "source": "nodes"}))
    assert "path-not-allowed" in [p.code for p in ports.resolve(live, "0" * 64)[2]]  # and this is read where it is
    sent = parse_spec(spec(code={"path": "/home/ann/project", "digest": "0" * 64}))
    assert "path-not-allowed" not in [p.code for p in ports.resolve(sent, "0" * 64)[2]]
