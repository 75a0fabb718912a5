"""A real HTTP server that plays the service's report endpoint, and can be told to fail."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ratchet_contract.phases import Cause, Outcome
from ratchet_contract.protocol.messages import (
    AgentReport,
    AttemptResult,
    Control,
    ControlNews,
    Group,
    ReportAck,
    ServiceFile,
)
from ratchet_contract.version import REPORT_AFTER_HEADER

TOKEN = "token-of-this-attempt"


class ReportService:
    """Stores what arrives by sequence number. ``faults`` are used up, one per request that brings messages: drop (store, then
    hang up), 500, garbage; ``refuse`` is (status, code) for every request. ``nodes``: of the group, whose agents it introduces to
    one another, and tells of each other's failures."""

    def __init__(self, service_file: Path, nodes: int = 1, host: str = "127.0.0.1") -> None:
        self.messages: dict[int, list[Any]] = defaultdict(list)
        self.control = Control()
        self.results: dict[int, AttemptResult] = {}
        self.addresses: dict[int, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.cut_short = 0
        self.given = 0
        self.faults: list[str] = []
        self.refuse: tuple[int, str] | None = None
        self.retry_after: str | None = None
        self.report_after: str | None = None
        self.requests = 0
        self.repeated = 0
        self.watches: list[dict[str, str]] = []
        self._file, self._nodes, self._host = service_file, nodes, host
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Listen on a new port and tell it in service.json."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                service._answer(self)

            def do_GET(self) -> None:
                service._give(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((self._host, 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        described = ServiceFile(
            url=f"http://{self._host}:{self._server.server_port}", pid=os.getpid(), started_at="now"
        )
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(described.model_dump_json())

    def stop(self) -> None:
        """Close the port; connections that are open get no answer any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if self._server is None or request.server is not self._server:
            request.close_connection = True
            return
        self.requests += 1
        report = AgentReport.model_validate_json(body)
        fault = self.faults.pop(0) if self.faults and report.batches else ""
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            self._problem(request, 401, "wrong-token")
        elif self.refuse is not None:
            self._problem(request, *self.refuse)
        elif fault == "500":
            self._send(request, 500, b"oops", "text/plain")
        elif fault == "garbage":
            self._send(request, 200, b"<html>", "text/html")
        else:
            ack = self._store(report)
            if fault == "drop":
                request.close_connection = True
            else:
                self._send(request, 200, ack.model_dump_json().encode(), "application/json")

    def _give(self, request: BaseHTTPRequestHandler) -> None:
        """A blob by the last part of the path; the first ``cut_short`` times a quarter of it. For ``control``: the answer, once
        ``control`` is another than the agent says, or its time is over."""
        if "/control?" in request.path and request.headers["Authorization"] == f"Bearer {TOKEN}":
            self._wait(request)
            return
        data = self.blobs.get(request.path.rpartition("/")[2])
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            self._problem(request, 401, "token-wrong")
        elif data is None:
            self._problem(request, 404, "code-not-found")
        elif self.cut_short > 0:
            self.cut_short -= 1
            request.send_response(200)
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data[: len(data) // 4])
            request.close_connection = True
        else:
            self.given += 1
            self._send(request, 200, data, "application/x-tar")

    def _wait(self, request: BaseHTTPRequestHandler) -> None:
        known = dict(parse_qsl(urlsplit(request.path).query))
        self.watches.append(known)
        end = time.monotonic() + float(known["wait"])

        def changed() -> bool:
            now = self.control
            return (now.desired, now.checkpoint_request) != (known["desired"], int(known["checkpoint_request"]))

        while self._server is not None and not changed() and time.monotonic() < end:
            time.sleep(0.01)
        self._send(request, 200, ControlNews(changed=changed()).model_dump_json().encode(), "application/json")

    def _store(self, report: AgentReport) -> ReportAck:
        for batch in report.batches:
            stored = self.messages[batch.rank]
            assert batch.from_seq <= len(stored) + 1, "a message was left out"
            for seq, message in enumerate(batch.messages, batch.from_seq):
                if seq > len(stored):
                    stored.append(message)
                else:
                    self.repeated += 1
        if report.result is not None:
            self.results[report.node] = report.result
        acked = {rank: len(found) for rank, found in self.messages.items()}
        if self._nodes == 1:
            return ReportAck(acked=acked, control=self.control)
        if report.address is not None:
            self.addresses[report.node] = report.address
        peer = self._peer_end(report.node)
        hang = Cause.HANG if peer is not None and f"ended with {Cause.HANG}:" in peer else None
        control = self.control.model_copy(update={"peer_end": peer, "peer_cause": hang})
        group = Group(present=sorted(self.addresses), rendezvous=self.addresses.get(0))
        return ReportAck(acked=acked, control=control, group=group)

    def _peer_end(self, node: int) -> str | None:
        """As the service's ``ingest`` words it."""
        for other, result in self.results.items():
            if other != node and (result.cause.outcome in (Outcome.FAILED, Outcome.LOST) or not result.ranks):
                return f"node {other} has ended with {result.cause}: {result.message}"
        return None

    def _problem(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        body = {"type": f"urn:ratchet:problem:{code}", "title": code, "status": status, "detail": code, "code": code}
        self._send(request, status, json.dumps(body).encode(), "application/problem+json")

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        if self.retry_after is not None and status >= 400:
            request.send_header("Retry-After", self.retry_after)
        if self.report_after is not None:
            request.send_header(REPORT_AFTER_HEADER, self.report_after)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
