"""The HTTP server of one service, and the files by which clients find it. It also limits the size of a request's head, and the
time in which the head must arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from uvicorn.protocols.http.h11_impl import H11Protocol

from ratchet_contract import env_vars as names
from ratchet_contract.atomic_write import atomic_file, write_all
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import service_pointers
from ratchet_contract.protocol.messages import ServiceFile
from ratchet_contract.protocol.timing import MAX_CONTROL_DELAY_SECONDS
from ratchet_service.api.problem_json import MEDIA_TYPE, problem
from ratchet_service.db.engine import utc_now
from ratchet_service.observability.health import Health

MAX_HEADERS: Final = 32 * 1024
"""Maximum bytes of request line and headers, as far as they do not arrive at once. A larger head is answered with 400
(``malformed-head``), and the connection is closed."""
HEAD_SECONDS: Final = 20.0
REST_SECONDS: Final = 20.0
"""Time limit in seconds for the rest of a request body after its request is answered, for example refused. Nothing reads that
rest."""


def max_connections() -> int:
    """Return the maximum number of connections, from this process's file descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 65_536 if soft == resource.RLIM_INFINITY else max(64, soft * 3 // 4)


class HeadDeadline(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with time limits. It aborts a connection whose request head takes too long. It also aborts one
    whose request body is still incomplete some time after the response."""

    head_seconds = HEAD_SECONDS
    rest_seconds = REST_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._is_discarding = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request head."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Process the bytes, and start or stop the timer for the request head."""
        if self._is_discarding:
            return
        super().data_received(data)
        if self._is_discarding:
            return
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._deadline is None:
            self._arm()

    def on_response_complete(self) -> None:
        """If the body of the answered request is still arriving, start the timer that aborts the connection."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._rest_timer = self.loop.call_later(self.rest_seconds, self._abort_unread_body, self.cycle)

    def _abort_unread_body(self, answered: object) -> None:
        """Abort the connection if ``answered`` is still its current request and the body of that request is incomplete."""
        if self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is invalid HTTP, or whose head is too large, with a problem, and close the connection, at once or
        after a while."""
        text = f"the head of the request is not valid HTTP, or is larger than {MAX_HEADERS >> 10} KiB"
        body = problem(400, "malformed-head", text).model_dump_json(exclude_none=True).encode()
        headers = [("content-type", MEDIA_TYPE), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_discarding = True
        self._disarm()
        # closed at once, the connection would be reset, and the client could lose the answer
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._deadline = self.loop.call_later(self.rest_seconds, self.transport.abort)
        else:  # TLS
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel both timers."""
        self._disarm()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        super().connection_lost(exc)

    def _arm(self) -> None:
        """Start the head timer: it aborts the connection after ``head_seconds``."""
        self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _disarm(self) -> None:
        """Cancel the head timer, if it runs."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3
"""Seconds that uvicorn waits at a clean shutdown for requests in flight to end, after it stops accepting connections."""
KEEP_ALIVE_SECONDS: Final = int(MAX_CONTROL_DELAY_SECONDS) + 5
"""Seconds after which an idle connection is closed. This is longer than the longest delay between reports that ``report_pacing``
requests of agents. So agents reuse their connection: a report on a closed connection would fail first, and the agent would log
that no service answers."""


class Shutdown:
    """The state of the server's shutdown. For ``drain_seconds`` after its begin, requests are still accepted."""

    def __init__(self, health: Health, drain_seconds: float, on_drain: Callable[[], None]) -> None:
        """``health``: its ``stopping`` becomes True when the shutdown begins. ``on_drain`` is called once after that, outside
        signal handlers."""
        self._health, self._drain_seconds, self._on_drain = health, drain_seconds, on_drain
        self._began_at: float | None = None
        self._drain_started = False

    def begin(self) -> bool:
        """Begin the shutdown. Return False if it has begun already. Takes no lock, for use in a signal handler."""
        if self._began_at is not None:
            return False
        self._began_at, self._health.stopping = time.monotonic(), True
        return True

    def is_over(self) -> bool:
        """Return True once ``drain_seconds`` have passed since ``begin``. The first call after ``begin`` calls ``on_drain``."""
        if self._began_at is None:
            return False
        if not self._drain_started:
            self._drain_started = True
            log.info(
                "shutting down: no attempt is started or ended any more; requests are accepted for %g s",
                self._drain_seconds,
            )
            self._on_drain()
        return time.monotonic() - self._began_at >= self._drain_seconds


class Server(uvicorn.Server):
    """uvicorn's server for one app. While it runs, it maintains ``service.json`` and the pointer to the run directory."""

    def __init__(
        self, app: FastAPI, paths: HomePaths, url: str, tls: ssl.SSLContext | None, shutdown_state: Shutdown
    ) -> None:
        """``url``: the service's URL, for ``service.json``. ``tls`` None: plain HTTP. ``shutdown_state`` decides when the server
        stops."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            server_header=False,
            proxy_headers=False,  # anybody could send them
            http=HeadDeadline,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADERS,
            limit_concurrency=max_connections(),
        )
        super().__init__(config)
        config.load()
        config.ssl = tls
        self._paths = paths
        self._url = url
        self._shutdown_state = shutdown_state
        self._service_file_written = False
        self._pointer: Path | None = None
        self._pointer_error_logged = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown at the first signal. A second signal removes the service's files and ends the process at once."""
        if not self._shutdown_state.begin():
            with suppress(OSError):
                os.write(2, b"ratchet: a second signal: ended at once; agents go on\n")
            self._remove_own_files()
            os._exit(128 + sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on ``sockets``, then write ``service.json`` and the pointer."""
        await super().startup(sockets)
        if self.started:
            self._write_service_file()
            self._write_pointer()
            log.info("listening on %s", self._url)

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must stop. Every two seconds, write ``service.json`` and the pointer again if they are
        missing."""
        if self._shutdown_state.is_over():
            self.should_exit = True
        if counter % 20 == 0 and not self.should_exit:
            if not (self._service_file_written and self._paths.service_file.exists()):
                self._write_service_file()
            if self._pointer is None or not self._pointer.exists():
                self._write_pointer()
        return await super().on_tick(counter)

    def _write_service_file(self) -> None:
        """Write ``service.json``. A failure, for example on a full disk, is logged, and ``on_tick`` tries again."""
        try:
            write_service_file(self._paths.service_file, self._url)
            self._service_file_written = True
        except OSError as error:
            self._service_file_written = False
            log.error("%s cannot be written, trying again: %s", self._paths.service_file, error.strerror or error)

    def _write_pointer(self) -> None:
        """Write the pointer by which clients find this run directory. A service that ends with a command, such as
        ``ratchet run``, writes none. A failure is logged once, and ``on_tick`` tries again."""
        # the service ends with a command: others would lose their jobs then
        if names.ENDS_WITH in os.environ:
            return
        try:
            self._pointer = service_pointers.create_pointer(self._paths.home.absolute())
        except OSError as error:
            self._pointer = None
            if not self._pointer_error_logged:
                log.warning("the service cannot be found from other directories without --home: %s", error)
            self._pointer_error_logged = True

    def _remove_own_files(self) -> None:
        """Remove ``service.json`` and the pointer if they name this process."""
        remove_service_file(self._paths.service_file)
        if self._pointer is not None:
            service_pointers.remove_pointer(self._pointer)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Remove the service's files, stop listening, and close the connections. Requests in flight get ``GRACE_SECONDS`` to
        end."""
        self._remove_own_files()
        await super().shutdown(sockets)


def write_service_file(path: Path, url: str) -> None:
    """Write ``service.json`` at ``path`` by rename: the service's ``url``, this process's pid and the time. Raises
    ``OSError``."""
    content = ServiceFile(url=url, pid=os.getpid(), started_at=utc_now().isoformat()).model_dump_json()
    with atomic_file(path, durable=False, mode=0o600) as fd:
        write_all(fd, memoryview(content.encode()))
        if HomePaths(path.parent).run_as_file.exists():  # agents of another user look for it there; it holds no secret
            os.fchmod(fd, 0o644)


def remove_service_file(path: Path) -> None:
    """Remove ``service.json`` only if it names this process. Errors are ignored."""
    with suppress(OSError, ValidationError):
        if ServiceFile.model_validate_json(path.read_bytes()).pid == os.getpid():
            path.unlink()


@contextmanager
def handle_signals(server: Server) -> Iterator[None]:
    """Context manager: in its block, SIGTERM and SIGINT call ``server.handle_exit``. The earlier handlers are restored
    afterwards."""
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
