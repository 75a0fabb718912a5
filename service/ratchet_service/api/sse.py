"""Streams for followers: server-sent events (WHATWG HTML, 9.2), or plain text that grows. A poll function supplies the text, and
is called until it returns a finished result."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio
from anyio.to_thread import run_sync

END: str = "event: end\ndata: {}\n\n"
RETRY: str = "retry: 500\n\n"
"""Makes a client reconnect after 500 ms; it then continues after the last id that it received."""


@dataclass(frozen=True)
class PollResult:
    """The result of one poll. ``chunks``: texts to send; ``finished``: the stream is complete after them."""

    chunks: list[str]
    finished: bool


def format_event(id_: str, data: str, event: str | None = None) -> str:
    """Return one server-sent event as text. ``data``: JSON on one line; ``event``: the event's type, None for the default."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}id: {id_}\ndata: {data}\n\n"


async def follow(
    poll: Callable[[], PollResult],
    *,
    interval_seconds: float,
    keep_alive_seconds: float,
    keep_alive_text: str,
    end_text: str,
    is_stopping: Callable[[], bool] = lambda: False,
) -> AsyncIterator[str]:
    """Yield the chunks that ``poll`` returns, until a result is finished. ``keep_alive_text``: sent after ``keep_alive_seconds``
    without a chunk; "" for none. ``end_text``: sent last by a stream of events; "" for a stream of plain text. A stream of events
    also ends when ``is_stopping()`` is True, but then without ``end_text``."""
    last_sent = time.monotonic()
    while True:
        # a stream of text continues until it is cut off, so that no client takes it for complete
        if end_text and is_stopping():
            yield RETRY
            return
        found = await run_sync(poll)
        for chunk in found.chunks:
            yield chunk
        if found.finished:
            if end_text:
                yield end_text
            return
        now = time.monotonic()
        if found.chunks:
            last_sent = now
        elif keep_alive_text and now - last_sent >= keep_alive_seconds:
            last_sent = now
            yield keep_alive_text
        if not found.chunks:
            await anyio.sleep(interval_seconds)
