"""Object stores for tests: obstore's memory, a local directory, and moto's S3 server behind a proxy that can be told to fail."""

from __future__ import annotations

import http.client
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet_store.object_store.client import BRIEF, ObjectStore, Patience, open_store
from tests.support.server import wait_for

BUCKET = "bucket"
PATIENT = Patience(2.0, 20.0, 10.0)
_MAIN = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the test
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""
Fault = Callable[[str, str], str | None]
"""Of a request's method and path: "503", "403", "reset" (in the middle of its body), "hang", or None."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class S3Server:
    """moto's server, and the proxy through which everything goes. ``url`` is the proxy's."""

    def __init__(self) -> None:
        self.fault: Fault = lambda _method, _path: None
        self.unconditional = False  # a store that does not know If-None-Match
        self.requests: list[tuple[str, str]] = []
        self.hung = threading.Event()
        self._conditional = threading.Lock()
        port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._upstream = port
        self._proxy = self._start_proxy()
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        wait_for(self._answers, "moto's server", 30)
        self.reset()

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def reset(self) -> None:
        """An empty bucket, no faults."""
        self.fault, self.unconditional = lambda _method, _path: None, False
        direct = f"http://127.0.0.1:{self._upstream}"
        assert httpx.post(f"{direct}/moto-api/reset").status_code == 200
        assert httpx.put(f"{direct}/{BUCKET}").status_code == 200
        self.requests.clear()
        self.hung.clear()

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._process.kill()
        self._process.wait(10)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "moto's server ended"
        try:
            return httpx.get(f"http://127.0.0.1:{self._upstream}/moto-api/").status_code == 200
        except httpx.HTTPError:
            return False

    def _start_proxy(self) -> ThreadingHTTPServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                server._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

            def log_message(self, *_: object) -> None:
                pass

        class Proxy(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: object) -> None:
                pass  # clients that were told to vanish

        proxy = Proxy(("127.0.0.1", 0), Handler)
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        return proxy

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append((request.command, request.path))
        fault = self.fault(request.command, request.path)
        length = int(request.headers.get("Content-Length") or 0)
        if fault == "reset":
            request.rfile.read(length // 2)
            _reset(request)
            return
        body = request.rfile.read(length)
        if fault == "hang":
            self.hung.set()
            threading.Event().wait(30)
            _reset(request)
            return
        if fault is not None:
            key = self.environ["AWS_ACCESS_KEY_ID"]
            text = f"<Error><Code>Made{fault}</Code><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>".encode()
            _send(request, int(fault), [("Content-Type", "application/xml")], text)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=30)
        try:
            given = {k: v for k, v in request.headers.items() if not (self.unconditional and k == "if-none-match")}
            # S3 looks and stores in one step, moto in two.
            with self._conditional if "if-none-match" in given else nullcontext():
                upstream.request(request.command, request.path, body, given)
                answer = upstream.getresponse()
                data = answer.read()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            _send(request, answer.status, headers, data)
        finally:
            upstream.close()


def _send(request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
    request.send_response_only(status)
    sized = any(name.lower() == "content-length" for name, _ in headers)
    for name, value in headers if sized else [*headers, ("Content-Length", str(len(data)))]:
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(data)


def _reset(request: BaseHTTPRequestHandler) -> None:
    """RST instead of an answer."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.close_connection = True
    request.connection.close()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty bucket, named by this process's environment."""
    s3_server.reset()
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(params=["memory", "disk", "s3"])
def make_object_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], ObjectStore]:
    """Makes the store below a prefix; all that one test makes are of the same place."""
    from obstore.store import LocalStore, MemoryStore

    if request.param == "s3":
        request.getfixturevalue("s3")
        return lambda below: open_store(f"s3://{BUCKET}/team", below, PATIENT)
    places: dict[str, Any] = {}

    def make(below: str) -> ObjectStore:
        if below not in places:
            path = tmp_path / "objects" / below
            places[below] = MemoryStore() if request.param == "memory" else LocalStore(path, mkdir=True)
        return ObjectStore(places[below], f"{request.param}://{below}", digests=request.param == "memory")

    return make


__all__ = ["BRIEF", "BUCKET", "PATIENT", "S3Server", "free_port", "make_object_store", "s3", "s3_server"]
