"""``python -m ratchet_service`` as a process: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from ratchet_contract.paths import HomePaths
from ratchet_service.__main__ import main
from ratchet_service.agent_reports.report_pacing import MAX_CONTROL_DELAY_SECONDS
from ratchet_service.api import server as http_server
from ratchet_service.api.server import remove_service_file, write_service_file
from ratchet_service.observability.health import Health
from tests.support.server import wait_for

COMMAND = [sys.executable, "-m", "ratchet_service"]


class Running:
    """Processes of the service, ended with the test."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")}
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--home", str(self.home)], stderr=subprocess.PIPE, text=True, env=env
        )
        self.started.append(process)
        return process

    def url(self, process: subprocess.Popen[str]) -> str:
        def described() -> str | None:
            assert process.poll() is None, process.communicate()[1]
            try:
                data = json.loads((self.home / "service.json").read_text())
            except FileNotFoundError:
                return None
            return str(data["url"]) if data["pid"] == process.pid else None

        return wait_for(described, "service.json", 60)


def test_serve_on_a_full_disk_writes_the_service_file_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full disk is a mock: a real one would need a mount, as `make chaos` has it."""
    paths, wrote = HomePaths(tmp_path), threading.Event()

    def write(path: Path, url: str) -> None:
        if not wrote.is_set():
            wrote.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        write_service_file(path, url)

    monkeypatch.setattr(http_server, "write_service_file", write)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        server = http_server.Server(FastAPI(), paths, url, None, http_server.Shutdown(Health(), 0.0, lambda: None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_for(wrote.is_set, "the first try", 30)
            assert httpx.get(f"{url}/docs", trust_env=False).status_code == 200
            wait_for(paths.service_file.exists, "service.json", 30)
            assert json.loads(paths.service_file.read_text())["url"] == url
        finally:
            server.should_exit = True
            thread.join(30)
    assert not paths.service_file.exists()


def test_server_keep_alive_exceeds_the_longest_report_interval(tmp_path: Path) -> None:
    """Between two of its reports lie as much as ``LONGEST`` seconds, a period of its own, and the answer."""
    server = http_server.Server(
        FastAPI(), HomePaths(tmp_path), "", None, http_server.Shutdown(Health(), 0.0, lambda: None)
    )
    assert server.config.timeout_keep_alive >= MAX_CONTROL_DELAY_SECONDS + 2.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def test_serve_allows_one_service_per_home_and_removes_the_service_file(running: Running) -> None:
    first = running.start("serve", "--port", "0")
    url = running.url(first)
    assert httpx.get(f"{url}/readyz").json()["status"] == "ok"
    file = running.home / "service.json"
    assert file.stat().st_mode & 0o777 == 0o600

    second = running.start("serve", "--port", "0")
    assert second.wait(60) == 2
    text = second.communicate()[1]
    assert "already" in text and url in text and str(first.pid) in text
    assert json.loads(file.read_text())["pid"] == first.pid

    with httpx.stream("GET", f"{url}/v1/jobs?limit=1"):
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0
    assert not file.exists()
    text = first.communicate()[1]
    assert f"listening on {url}" in text
    assert "running agents continue" in text


def test_reconcile_command_writes_machine_file_and_ends_cleanly(running: Running) -> None:
    process = running.start("reconcile", "--cpu-slots", "3")
    wait_for((running.home / "machine.json").exists, "machine.json", 60)
    assert json.loads((running.home / "machine.json").read_text())["cpu_slots"] == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_serve_on_a_used_port_fails_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--home", str(tmp_path), "--port", str(port)]) == 2
    text = capsys.readouterr().err
    assert f"port {port}" in text and "--port 0" in text
    assert not (tmp_path / "service.json").exists()


@pytest.mark.parametrize(
    ("url", "text"),
    [("mysql://u@h/d", "not supported"), ("postgresql://u:hidden@127.0.0.1:1/d", "cannot be opened")],
)
def test_serve_with_an_unusable_database_fails_without_showing_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, text: str
) -> None:
    assert main(["serve", "--home", str(tmp_path), "--port", "0", "--database-url", url]) == 2
    shown = capsys.readouterr().err
    assert text in shown and "hidden" not in shown


def test_remove_service_file_leaves_the_file_of_a_later_service(tmp_path: Path) -> None:
    file = tmp_path / "service.json"
    write_service_file(file, "http://127.0.0.1:1")
    remove_service_file(file)
    assert not file.exists()
    file.write_text(json.dumps({"protocol": 1, "url": "http://127.0.0.1:2", "pid": 1, "started_at": "now"}))
    remove_service_file(file)
    assert file.exists()
    file.write_text("torn")
    remove_service_file(file)
    remove_service_file(tmp_path / "absent.json")
