"""A way to the service on which requests and answers are lost, cut off, delayed and sent twice, by a seed."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

FAULTS = ("none", "lost", "cut", "deaf", "half-answer", "twice", "late")
"""What happens to a request: nothing; it never arrives; half of it does; its answer is lost; half of the answer is; it arrives
twice at the same time, one answer is lost; it arrives although the client has gone."""


class RudeRelay:
    """Listens on a free loopback port; one request per connection. A context manager. ``done`` counts what was done."""

    def __init__(self, url: Callable[[], str], seed: int) -> None:
        self._url = url
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        relay = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    relay._serve(self.request)

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def __enter__(self) -> RudeRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, client: socket.socket) -> None:
        request = _request(client)
        if not request:
            return
        with self._lock:
            fault = self._draw.choice(FAULTS)
            self.done[fault] += 1
        if fault == "lost":
            return
        if fault == "cut":
            self._ask(request[: len(request) - 20], answer=False)
        elif fault == "deaf":
            self._ask(request)
        elif fault == "late":
            client.close()
            self._ask(request)
        elif fault == "half-answer":
            answer = self._ask(request)
            client.sendall(answer[: len(answer) // 2])
        elif fault == "twice":
            other = threading.Thread(target=self._ask, args=(request,))
            other.start()
            client.sendall(self._ask(request))
            other.join()
        else:
            client.sendall(self._ask(request))

    def _ask(self, request: bytes, *, answer: bool = True) -> bytes:
        """The whole answer; nothing where the service is away."""
        to = urlsplit(self._url())
        with suppress(OSError), socket.create_connection((to.hostname, to.port or 80), timeout=30) as service:
            service.settimeout(30)
            service.sendall(request)
            out = b""
            while answer and (part := service.recv(65536)):
                out += part
            return out
        return b""


def _request(client: socket.socket) -> bytes:
    """Head and body, with the connection closed behind the answer."""
    client.settimeout(10)
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        part = client.recv(65536)
        if not part:
            return b""
        body += part
    return b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body
