"""Receivers of webhooks: real HTTP servers that record what they get, and answer as a test says. Jobs with events to send."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from typing import Any, Final, NamedTuple

from ratchet_contract.phases import EventType
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Job, JobLabel
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.webhooks.send import Sender

LOOPBACK: Final = (ip_network("127.0.0.0/8"),)
Headers = Mapping[str, str]
LIES: Final = {
    "200 cut": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nok",
    "200 wrong": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{"ok": false',
    "half a line": b"HTTP/1.1 20",
    "no HTTP": b"220 mail.example ESMTP\r\n",
    "308": b"HTTP/1.1 308 Permanent Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    "100": b"HTTP/1.1 100 Continue\r\n\r\n",
}
"""What such a receiver sends before it closes the connection. The service takes the first two as acceptances."""


def to_loopback() -> Sender:
    return Sender(LOOPBACK)


class Request(NamedTuple):
    headers: dict[str, str]
    body: bytes
    answer: str  # what the receiver did

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> tuple[str, int]:
        return self.json["data"]["job"]["id"], self.json["data"]["event_id"]


class Receiver:
    """``behave``: from a request to a status, or ``hang``, ``close``, ``redirect``, ``drip``, ``flood``, or a key of ``LIES``."""

    def __init__(self, behave: Callable[[Request], str] = lambda _: "200", tls: ssl.SSLContext | None = None) -> None:
        self.behave = behave
        self.requests: list[Request] = []
        self.fields: dict[str, str] = {}  # further headers of its answers
        self._lock, self._ended = threading.Lock(), threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._handle(self)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # a client that has gone

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        request = Request({key.lower(): value for key, value in handler.headers.items()}, body, "")
        with self._lock:
            answer = self.behave(request)
            self.requests.append(request._replace(answer=answer))
        if answer == "hang":
            self._ended.wait(30)
            return
        if answer == "close":
            handler.close_connection = True
            return
        if answer in LIES:
            handler.wfile.write(LIES[answer])
            handler.close_connection = True
            return
        handler.send_response(200 if answer in ("drip", "flood") else 302 if answer == "redirect" else int(answer))
        if answer == "redirect":
            handler.send_header("Location", self.url)
        for name, value in self.fields.items():
            handler.send_header(name, value.encode().decode("latin-1"))
        handler.end_headers()
        while answer in ("drip", "flood") and not self._ended.is_set():
            handler.wfile.write(b"x" * (1 if answer == "drip" else 65536))
            time.sleep(0.05 if answer == "drip" else 0)

    def accepted(self) -> list[Request]:
        with self._lock:
            return [one for one in self.requests if one.answer.startswith("200")]

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def receiving(
    behave: Callable[[Request], str] = lambda _: "200", tls: ssl.SSLContext | None = None
) -> Iterator[Receiver]:
    receiver = Receiver(behave, tls)
    try:
        yield receiver
    finally:
        receiver.close()


def job_row(database: Database, name: str, owner: str = "local", **labels: str) -> str:
    """The id of a new job without any event."""
    job_id = f"job-{name:0>12}"
    now = utc_now()
    with database.write() as session:
        job = Job(
            id=job_id, name=name, owner=owner, spec={}, resolved={}, spec_digest="", created_at=now, updated_at=now
        )
        session.add(job)
        session.flush()
        session.add_all(JobLabel(job_id=job_id, key=key, value=value) for key, value in labels.items())
    return job_id


def happen(database: Database, job_id: str, kind: Any = EventType.CHECKPOINT_FAILED, **data: Any) -> None:
    """One more event of the job."""
    with database.write() as session:
        lock_job(session, job_id)
        add_event(session, job_id, kind, f"{kind} of {job_id}", attempt=1, data=data)
