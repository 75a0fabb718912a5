"""Screenshots of every web page, empty, with usual jobs and full, in two widths and both themes, and the README's picture:
``PYTHONPATH=. .venv/bin/python docs/make_screenshots.py DIRECTORY [--state usual] [--readme]``. Runs real
jobs (three minutes). For the full state it then adds rows to their database, because real ones would take days."""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from PIL import Image

from ratchet_service.db.engine import Database, sqlite_url
from tests.support import paced_digits
from tests.support.browser import ARGUMENTS, CHROMIUM, playwright
from tests.support.crowd import Crowd, add_files
from tests.support.server import Server, wait_for

DOCS: Final = Path(__file__).parent
TABS: Final = ("overview", "metrics", "hook", "attempts", "checkpoints", "logs", "files", "events", "spec")
PAGES: Final = ("jobs", "queue", "fleet", "compare")
WIDTHS: Final = (1440, 390)
THEMES: Final = ("light", "dark")
TALLEST: Final = 2600
"""Pixels of the height of a picture: a longer page is cut."""
README_VIEW: Final = {"width": 1440, "height": 990}
README_COLOURS: Final = 256
"""Fewer lose the colours of small parts, such as the amber of a preemption."""
TASK: Final = "ratchet_worker.tasks.digits:DigitsTask"
FAILING: Final = """
import torch
from ratchet import Session

model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session() as session:
    model, optimizer = session.prepare(model, optimizer)
    for step in session.steps(400):
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log({"loss": loss})
        print(f"step {session.step} loss {loss.item():.4f}", flush=True)
        if session.step == 140:
            model(torch.randn(8, 32))
"""


def spec(name: str, ranks: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": {"entrypoint": TASK, "args": {"epochs": 60}},
        "world": {"ranks_per_node": ranks, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 60},
        "checkpoint": {"every_steps": 50, "keep_last": 8},
        "policy": {"backoff": 0.2},
    } | changes


FAULTS: Final = [
    {"attempt": 1, "rank": 1, "step": 148, "kind": "kill-rank"},
    {"attempt": 2, "rank": 0, "step": 254, "kind": "preempt"},
    {"attempt": 3, "rank": 2, "step": 448, "kind": "kill-rank"},
]


def empty(server: Server, camera: Camera) -> None:
    """A service without jobs, then with one that no reconciler starts."""
    camera.shoot("empty", {name: f"#/{name}" for name in PAGES})
    job = server.submit(spec("first-job"))
    camera.shoot("queued", {name: f"#/jobs/{job}/{name}" for name in TABS} | {"queue": "#/queue"})


def usual(server: Server, camera: Camera, code: Path) -> str:
    """A job that was killed twice and preempted, a fork of it, one that failed, one that runs and one that waits; return the
    first one."""
    (code / "train.py").write_text(FAILING)
    (code / paced_digits.FILE).write_text(paced_digits.source(0.05))
    interrupted = spec("digits-powersgd", 4, trial={"end_at": 660, "faults": FAULTS}, labels={"team": "vision"})
    job = server.submit(interrupted)
    server.wait_phase(job, "SUCCEEDED", deadline=300)
    [base] = [one for one in server.call("GET", f"/v1/jobs/{job}/checkpoints").json()["items"] if one["step"] == 500]
    changes = {
        "labels": {"team": "vision", "sweep": "saves"},
        "checkpoint": {"every_steps": 25},
        "trial": {"faults": []},
    }
    fork = {"checkpoint_id": base["id"], "name": "digits-more-saves", "spec": changes}
    server.wait_phase(server.call("POST", f"/v1/jobs/{job}/fork", json=fork).json()["id"], "SUCCEEDED")
    failed = server.submit(
        spec(
            "encoder-baseline", 1, task=None, code={"path": str(code)}, script=["train.py"], hook={"name": "allreduce"},
            labels={"team": "speech"}, policy={"backoff": 0.2, "max_failures": 1},
        )
    )  # fmt: skip
    wait_for(lambda: server.job(failed)["phase"] == "FAILED", "the failure", 120)
    endless: dict[str, Any] = {
        "task": {"entrypoint": paced_digits.ENTRYPOINT, "args": {"epochs": 900}},
        "code": {"path": str(code)},
    }
    running = server.submit(spec("digits-long", labels={"team": "vision"}, **endless))
    server.wait_step(running, 120)
    waiting = server.submit(spec("digits-wide", 4, priority=-1, labels={"team": "speech"}))
    wait_for(lambda: server.job(waiting)["reason"], "the reason to wait")
    camera.shoot(
        "usual",
        {
            **{name: f"#/{name}" for name in PAGES if name != "compare"},
            "compare": f"#/compare?job={job}&job={running}",
            **{f"resumed-{name}": f"#/jobs/{job}/{name}" for name in TABS},
            "failed-overview": f"#/jobs/{failed}",
            "waiting-overview": f"#/jobs/{waiting}",
            **{f"running-{name}": f"#/jobs/{running}/{name}" for name in ("overview", "hook")},
        },
    )
    return job


def full(server: Server, camera: Camera, template: str) -> None:
    """Over a hundred jobs with long names, and one with many attempts, ranks, metrics, checkpoints, events and lines."""
    database = Database(sqlite_url(server.paths.database))
    with database.write() as session:
        crowd = Crowd(session, template)
        some = crowd.add_jobs()[:4]
        job = crowd.add_large_job()
    database.dispose()
    add_files(server.paths.job(job))
    server.start()
    compared = "&".join(f"job={one}" for one in [job, template, *some])
    camera.shoot(
        "full",
        {
            **{name: f"#/{name}" for name in PAGES if name != "compare"},
            "compare": f"#/compare?{compared}",
            **{name: f"#/jobs/{job}/{name}" for name in TABS},
        },
    )


class Camera:
    """Takes the pictures of a service's pages."""

    def __init__(self, browser: Any, place: Path, only: str) -> None:
        self.browser, self.place, self.only = browser, place, only
        self.server: Server | None = None

    @contextmanager
    def page(self, theme: str, **view: int) -> Iterator[Any]:
        context = self.browser.new_context(viewport=view, color_scheme=theme)
        yield context.new_page()
        context.close()

    def open(self, page: Any, fragment: str) -> None:
        """Until nothing has been read for a while; a page reads again every two seconds."""
        assert self.server is not None
        page.goto("about:blank")
        pending: set[Any] = set()
        page.on("request", lambda request: pending.add(request) if "follow=" not in request.url else None)
        for ended in ("requestfinished", "requestfailed"):
            page.on(ended, lambda request: pending.discard(request))
        page.goto(f"{self.server.url}/{fragment}")
        page.locator("main h1, main h2").first.wait_for()
        for _ in range(100):
            page.wait_for_timeout(400)
            if not pending:
                return
        raise AssertionError(f"{fragment}: {[one.url for one in pending]}")

    def shoot(self, state: str, pages: dict[str, str]) -> None:
        for theme in THEMES:
            for width in WIDTHS:
                with self.page(theme, width=width, height=900) as page:
                    for name, fragment in pages.items():
                        if self.only not in f"{state}-{name}-{width}-{theme}":
                            continue
                        self.open(page, fragment)
                        height = min(TALLEST, page.evaluate("document.documentElement.scrollHeight"))
                        path = self.place / f"{state}-{name}-{width}-{theme}.png"
                        page.screenshot(
                            path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height}
                        )

    def readme(self, job: str) -> None:
        """The overview of the interrupted job, in few colours: ``docs/job-light.png`` and ``docs/job-dark.png``."""
        for theme in THEMES:
            with self.page(theme, **README_VIEW) as page:
                self.open(page, f"#/jobs/{job}")
                drawn = Image.open(io.BytesIO(page.screenshot()))
            drawn.convert("RGB").quantize(README_COLOURS, dither=Image.Dither.NONE).save(
                DOCS / f"job-{theme}.png", optimize=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--state", choices=["empty", "usual", "full"], help="only this one")
    parser.add_argument("--only", default="", help="only pictures with this in their names, such as queue-390-dark")
    parser.add_argument("--readme", action="store_true", help="write the README's picture, too")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, playwright.sync_playwright() as driver:
        home = Path(place)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        camera = Camera(browser, given.directory, given.only)
        if given.state in (None, "empty"):
            camera.server = Server(home / "empty", "--no-reconciler").start()
            empty(camera.server, camera)
            camera.server.stop()
        if given.state in (None, "usual", "full"):
            (home / "code").mkdir()
            camera.server = Server(home / "busy", "--code-root", place, cpu_slots=4)
            try:
                job = usual(camera.server.start(), camera, home / "code")
                if given.readme:
                    camera.readme(job)
            finally:
                camera.server.stop()
            if given.state in (None, "full"):
                camera.server.options = (*camera.server.options, "--no-reconciler")
                try:
                    full(camera.server, camera, job)
                finally:
                    camera.server.stop()
        browser.close()


if __name__ == "__main__":
    main()
