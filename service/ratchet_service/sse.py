"""Server-sent events (WHATWG HTML, 9.2) and followed text, from a look that is repeated until there is nothing more to come."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio
from anyio.to_thread import run_sync

END: str = "event: end\ndata: {}\n\n"
RETRY: str = "retry: 500\n\n"
"""Milliseconds until a follower asks again, where it goes on after its last id."""


@dataclass(frozen=True)
class Look:
    """What one look found: chunks to send, and whether nothing can follow any more."""

    chunks: list[str]
    finished: bool


def frame(id_: str, data: str, event: str | None = None) -> str:
    """One event; ``data`` is JSON on one line."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}id: {id_}\ndata: {data}\n\n"


async def follow(
    look: Callable[[], Look],
    *,
    interval: float,
    keep_alive: float,
    idle: str,
    end: str,
    leaving: Callable[[], bool] = lambda: False,
) -> AsyncIterator[str]:
    """Chunks as they come. ``idle`` is sent every ``keep_alive`` seconds of silence, so that a dead follower is noticed;
    ``end`` is the last chunk of a stream that is complete. The looks run in a worker thread, one after the other.
    ``leaving``: the service ends; events are told to come again, text is left to be cut, so that nobody takes it for whole."""
    spoke = time.monotonic()
    while True:
        if end and leaving():
            yield RETRY
            return
        found = await run_sync(look)
        for chunk in found.chunks:
            yield chunk
        if found.finished:
            if end:
                yield end
            return
        now = time.monotonic()
        if found.chunks:
            spoke = now
        elif idle and now - spoke >= keep_alive:
            spoke = now
            yield idle
        if not found.chunks:
            await anyio.sleep(interval)
