"""A scripted HTTP server on a real socket, for tests of the client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ratchet_contract.version import PROTOCOL_HEADER, PROTOCOL_VERSION

Reply = tuple[int, str, bytes]
Script = Callable[[BaseHTTPRequestHandler, int], Reply]
HOOK = {"name": "allreduce", "title": "t", "available": True, "stateful": False, "replicas": "equal", "backends": []}
JOB = {
    "id": "job-000000000001", "name": "n", "phase": "RUNNING", "desired": "run", "labels": {}, "priority": 0, "spec": {},
    "attempt": 1,
    "resolved": {"device": "cpu", "backend": "gloo", "threads_per_rank": 1, "python": "python"}, "progress": {},
    "budgets": {"max_failures": 3}, "hook": "allreduce", "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z",
}  # fmt: skip


def problem(status: int, code: str, **extra: object) -> Reply:
    body = {"type": "about:blank", "title": "t", "status": status, "detail": f"told: {code}", "code": code, **extra}
    return status, "application/problem+json", json.dumps(body).encode()


def ok(data: object) -> Reply:
    return 200, "application/json", json.dumps(data).encode()


class Server:
    def __init__(self, script: Script) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                outer.requests.append((self.command, self.path, dict(self.headers)))
                status, kind, body = script(self, len(outer.requests))
                if status == 0:  # drop the connection without an answer
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

            def end_headers(self) -> None:  # of scripts that write their answer themselves, too
                self.send_header(PROTOCOL_HEADER, str(PROTOCOL_VERSION))
                super().end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    server = Server(script)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
