"""What one connection may hold of the service: the size of a request's head, the time until it is whole, how many there are.

uvicorn bounds the idle time between two requests alone; a client that sends a head byte by byte would keep a connection for good.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADERS: Final = 32 * 1024
"""Bytes of request line and headers; more is answered by 400 and the end of the connection."""
HEAD_SECONDS: Final = 20.0
REST_SECONDS: Final = 20.0
"""For what is left of a body when its request has been answered, refused perhaps: nobody reads it."""


def most_connections() -> int:
    """Three quarters of the descriptors that this process may have; whoever comes beyond is told 503."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 65_536 if soft == resource.RLIM_INFINITY else max(64, soft * 3 // 4)


class HeadDeadline(H11Protocol):
    """Ends a connection whose request's head is not whole ``head_seconds`` after it began, or whose request is answered and goes
    on coming for ``rest_seconds``."""

    head_seconds = HEAD_SECONDS
    rest_seconds = REST_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._rest: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self._deadline is None:
            self._arm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._rest = self.loop.call_later(self.rest_seconds, self._end_rest, self.cycle)

    def _end_rest(self, answered: object) -> None:
        if self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._rest is not None:
            self._rest.cancel()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
