"""A real Chromium without a screen, and what its pages did that no page may do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the development tools have it: make test")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
    # Each window would draw the list below its address bar in processes of its own, which take more than a page of Ratchet does.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,SpareRendererForSitePerProcess",
)  # fmt: skip
TIMEOUT = 30_000
"""Milliseconds for which an expectation waits; a loaded machine draws late."""


@dataclass
class Watched:
    """A page of the browser and its faults: errors on the console, and requests to other hosts than ``base``."""

    page: Any
    base: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """Patterns of messages on the console that the test provokes."""

    def open(self, fragment: str = "") -> Any:
        """Go to the page behind ``#``; return it."""
        self.page.goto(f"{self.base}/{fragment}")
        return self.page

    def assert_clean(self) -> None:
        errors = [text for text in self.errors if not any(re.search(pattern, text) for pattern in self.expected)]
        assert not errors, errors
        assert not self.foreign, self.foreign


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        yield browser
        browser.close()


def watch(browser: Any, base: str, *, token: str = "", **options: Any) -> Watched:
    """Open an empty page that may go to ``base``. ``token``: signed in with it. ``options``: of the context, such as
    ``viewport`` and ``color_scheme``."""
    context = browser.new_context(**options)
    if token:
        context.add_init_script(f"sessionStorage.setItem('ratchet.token', '{token}')")
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    found = Watched(page, base.rstrip("/"))
    page.on("console", lambda message: found.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: found.errors.append(str(error)))

    def requested(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and not request.url.startswith(f"{found.base}/"):
            found.foreign.append(request.url)
        found.requests.append(request.url)

    page.on("request", requested)
    return found
