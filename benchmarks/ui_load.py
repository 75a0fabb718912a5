"""What open web pages ask of their service: recorded in a browser, then asked again as by many."""

from __future__ import annotations

import http.client
import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from benchmarks.service_http import Link, cpu_seconds

_HIDE: Final = """
  Object.defineProperty(document, "hidden", { value: true });
  document.dispatchEvent(new Event("visibilitychange"));"""


class Asked(NamedTuple):
    """A request of a page. ``after``: seconds from its opening."""

    after: float
    path: str

    @property
    def stays_open(self) -> bool:
        return "follow=true" in self.path


def open_pages(browser: Any, url: str, addresses: Mapping[str, str], pid: int, seconds: float, pages: int) -> None:
    """Print what pages of each kind ask for in ``seconds``, and what ``pages`` of them cost the service in process ``pid``."""
    recorded, hidden = record(browser, url, addresses, seconds)
    print(
        f"\nrequests of one page in {seconds:.0f} s: "
        + ", ".join(f"{kind} {len(asked)}" for kind, asked in recorded.items())
    )
    print(f"  hidden: {hidden} of all {len(recorded)} together")
    before, begin = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds / 2)
    idle = (cpu_seconds(pid) - before) / (time.monotonic() - begin)
    kinds = list(recorded.values())
    before, begin = cpu_seconds(pid), time.monotonic()
    waits = replay(url, [kinds[number % len(kinds)] for number in range(pages)], seconds)
    wall = time.monotonic() - begin
    share = (cpu_seconds(pid) - before) / wall
    middle, late = statistics.median(waits), sorted(waits)[int(len(waits) * 0.95)]
    print(f"  {pages} visible pages, of each kind as many: {len(waits) / wall:.1f} requests/s")
    print(f"  service: {share * 100:.1f} % of a core, {idle * 100:.1f} % without pages")
    print(f"  answers: median {middle * 1e3:.1f} ms, 95 % within {late * 1e3:.1f} ms")


def record(browser: Any, url: str, addresses: Mapping[str, str], seconds: float) -> tuple[dict[str, list[Asked]], int]:
    """The requests of one visible page of each kind in ``seconds`` from its opening, all open at the same time; and the number of
    requests in the same time when all are hidden."""
    found: dict[str, list[Asked]] = {}
    pages = []
    for kind, address in addresses.items():
        page, asked, opened = browser.new_context().new_page(), found.setdefault(kind, []), time.monotonic()

        def note(request: Any, asked: list[Asked] = asked, opened: float = opened) -> None:
            path = request.url.removeprefix(url)
            if path.startswith("/v1/"):
                asked.append(Asked(time.monotonic() - opened, path))

        page.on("request", note)
        page.goto(url + address)
        pages.append(page)
    pages[-1].wait_for_timeout(seconds * 1000)
    visible = {kind: [one for one in asked if one.after < seconds] for kind, asked in found.items()}
    for page in pages:
        page.evaluate(_HIDE)
    pages[-1].wait_for_timeout(500)  # what was on its way is sent
    before = sum(map(len, found.values()))
    pages[-1].wait_for_timeout(seconds * 1000)
    hidden = sum(map(len, found.values())) - before
    for page in pages:
        page.context.close()
    return visible, hidden


def replay(url: str, pages: Sequence[Sequence[Asked]], seconds: float) -> list[float]:
    """Ask as ``pages`` did, each from another moment of its ``seconds`` on, and hold their streams open. Return the seconds until
    each answer was there. Raises what a request raised."""
    streams = [_Stream(url, one.path) for asked in pages for one in asked if one.stays_open]
    begin = time.monotonic()

    def ask(number: int) -> list[float]:
        link, tags, waits = Link(url), dict[str, str | None](), []
        shift = seconds * number / len(pages)
        for at, path in sorted(
            ((one.after + shift) % seconds, one.path) for one in pages[number] if not one.stays_open
        ):
            time.sleep(max(0.0, begin + at - time.monotonic()))
            tag = tags.get(path)
            waits.append(link.call("GET", path, **({"If_None_Match": tag} if tag else {}))[0])
            tags[path] = link.etag
        link.close()
        return waits

    with ThreadPoolExecutor(len(pages)) as pool:
        waits = [wait for several in pool.map(ask, range(len(pages))) for wait in several]
    for stream in streams:
        stream.close()
    return waits


class _Stream:
    """A response without an end that is read until it is closed."""

    def __init__(self, url: str, path: str) -> None:
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        connection.request("GET", path)
        self._socket = connection.sock
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"GET {path}: {answer.status}")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while self._socket.recv(65536):
            pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
