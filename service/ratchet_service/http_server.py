"""The HTTP server of one service: from the bound socket to its end, and the files by which it is found meanwhile:
``service.json`` and the user's pointer to the run directory."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from ratchet_contract import environment as names
from ratchet_contract import service_pointers
from ratchet_contract.hearing import LONGEST
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths
from ratchet_service.database import utc_now
from ratchet_service.health import Health
from ratchet_service.http_limits import MAX_HEADERS, HeadDeadline, most_connections

log = logging.getLogger(__name__)

GRACE: Final = 3
"""Seconds that requests in flight get at a clean end, once nobody may connect any more."""
KEEP_ALIVE: Final = int(LONGEST) + 5
"""Seconds that a connection may be idle: agents that are asked to keep figures back for as long as ``pacing`` does come by the
connection that they have. To one that was closed meanwhile they would report in vain first, and say that no service answers."""


class Ending:
    """From the first signal to the end of listening."""

    def __init__(self, health: Health, drain: float, leave: Callable[[], None]) -> None:
        """``leave``: called once, outside of signal handlers."""
        self._health, self._drain, self._leave = health, drain, leave
        self._since: float | None = None
        self._left = False

    def begin(self) -> bool:
        """In a signal handler, so nothing is locked. False: it had begun before."""
        if self._since is not None:
            return False
        self._since, self._health.stopping = time.monotonic(), True
        return True

    def over(self) -> bool:
        """Asked ten times a second: has the time come to listen no more?"""
        if self._since is None:
            return False
        if not self._left:
            self._left = True
            log.info("ending: no attempt is started or ended any more; requests are taken for %g s", self._drain)
            self._leave()
        return time.monotonic() - self._since >= self._drain


class Server(uvicorn.Server):
    """Writes ``service.json`` and the pointer once requests are answered, and removes at a clean end those that are its own."""

    def __init__(self, app: FastAPI, paths: HomePaths, url: str, tls: ssl.SSLContext | None, ending: Ending) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=KEEP_ALIVE,
            server_header=False,
            proxy_headers=False,  # whoever sends them could be anybody
            http=HeadDeadline,
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADERS,
            limit_concurrency=most_connections(),
        )
        super().__init__(config)
        config.load()
        config.ssl = tls
        self._paths = paths
        self._url = url
        self._ending = ending
        self._known = False
        self._pointer: Path | None = None
        self._pointer_refused = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second signal ends the process at once: everything that it does may be cut anywhere."""
        if not self._ending.begin():
            with suppress(OSError):
                os.write(2, b"ratchet: a second signal: ended at once; agents go on\n")
            self._forget()
            os._exit(128 + sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._make_known()
            self._point()
            log.info("listening on %s", self._url)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second. Another service of this run directory that has ended has taken its file away with it, or there was
        no room for ours."""
        if self._ending.over():
            self.should_exit = True
        if counter % 20 == 0 and not self.should_exit:
            if not (self._known and self._paths.service_file.exists()):
                self._make_known()
            if self._pointer is None or not self._pointer.exists():
                self._point()
        return await super().on_tick(counter)

    def _make_known(self) -> None:
        """On a full disk later: who knows the address is served meanwhile, and agents go on."""
        try:
            write_service_file(self._paths.service_file, self._url)
            self._known = True
        except OSError as error:
            self._known = False
            log.error("%s cannot be written, trying again: %s", self._paths.service_file, error.strerror or error)

    def _point(self) -> None:
        """Tried for as long as the service runs, and told once: a service can be used without. One that ends with a command is
        that command's alone: others would lose their jobs with it."""
        if names.ENDS_WITH in os.environ:
            return
        try:
            self._pointer = service_pointers.announce(self._paths.home.absolute())
        except OSError as error:
            self._pointer = None
            if not self._pointer_refused:
                log.warning("the service cannot be found from other directories without --home: %s", error)
            self._pointer_refused = True

    def _forget(self) -> None:
        remove_service_file(self._paths.service_file)
        if self._pointer is not None:
            service_pointers.withdraw(self._pointer)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._forget()
        await super().shutdown(sockets)


def write_service_file(path: Path, url: str) -> None:
    """By rename, readable by the owner alone, or by all where agents have a user of their own. Raises ``OSError``, and leaves
    nothing behind then."""
    content = ServiceFile(url=url, pid=os.getpid(), started_at=utc_now().isoformat()).model_dump_json()
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".service-")  # mode 0600
    try:
        with os.fdopen(fd, "w") as handle:
            handle.write(content)
        if HomePaths(path.parent).run_as_file.exists():  # agents of another user look for it there; it holds no secret
            Path(temporary).chmod(0o644)
        Path(temporary).rename(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_service_file(path: Path) -> None:
    """Only if it names this process: a later service may have written its own."""
    with suppress(OSError, ValidationError):
        if ServiceFile.model_validate_json(path.read_bytes()).pid == os.getpid():
            path.unlink()


@contextmanager
def signals(server: Server) -> Iterator[None]:
    """uvicorn listens to signals while it runs; before and after that they are heard, too."""
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
