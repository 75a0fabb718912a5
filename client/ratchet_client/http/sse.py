"""Server-sent events (WHATWG HTML, 9.2): parsing, and following a stream across broken connections and restarts."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

from ratchet_client.http.errors import NOT_A_SERVICE, ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Params, Transport

END_EVENT = "end"
"""The service's last event of a complete stream."""
_LONGEST_DELAY = 2.0


@dataclass(frozen=True)
class ServerEvent:
    """One server-sent event. ``id``: the value of ``Last-Event-ID`` that continues after this event; None if unknown."""

    event: str
    data: str
    id: str | None


def split_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the complete lines, without line ends, of a stream that arrives in the pieces ``texts``."""
    # Not ``str.splitlines``, which also splits at characters such as U+2028 that JSON may contain.
    decoder, rest = io.IncrementalNewlineDecoder(None, translate=True), ""
    for text in texts:
        *lines, rest = (rest + decoder.decode(text)).split("\n")
        yield from lines
    yield from (rest + decoder.decode("", final=True)).split("\n")[:-1]


def parse_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Yield the events in the lines of a stream. An event that the stream's end cuts off is dropped."""
    event, data, last_id = "", list[str](), None
    for line in lines:
        if not line:
            if data or event:
                yield ServerEvent(event or "message", "\n".join(data), last_id)
            event, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            event = value
        elif name == "data":
            data.append(value)
        elif name == "id" and "\0" not in value:
            last_id = value


def follow(
    transport: Transport, path: str, params: Params, finished: Callable[[], bool], last_id: str | None = None,
    on_gap: Callable[[str], None] | None = None,
) -> Generator[ServerEvent]:  # fmt: skip
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
                for event in parse_events(split_lines(response.iter_text())):
                    if event.event == END_EVENT:
                        return
                    last_id = event.id or last_id
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
