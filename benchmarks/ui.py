"""What the web pages cost: bytes on the wire, time until something is seen, a chart of a million steps, and a hundred open pages.

In a real Chromium without a screen, over a real service on SQLite with three running jobs (``scripts/farm``) and 97 ended ones.
``RATCHET_BENCH_ROUNDS`` (default 15) sets the loads of the first page, ``RATCHET_BENCH_STEPS`` (default 1000000) the steps of the
chart, ``RATCHET_BENCH_SECONDS`` (default 60) for how long pages are watched, ``RATCHET_BENCH_PAGES`` (default 100) how many are
open.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from playwright.sync_api import sync_playwright

from benchmarks.series import Told
from benchmarks.series import fill as fill_points
from benchmarks.service_calls import SPEC
from benchmarks.service_http import Link, process, until_written
from benchmarks.service_rows import fill
from benchmarks.service_running import until_running
from benchmarks.stats import estimate, machine
from benchmarks.ui_load import open_pages
from ratchet_contract.paths import HomePaths
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.engine import Database, sqlite_url
from tests.support.browser import ARGUMENTS, CHROMIUM

LIMITS: Final = (60_000, 120_000)
"""Bytes of the first page, and of all pages together."""
RUNNING: Final = 3
JOBS: Final = 100
TABS: Final = ("overview", "metrics", "hook", "attempts", "checkpoints", "logs", "files", "events", "spec")
_METRIC: Final = "train_loss"
_SLOW_ROUNDS: Final = 3
"""Charts of every point."""
_NETWORKS: Final[dict[str, dict[str, float] | None]] = {
    "this machine": None,
    "40 ms, 10 Mbit/s": {"latency": 40, "downloadThroughput": 1.25e6, "uploadThroughput": 1.25e6},
}
_WAYS: Final = {"joined": "/", "each module by itself": "/modules"}
_SETTLED: Final = 700
"""Milliseconds in which a page has loaded all that it needs."""
_ROWS_SEEN: Final = """
  new MutationObserver((_, observer) => {
    if (!document.querySelector("tbody tr")) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => { window.rowsAt = performance.now(); }));
  }).observe(document, { childList: true, subtree: true });"""
_DRAWN: Final = """
  const stroke = CanvasRenderingContext2D.prototype.stroke;
  CanvasRenderingContext2D.prototype.stroke = function (...path) {
    window.drawnAt = performance.now();
    return stroke.apply(this, path);
  };
  const json = Response.prototype.json;
  Response.prototype.json = async function () {
    const data = await json.call(this);
    if (this.url.includes("from_step")) window.answeredAt = performance.now();
    return data;
  };
  addEventListener("mouseup", () => { window.releasedAt = performance.now(); }, true);"""


def main() -> None:
    if CHROMIUM is None:
        raise SystemExit("not measured. chromium not found: apt-get install chromium")
    print(machine())
    rounds, pages = int(os.environ.get("RATCHET_BENCH_ROUNDS", "15")), int(os.environ.get("RATCHET_BENCH_PAGES", "100"))
    steps = int(os.environ.get("RATCHET_BENCH_STEPS", "1000000"))
    seconds = float(os.environ.get("RATCHET_BENCH_SECONDS", "60"))
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        measure(Path(folder), rounds=rounds, steps=steps, seconds=seconds, pages=pages)


def measure(folder: Path, *, rounds: int, steps: int, seconds: float, pages: int) -> None:
    with served(folder) as scene, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        weight(browser, scene)
        first_paint(browser, scene, rounds)
        chart(browser, scene, steps, rounds)
        open_pages(browser, scene.url, addresses(scene), scene.service_pid, seconds, pages)
        browser.close()


@dataclass(frozen=True)
class Scene:
    """A service over ``JOBS`` jobs; those in ``running`` report."""

    url: str
    service_pid: int
    database: Path
    running: list[str]


@contextmanager
def served(folder: Path) -> Iterator[Scene]:
    home, inbox, log, farm_log = folder / "home", folder / "inbox", folder / "log", folder / "farm.log"
    home.mkdir(mode=0o700)
    inbox.mkdir()
    command = ["benchmarks.scripts.pages_service", str(home), str(inbox), str(RUNNING)]
    farmed = ["benchmarks.scripts.farm", str(inbox), str(folder / "farm")]
    with process(farmed, farm_log), process(command, log) as service:
        paths = HomePaths(home)
        url = json.loads(until_written(paths.service_file, service, log))["url"]
        link = Link(url)
        running = [link.call("POST", "/v1/jobs", SPEC)[1]["id"] for _ in range(RUNNING)]
        until_running(link, RUNNING, log, farm_log)
        template = link.call("POST", "/v1/jobs", SPEC)[1]["id"]
        link.call("POST", f"/v1/jobs/{template}/cancel")
        link.close()
        database = Database(sqlite_url(paths.database))
        fill(database, 1, JOBS - RUNNING - 1, template)
        database.dispose()
        yield Scene(url, service.pid, paths.database, running)


def addresses(scene: Scene) -> dict[str, str]:
    """Each kind of page; a job's are those of one that is running."""
    one, other = scene.running[:2]
    tabs = {tab: f"/#/jobs/{one}" + ("" if tab == "overview" else f"/{tab}") for tab in TABS}
    return {
        "jobs": "/#/jobs",
        **tabs,
        "compare": f"/#/compare?job={one}&job={other}",
        "queue": "/#/queue",
        "fleet": "/#/fleet",
    }


def _page(browser: Any, script: str = "") -> Any:
    """An empty page with an empty cache."""
    # bypass_csp: the driver's own expressions are evaluated in the page
    page = browser.new_context(viewport={"width": 1440, "height": 900}, bypass_csp=True).new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(f"{{{script}}}")
    return page


# --- bytes ---------------------------------------------------------------------------------------------------------------


def weight(browser: Any, scene: Scene) -> None:
    """Of the pages' own files, as received; what the API answers is not counted."""
    print("\nbytes of the pages' files, compressed")
    totals = {}
    for way, path in _WAYS.items():
        page = _page(browser)
        got: list[Any] = []
        page.on("requestfinished", lambda request, got=got: got.append(request))
        first: dict[str, int] = {}
        for address in addresses(scene).values():
            page.goto(scene.url + address.replace("/", path, 1))
            page.locator("main h1").first.wait_for()
            page.wait_for_timeout(_SETTLED)
            first = first or _files(scene, got)
        files = _files(scene, got)
        totals[way] = sum(first.values()), sum(files.values())
        print(
            f"  {way:<22} first page {totals[way][0]} in {len(first)} files, all pages {totals[way][1]} in {len(files)} files"
        )
        if way == "joined":
            print(f"    {', '.join(f'{name} {size}' for name, size in files.items())}")
        page.context.close()
    for what, ours, theirs, limit in zip(("first page", "all pages"), *totals.values(), LIMITS, strict=True):
        verdict = "met" if ours <= limit else "MISSED"
        print(f"  {what}: {ours / theirs:.2f} of the bytes of single modules; limit {limit}: {verdict}")


def _files(scene: Scene, requests: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for request in requests:
        name = request.url.removeprefix(scene.url)
        if not name.startswith("/v1/"):
            found[name] = found.get(name, 0) + request.sizes()["responseBodySize"]
    return found


# --- the first page ------------------------------------------------------------------------------------------------------


def first_paint(browser: Any, scene: Scene, rounds: int) -> None:
    """Loads with an empty cache, the ways by turns."""
    print(f"\nmilliseconds until the list of {JOBS} jobs is seen, {rounds} loads with an empty cache, medians [95 %]")
    for network, conditions in _NETWORKS.items():
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
        for number in range(rounds):
            for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
                found[way].append(_load(browser, scene.url + _WAYS[way], conditions))
        for which, what in enumerate(("first contentful paint", "rows of jobs")):
            ours, theirs = ([times[which] for times in found[way]] for way in _WAYS)
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            print(
                f"  {network + ', ' + what:<42} {estimate(ours)}; modules {estimate(theirs)}; ratio {estimate(ratios)}"
            )


def _load(browser: Any, address: str, conditions: dict[str, float] | None) -> tuple[float, float]:
    page = _page(browser, _ROWS_SEEN)
    if conditions is not None:
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        session.send("Network.emulateNetworkConditions", {"offline": False, **conditions})
    page.goto(address)
    page.wait_for_function("window.rowsAt")
    rows = page.evaluate("window.rowsAt")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.context.close()
    return float(paint), float(rows)


# --- a chart -------------------------------------------------------------------------------------------------------------


def chart(browser: Any, scene: Scene, steps: int, rounds: int) -> None:
    """A metric with a value at every one of ``steps`` steps: as the service keeps and sends it, and every point of it."""
    database = Database(sqlite_url(scene.database))
    kept, whole = Told(database, 1, Bounds(), [_METRIC]), Told(database, 2, Bounds(), [_METRIC])
    while kept.step < steps:
        kept.report()
    fill_points(database, whole, steps)
    database.dispose()
    ours, theirs = list[_Chart](), list[_Chart]()
    for number in range(rounds):
        ours.append(_chart(browser, scene.url, kept.job))
        if number < _SLOW_ROUNDS:
            theirs.append(_chart(browser, scene.url, whole.job, every_point=True))
    print(f"\na chart of a metric at {steps} steps, medians [95 %]")
    bytes_ours, bytes_theirs = ours[0].bytes, theirs[0].bytes
    print(f"  bytes of the answer: {bytes_ours}; every point {bytes_theirs}; ratio {bytes_ours / bytes_theirs:.6f}")
    for what, a, b in (
        ("until drawn, with an empty cache", [one.drawn for one in ours], [one.drawn for one in theirs]),
        ("until the points of a zoom are drawn", [one.zoomed for one in ours], [one.zoomed for one in theirs]),
    ):
        ratios = [value / estimate(b).median for value in a]
        print(f"  ms {what}: {estimate(a)}; every point {estimate(b)}; ratio {estimate(ratios)}")


class _Chart(NamedTuple):
    """Bytes of the answer with the points, and milliseconds."""

    bytes: int
    drawn: float
    zoomed: float


def _chart(browser: Any, url: str, job: str, *, every_point: bool = False) -> _Chart:
    page = _page(browser, _DRAWN)
    asked: list[Any] = []
    page.on("requestfinished", lambda request: asked.append(request) if "name=" in request.url else None)
    if every_point:
        target = f"{url}/every-point/{job}"
        page.route(
            re.compile("metrics.*name="),
            lambda route: route.continue_(url=f"{target}?{route.request.url.partition('?')[2]}"),
        )
    page.goto(f"{url}/#/jobs/{job}/metrics")
    page.wait_for_function("window.drawnAt && document.querySelector('.u-over')")
    drawn = float(page.evaluate("window.drawnAt"))
    over = page.locator(".u-over").first.bounding_box()
    places = [(over["x"] + share * over["width"], over["y"] + over["height"] / 2) for share in (0.4, 0.5, 0.6)]
    page.mouse.move(*places[0])
    page.mouse.down()
    page.mouse.move(*places[1])
    page.mouse.move(*places[2])
    page.mouse.up()
    page.wait_for_function("window.answeredAt && window.drawnAt > window.answeredAt")
    zoomed = float(page.evaluate("window.drawnAt - window.releasedAt"))
    received = asked[0].sizes()["responseBodySize"]
    page.context.close()
    return _Chart(received, drawn, zoomed)


if __name__ == "__main__":
    main()
