"""An address that stays while the service behind it comes and goes, as a cluster's Service object gives one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit


class TcpProxy:
    """Listens on a free loopback port and hands each connection on to what ``url()`` names at that moment; where nobody is there,
    the connection is closed. A context manager."""

    def __init__(self, url: Callable[[], str]) -> None:
        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    to = urlsplit(url())
                    with socket.create_connection((to.hostname, to.port or 80), timeout=10) as other:
                        back = threading.Thread(target=_pump, args=(other, self.request))
                        back.start()
                        _pump(self.request, other)
                        back.join()

        self._server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _pump(source: socket.socket, to: socket.socket) -> None:
    """Until ``source`` says no more; then ``to`` is told so."""
    with suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)
    with suppress(OSError):
        to.shutdown(socket.SHUT_WR)
