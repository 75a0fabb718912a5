"""``/readyz`` tells the truth, component by component, and a service that is asked to end does so in order."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from ratchet_service.db import migrate
from ratchet_service.db.engine import Database
from ratchet_service.observability import disk_space, health
from ratchet_service.observability.health import Health, ReconcilerHeartbeat, Unready
from tests.support.api import Api
from tests.support.control_plane import trainer_spec
from tests.support.extra_migration import add_revision
from tests.support.server import Server, wait_for


def ready(api: Api) -> tuple[int, str]:
    answer = api.client.get("/readyz")
    return answer.status_code, answer.json().get("code", "ok")


def set_revision(database: Database, revision: str) -> None:
    with database.write() as session:
        session.execute(sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})


def test_readyz_reports_newer_older_and_unsupported_schema_by_code(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        api.client.get("/readyz").json()["components"]["database"]["detail"]
        == f"answers, revision {migrate.head_revision()}"
    )
    try:
        set_revision(api.database, "9999")
        assert ready(api) == (503, "schema-newer")
        detail = api.client.get("/readyz").json()["detail"]
        assert (
            f"revision 9999, this one knows up to {migrate.head_revision()}" in detail and "restore a backup" in detail
        )
        set_revision(api.database, "0014")
        assert ready(api) == (503, "schema-unsupported")
        set_revision(api.database, migrate.head_revision())
        with monkeypatch.context() as later:
            add_revision(tmp_path, later)
            assert ready(api) == (503, "schema-older")
    finally:
        set_revision(api.database, migrate.head_revision())
    assert ready(api) == (200, "ok")
    assert api.client.get("/healthz").status_code == 200


def test_readyz_fails_for_an_unwritable_or_full_run_directory(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(health, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(health.tempfile, "TemporaryFile", refuse)
    assert ready(api) == (503, "run-directory-unwritable")

    def full(**_: Any) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(health.tempfile, "TemporaryFile", full)
    assert ready(api) == (507, disk_space.CODE)
    assert api.client.get("/healthz").status_code == 200
    monkeypatch.undo()
    wait_for(lambda: ready(api) == (200, "ok"), "a second later it is tried again")


def test_readyz_probes_the_disk_at_most_once_per_interval(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, real = [0.0], health.tempfile.TemporaryFile
    written: list[str] = []

    def counted(**arguments: Any) -> Any:
        written.append("once")
        if len(written) == 2:
            raise OSError(30, "Read-only file system")
        return real(**arguments)

    monkeypatch.setattr(health.tempfile, "TemporaryFile", counted)
    looks = health.CachedProbe[str](clock=lambda: seconds[0])

    def look() -> str:
        return looks.get(lambda: health._check_writable(api.settings.paths.home))

    assert {look()[:7] for _ in range(20)} == {"written"} and len(written) == 1
    seconds[0] += health.PROBE_SECONDS
    for _ in range(5):
        with pytest.raises(health.Unready, match="Read-only"):
            look()
    assert len(written) == 2
    seconds[0] += health.PROBE_SECONDS
    assert look().startswith("written")
    before = len(written)

    def slow(**arguments: Any) -> Any:
        seconds[0] += 10 * health.PROBE_SECONDS
        return counted(**arguments)

    monkeypatch.setattr(health.tempfile, "TemporaryFile", slow)
    seconds[0] += health.PROBE_SECONDS
    for _ in range(
        5
    ):  # who waited for a disk that answers slowly has its answer, and does not ask again, one after the other
        look()
    assert len(written) == before + 1
    monkeypatch.setattr(health.tempfile, "TemporaryFile", counted)
    before = len(written)
    for _ in range(10):
        ready(api)
    assert len(written) <= before + 2, "each call of /readyz wrote"


def test_readyz_fails_for_an_own_stalled_reconciler_and_warns_for_others(database: Database, tmp_path: Path) -> None:
    from ratchet_contract.paths import HomePaths

    now, paths = [100.0], HomePaths(tmp_path)
    beat = ReconcilerHeartbeat(paths.reconciler_marker, clock=lambda: now[0])
    told = lambda one: health.check(Health(heartbeat=one), database, paths)["reconciler"]  # noqa: E731
    assert told(beat).detail == "in this process, starting"
    assert (told(None).status, "none has ever run" in told(None).detail) == ("warning", True)
    now[0] += 10
    beat.record_round()
    assert told(beat).detail == "in this process, last round 0 s ago"
    assert (told(None).status, "last seen 0 s ago" in told(None).detail) == ("ok", True)
    now[0] += health.ROUND_SECONDS + 1
    with pytest.raises(Unready, match="61 s") as caught:
        told(beat)
    assert caught.value.code == "reconciler-stalled"
    os.utime(paths.reconciler_marker, (1, 1))
    assert told(None).status == "warning"
    for _ in range(health.FAILED_ROUNDS):
        with pytest.raises(Unready):
            told(beat)
        beat.record_failure(RuntimeError("wrong"))
    assert told(None).status == "warning", "a round that fails is no sign of life for others"
    beat.record_round()
    assert told(None).status == "ok"


def test_failing_readyz_probe_is_logged_once(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ratchet_service.api.routes.health")
    assert ready(api)[0] == 200
    caplog.clear()
    set_revision(api.database, "9999")
    try:
        for _ in range(3):
            assert ready(api)[0] == 503
    finally:
        set_revision(api.database, migrate.head_revision())
    assert ready(api)[0] == 200
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["not ready", "ready"]


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Server]:
    """No reconciler: its jobs wait, so that followers of theirs do."""
    made = Server(tmp_path / "home", "--no-reconciler", "--drain", "1.5")
    yield made
    made.stop()


def submission(url: str, body: bytes) -> socket.socket:
    """A request whose head and half of whose body are sent."""
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=20)
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body[:20])
    return connection


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_terminated_service_completes_requests_already_begun(waiting: Server) -> None:
    waiting.start()
    assert waiting.process is not None
    first = waiting.submit(trainer_spec())
    url, body = waiting.url, json.dumps(trainer_spec(name="second")).encode()
    follow = {"Accept": "text/event-stream"}
    with (
        submission(url, body) as request,
        httpx.stream("GET", f"{url}/v1/jobs/{first}/events", headers=follow, timeout=20) as told,
    ):
        lines = told.iter_lines()
        assert next(lines).startswith("id: ")
        os.kill(waiting.process.pid, signal.SIGTERM)

        def ending() -> bool:
            answer = httpx.get(f"{url}/readyz")
            return answer.status_code == 503 and answer.json()["code"] == "shutting-down"

        wait_for(ending, "/readyz to tell that the service ends", 10)
        assert httpx.get(f"{url}/healthz").status_code == 200
        rest = list(lines)
        request.sendall(body[20:])
        answer = everything(request)
    assert rest[-2:] == ["retry: 500", ""] and "event: end" not in rest
    assert answer.startswith(b"HTTP/1.1 201 "), answer
    assert waiting.process.wait(20) == 0
    assert not waiting.paths.service_file.exists()
    waiting.start()
    names = {item["name"] for item in waiting.call("GET", "/v1/jobs").json()["items"]}
    assert names == {"t", "second"}


def test_second_signal_ends_a_draining_service_at_once(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", "--drain", "600")
    try:
        server.start()
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for(lambda: "shutting down: no attempt" in server.log(), "the first signal to be heard", 20)
        assert server.process.poll() is None
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(20) in (130, 130 << 8)
        assert "a second signal" in server.log()
        assert not server.paths.service_file.exists()
    finally:
        with suppress(AssertionError):
            server.stop()
