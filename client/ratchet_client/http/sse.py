"""Server-sent events (WHATWG HTML, 9.2): following a stream across broken connections and restarts of the service."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from httpx_sse import EventSource, ServerSentEvent

from ratchet_client.http.errors import NOT_A_SERVICE, ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Params, Transport

END_EVENT = "end"
"""The service's last event of a complete stream."""
_LONGEST_DELAY = 2.0


def follow(
    transport: Transport, path: str, params: Params, finished: Callable[[], bool], last_id: str | None = None,
    on_gap: Callable[[str], None] | None = None,
) -> Generator[ServerSentEvent]:  # fmt: skip
    """Yield the events of the stream at ``path`` in order; connect again when the stream breaks. ``finished``: called when a
    stream has closed, True if no new events will come. ``on_gap``: called with the error text at an interruption. ``last_id``:
    start after this event.

    Raise ``ServiceUnreachable`` or ``ServiceFault`` after ``transport.retry_for`` seconds without an open stream; other errors,
    and a response from another program, at once.
    """
    delay, silent_since, done = 0.1, None, False
    while True:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        try:
            with transport.stream(path, params, headers) as response:
                silent_since, delay = None, 0.1
                for event in EventSource(response).iter_sse():
                    if event.event == END_EVENT:
                        return
                    last_id = event.id or last_id
                    if event.data:  # httpx-sse also yields one for a comment or a "retry" after an event with an id
                        yield event
            if done:
                return
            done = finished()
        except (ServiceUnreachable, ServiceFault) as error:
            if error.code == NOT_A_SERVICE:
                raise
            now = time.monotonic()
            if silent_since is None:
                silent_since = now
                if on_gap is not None:
                    on_gap(error.detail)
            if now - silent_since > transport.retry_for:
                raise
        time.sleep(delay)
        delay = min(delay * 2, _LONGEST_DELAY)
