"""A way to the service on which requests and answers are lost, cut off, delayed and sent twice, by a seed."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

FAULTS = ("none", "lost", "cut", "deaf", "half-answer", "twice", "late")
"""What happens to a request: nothing; it never arrives; half of it does; its answer is lost; half of the answer is; it arrives
twice at the same time, one answer is lost; it arrives although the client has gone."""
SLOW = "slow"
"""Where requests are delayed (``delay``), one more: it arrives some time after it was sent, and the client waits."""


class FaultyProxy:
    """Listens on a free loopback port and hands each request to what ``url()`` names at that moment. A context manager.

    ``rate``: the share of requests that a fault of ``FAULTS`` is drawn for; it may be changed. ``delay``: seconds, at most, by
    which a late one, a slow one and the second of two comes later. Answers leave connections open: a client may send its next
    request on the same one. ``down``: while it is set, whoever comes is sent away. ``done`` counts what was done.
    """

    def __init__(self, url: Callable[[], str], seed: int, *, rate: float = 1.0, delay: float = 0.0) -> None:
        self._url, self._delay = url, delay
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._kinds = (*FAULTS, SLOW) if delay else FAULTS
        self.rate, self.down = rate, False
        self.done: Counter[str] = Counter()
        relay = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    while relay._serve(self.request):
                        pass

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, client: socket.socket) -> bool:
        """One request; whether another one may follow on this connection."""
        request = _request(client)
        if not request or self.down:
            return False
        with self._lock:
            fault = self._draw.choice(self._kinds) if self._draw.random() < self.rate else "none"
            wait = self._draw.uniform(0, self._delay)
            self.done[fault] += 1
        if fault == "lost":
            return False
        if fault == "cut":
            self._forward(request[: len(request) - 20], answer=False)
        elif fault == "deaf":
            self._forward(request)
        elif fault == "late":
            client.close()
            time.sleep(wait)
            self._forward(request)
        elif fault == "half-answer":
            answer = self._forward(request)
            client.sendall(answer[: len(answer) // 2])
        else:
            other = threading.Thread(target=self._resend, args=(request, wait), daemon=True)
            if fault == "twice":
                other.start()
            elif fault == SLOW:
                time.sleep(wait)
            answer = self._forward(request)
            client.sendall(answer)
            if fault == "twice" and not self._delay:
                other.join()
            return _complete(answer)
        return False

    def _resend(self, request: bytes, wait: float) -> None:
        time.sleep(wait)
        self._forward(request)

    def _forward(self, request: bytes, *, answer: bool = True) -> bytes:
        """The whole answer; nothing where the service is away."""
        to = urlsplit(self._url())
        with suppress(OSError), socket.create_connection((to.hostname, to.port or 80), timeout=30) as service:
            service.settimeout(30)
            service.sendall(request)
            out = b""
            while answer and (part := service.recv(65536)):
                out += part
            return _open(out)
        return b""


def _request(client: socket.socket) -> bytes:
    """Head and body, to be sent on a connection that is closed behind the answer; nothing at the connection's end."""
    client.settimeout(60)
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    length = _length(lines) or 0
    while len(body) < length:
        part = client.recv(65536)
        if not part:
            return b""
        body += part
    return b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body


def _length(lines: list[bytes]) -> int | None:
    return next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), None)


def _open(answer: bytes) -> bytes:
    """The same answer, without the word that its connection is closed behind it, where its length is told."""
    head, end, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    if _length(lines) is None:
        return answer
    return b"\r\n".join(line for line in lines if not line.lower().startswith(b"connection:")) + end + body


def _complete(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return _length(head.split(b"\r\n")) == len(body)
