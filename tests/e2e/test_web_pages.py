"""The web pages in a real Chromium, over a real service whose jobs train, are killed and resume."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.cli.doctor.network import service
from ratchet_client.cli.shared.options import Settings
from ratchet_contract import env_vars
from ratchet_contract.api.roles import LOCAL_OWNER, Role
from ratchet_contract.phases import AttemptPhase, Cause, JobPhase
from ratchet_service.db.engine import Database, sqlite_url, utc_now
from ratchet_service.db.models import Attempt, Event, Job
from ratchet_worker.ipc.progress_counter import CounterReader
from tests.support import paced_digits
from tests.support.browser import Watched, chromium, watch
from tests.support.cli import Cli
from tests.support.docs import ROOT
from tests.support.reports import recorded_text
from tests.support.server import Server, rank_pid, wait_for
from tests.support.tokens import make_token

__all__ = ["chromium"]
AXE = ROOT / "tests" / "web" / "node_modules" / "axe-core" / "axe.min.js"
TABS = ("overview", "metrics", "hook", "attempts", "checkpoints", "logs", "files", "events", "spec")
PAGES = ("#/jobs", "#/queue", "#/fleet")
HOSTILE_IN = ("jobs", "overview", "metrics", "attempts", "logs", "files", "events")
"""Pages that show the failed job's labels, messages, metric names, lines or files."""
HOSTILE = "<img src=x onerror=window.hostile=1><script>window.hostile=1</script>"
SCRIPT = f"""
import pathlib
import torch
from ratchet import Session

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Session() as session:
    model, optimizer = session.prepare(model, optimizer)
    for step in session.steps(30):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log({{"loss": loss, "{HOSTILE.replace("=", "")}": 1.0}})
        print({HOSTILE!r}, flush=True)
        if session.step == 25:
            pathlib.Path({HOSTILE.replace("/", "")!r}).write_text({HOSTILE!r})
            raise ValueError({HOSTILE!r})
"""


def digits(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 3, "width": 8}},
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "hook": {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 10},
        "checkpoint": {"every_steps": 10},
        "policy": {"backoff": 0.2},
    } | changes


KILLED = {"end_at": 60, "faults": [{"attempt": 1, "rank": 1, "step": 25, "kind": "kill-rank"}]}
LONG = {"entrypoint": paced_digits.ENTRYPOINT, "args": {"epochs": 9999, "width": 8}}
TABS_WITH_OWN_STATE = {
    "failed": ("overview", "logs", "files", "events"),
    "running": ("overview", "metrics", "hook", "checkpoints", "logs"),
    "waiting": ("overview", "hook", "attempts", "checkpoints"),
}
"""What differs from the resumed job's tabs, of which all are looked at."""


@dataclass
class Scene:
    """A service with a job that was killed and resumed, a failed one with hostile content, one that runs, and one that waits."""

    server: Server
    token: str
    code: Path
    resumed: str
    failed: str
    running: str
    waiting: str


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("service")
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (code / paced_digits.FILE).write_text(paced_digits.source(0.3))
    server = Server(folder / "home", "--auth", "token", "--code-root", str(folder), cpu_slots=4)
    try:
        server.start().use_admin_token()
        resumed = server.submit(digits("resumed", trial=KILLED, labels={"team": "vision"}))
        failed = server.submit(
            digits(
                "failed", task=None, code={"path": str(code)}, script=["train.py"], hook={"name": "allreduce"},
                labels={"note": HOSTILE}, policy={"backoff": 0.2, "max_failures": 1},
            )
        )  # fmt: skip
        server.wait_phase(resumed, "SUCCEEDED")
        wait_for(lambda: server.job(failed)["phase"] == "FAILED", "the failure", 120)
        running = server.submit(digits("running", task=LONG, code={"path": str(code)}))
        server.wait_step(running, 20)
        wide = {"ranks_per_node": 4, "device": "cpu"}
        by_time = {"every_steps": None, "every_seconds": 600}
        waiting = server.submit(digits("waiting", world=wide, priority=-1, checkpoint=by_time))
        yield Scene(server, str(server.token), code, resumed, failed, running, waiting)
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def closed_afterwards(chromium: Any) -> Iterator[None]:
    """A page that stays open polls and draws for the rest of the module."""
    yield
    for context in chromium.contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        context.close()


def violations(page: Any) -> list[str]:
    """What axe finds on the page as it is; nothing without axe-core (npm ci in tests/web)."""
    if not AXE.is_file():
        return []
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}: {one['help']}" for one in found]


def settle(page: Any) -> None:
    """Until the page has its content: nothing is being loaded, and there is a heading."""
    page.wait_for_load_state("networkidle")
    page.locator("main h1, main h2").first.wait_for()


def addresses(scene: Scene) -> list[str]:
    looked_at = {"resumed": TABS, **TABS_WITH_OWN_STATE}
    tabs = [f"#/jobs/{getattr(scene, name)}/{tab}" for name, tabs in looked_at.items() for tab in tabs]
    return [*PAGES, f"#/compare?job={scene.resumed}&job={scene.failed}", *tabs]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_every_page_is_accessible_loads_only_its_own_files_and_fits_the_width(
    scene: Scene, chromium: Any, scheme: str, width: int
) -> None:
    seen = watch(
        chromium,
        str(scene.server.url),
        token=scene.token,
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
    )
    wrong = []
    for address in addresses(scene):
        page = seen.open(address)
        settle(page)
        wrong += [f"{address}: {text}" for text in violations(page)]
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            wrong.append(f"{address}: is wider than the window")
    assert not wrong, "\n".join(wrong)
    seen.assert_clean()


def test_what_a_job_wrote_is_shown_as_text_everywhere(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    dialogs: list[str] = []
    seen.page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    shown = []
    for address in [*PAGES, *(f"#/jobs/{scene.failed}/{tab}" for tab in TABS)]:
        page = seen.open(address)
        settle(page)
        if address.endswith(HOSTILE_IN):
            page.get_by_text("onerror").first.wait_for()
            shown.append(address)
        assert page.evaluate("window.hostile") is None, address
    assert len(shown) == len(HOSTILE_IN)
    assert not dialogs
    seen.assert_clean()


def test_token_is_asked_for_once_and_kept_for_the_tab(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url))
    seen.expected = ("401",)
    page = seen.open()
    page.get_by_label("API token").fill("rt_wrong")
    page.get_by_role("button", name="Sign in").click()
    page.locator("dialog .notice").wait_for()
    page.get_by_label("API token").fill(scene.token)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="resumed", exact=True).wait_for()
    page.reload()
    page.get_by_role("link", name="resumed", exact=True).wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API token").wait_for()
    seen.assert_clean()


def test_failed_job_shows_cause_last_lines_and_the_way_on(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{scene.failed}")
    page.get_by_role("heading", name=re.compile("Failed: A rank raised an exception")).wait_for()
    text = page.inner_text("main")
    assert f"ValueError: {HOSTILE}" in text
    assert f"ratchet resume {scene.failed} --code ." in text


def test_resumed_job_shows_what_the_kill_cost_and_that_the_resume_was_exact(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{scene.resumed}")
    page.get_by_text("steps that were done again gave the same bits").wait_for()
    [_, second] = scene.server.attempts(scene.resumed)
    redone = second["redone"]
    assert redone["equal"] == redone["compared"] > 0
    text = page.inner_text("main")
    assert f"{redone['equal']} of {redone['compared']}" in text
    assert "rank-killed" in text and "exact, proved" in text
    lost = sum(attempt["steps_lost"] for attempt in scene.server.attempts(scene.resumed))
    assert f"{lost} steps lost" in text and "ended early" in text
    page.get_by_role("button", name="Fork", exact=True).wait_for()
    assert page.get_by_role("button", name="Resume", exact=True).count() == 0, "a job that has succeeded is not resumed"
    page.get_by_role("region", name="Resume of attempt 2").get_by_role("row", name="optimizer").wait_for()
    page = seen.open(f"#/jobs/{scene.resumed}/attempts")
    page.get_by_role("region", name="Resume of attempt 2").get_by_role("row", name="optimizer").wait_for()
    lists = [url for url in seen.requests if "/attempts?" in url]
    assert lists and all("exclude=components" in url for url in lists)


def test_nothing_is_said_of_a_resume_whose_report_is_missing(scene: Scene, chromium: Any) -> None:
    def without_report(route: Any) -> None:
        sent = {name: text for name, text in route.request.headers.items() if name != "if-none-match"}
        answer = route.fetch(headers=sent)
        found = answer.json()
        for one in found["items"]:
            one |= {"resume_report": None, "proof": None, "redone": one["redone"] | {"compared": 0, "equal": 0}}
        route.fulfill(response=answer, json=found)

    seen = watch(chromium, str(scene.server.url), token=scene.token)
    seen.page.route("**/attempts?*", without_report)
    page = seen.open(f"#/jobs/{scene.resumed}")
    page.get_by_text("not known").first.wait_for()
    assert "restored exactly" not in page.inner_text("main")
    assert page.locator(".card.good", has_text="Were the resumes exact?").count() == 0
    seen.assert_clean()


def test_attempt_that_cannot_be_read_is_named_with_the_error(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    seen.expected = ("500",)
    broken = {"status": 500, "json": {"detail": "the database is locked"}}
    seen.page.route("**/attempts/2", lambda route: route.fulfill(**broken))
    page = seen.open(f"#/jobs/{scene.resumed}/attempts")
    page.get_by_text("the database is locked").wait_for()
    page.get_by_role("heading", name="Attempt 2:").wait_for()
    seen.assert_clean()


def test_kill_and_resume_are_seen_live(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{scene.running}")
    page.get_by_text("RUNNING").first.wait_for()
    page.evaluate("window.loadedOnce = true")
    _, paths = scene.server.wait_step(scene.running, 20, saved=True)
    reading = CounterReader(paths.counter(0)).read()
    assert reading is not None
    between_saves = reading.finished // 10 * 10 + 15  # so that the kill loses steps, which are done again and compared
    number, paths = scene.server.wait_step(scene.running, between_saves)
    os.kill(rank_pid(paths, 1), signal.SIGKILL)
    page.get_by_text("rank-killed").first.wait_for()
    scene.server.wait_step(scene.running, 40, after_attempt=number)
    page.get_by_text("exact, proved").first.wait_for()
    assert page.evaluate("window.loadedOnce"), "the page was loaded again"
    seen.assert_clean()


def confirm(page: Any, button: str, line: str, **values: str) -> None:
    """Press an action's button, fill in its dialog, see its command line, and confirm."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    for label, value in values.items():
        dialog.get_by_label(label, exact=True).fill(value)
    assert line in dialog.inner_text()
    dialog.get_by_role("button", name=button, exact=True).click()
    dialog.wait_for(state="detached")


def test_actions_do_what_their_command_lines_say(scene: Scene, chromium: Any) -> None:
    server = scene.server
    alone = {"ranks_per_node": 1, "device": "cpu"}
    job = server.submit(digits("acted-on", task=LONG, code={"path": str(scene.code)}, world=alone))
    try:
        server.wait_step(job, 12)
        seen = watch(chromium, str(server.url), token=scene.token)
        page = seen.open(f"#/jobs/{job}")
        page.get_by_text("RUNNING").first.wait_for()
        page.set_viewport_size({"width": 390, "height": 900})
        ends = [
            box["x"] + box["width"] for box in (one.bounding_box() for one in page.locator(".actions button").all())
        ]
        assert len(ends) == 7 and max(ends) <= 390, "no action is out of sight on a phone"
        page.set_viewport_size({"width": 1440, "height": 900})
        confirm(page, "Checkpoint now", f"ratchet checkpoint {job}")
        wait_for(lambda: any(e["type"] == "checkpoint" for e in server.events(job)), "the checkpoint", 30)
        confirm(page, "Priority", f"ratchet label {job} --priority 7", Priority="7")
        confirm(page, "Labels", f"ratchet label {job} team=vision", Labels="team=vision")
        wait_for(lambda: server.job(job)["priority"] == 7, "the priority")
        assert server.job(job)["labels"] == {"team": "vision"}
        confirm(page, "Preempt", f"ratchet preempt {job}")
        server.wait_step(job, 12, after_attempt=1)
        confirm(page, "Suspend", f"ratchet suspend {job}")
        server.wait_phase(job, "SUSPENDED")
        page.get_by_role("button", name="Resume", exact=True).click()
        stored = [one["step"] for one in server.call("GET", f"/v1/jobs/{job}/checkpoints").json()["items"]]
        offered = page.get_by_role("dialog").get_by_label("From").locator("option[value]:not([value=''])")
        offered.first.wait_for(state="attached")
        assert sorted(int(str(one.get_attribute("value"))) for one in offered.all()) == sorted(stored)
        page.get_by_role("dialog").get_by_label("From").select_option(str(max(stored)))
        assert f"ratchet resume {job} --from-step {max(stored)}" in page.get_by_role("dialog").inner_text()
        page.get_by_role("button", name="Back").click()
        confirm(
            page, "Resume", f"ratchet resume {job} --world 2 --on-hook-mismatch redistribute", **{"Ranks per node": "2"}
        )
        server.wait_step(job, max(stored) + 2, after_attempt=2)
        report = wait_for(lambda: server.attempts(job)[-1]["resume_report"], "its resume report")
        assert report["world_size"] == 2
        page.get_by_role("button", name="Suspend", exact=True).wait_for()
        confirm(page, "Suspend", f"ratchet suspend {job}")
        server.wait_phase(job, "SUSPENDED")
        stored = [one["step"] for one in server.call("GET", f"/v1/jobs/{job}/checkpoints").json()["items"]]
        page.get_by_role("link", name="Checkpoints", exact=True).click()
        page.get_by_role("link", name=str(min(stored)), exact=True).click()
        confirm(page, "Resume from here", f"ratchet resume {job} --from-step {min(stored)}")
        server.wait_step(job, min(stored) + 2, after_attempt=3)
        assert server.attempts(job)[-1]["base"]["step"] == min(stored)
        page.get_by_role("button", name="Cancel", exact=True).wait_for()
        confirm(page, "Cancel", f"ratchet cancel {job}")
        server.wait_phase(job, "CANCELLED")
        page.get_by_text(
            "CANCELLED", exact=True
        ).first.wait_for()  # and with it the newest checkpoint, from which the fork begins
        confirm(page, "Fork", "ratchet fork", Name="branch")
        page.get_by_role("heading", name="branch").wait_for()
        [fork] = [one for one in server.call("GET", "/v1/jobs").json()["items"] if one["name"] == "branch"]
        start = int(fork["forked_from"].partition("step-")[2].partition(".")[0])
        server.wait_step(fork["id"], start + 1)
        page.get_by_role("link", name="Attempts", exact=True).click()
        page.get_by_text("Began from").wait_for()
        links = page.get_by_role("link", name=f"step {start}", exact=True).all()  # in the head, and of the attempt
        place = f"#/jobs/{job}/checkpoints?checkpoint={fork['forked_from'].partition('/')[2]}"
        assert [one.get_attribute("href") for one in links] == [place] * 2
        server.call("POST", f"/v1/jobs/{fork['id']}/cancel")
        server.wait_phase(fork["id"], "CANCELLED")
        seen.assert_clean()
    finally:
        if server.job(job)["phase"] not in ("CANCELLED", "SUCCEEDED"):
            server.call("POST", f"/v1/jobs/{job}/cancel")


def test_search_in_long_logs_goes_on_until_it_has_found_the_line(scene: Scene, chromium: Any) -> None:
    """One answer of the service covers 16 MiB of a log."""
    (scene.code / "chatty.py").write_text("for n in range(400): print('x' * 99_999)\nprint('a needle')\n")
    long = digits("chatty", task=None, code={"path": str(scene.code)}, script=["chatty.py"], hook={"name": "allreduce"})
    job = scene.server.submit(long | {"world": {"ranks_per_node": 1, "device": "cpu"}})
    scene.server.wait_phase(job, "SUCCEEDED")
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{job}/logs?search=needle")
    page.locator(".line", has_text="a needle").wait_for()
    page.get_by_text("End of the log.").wait_for()
    seen.assert_clean()


def test_checkpoint_is_verified_and_pinned_by_the_page(scene: Scene, chromium: Any) -> None:
    checkpoints = f"/v1/jobs/{scene.resumed}/checkpoints"
    [newest, *_] = scene.server.call("GET", checkpoints).json()["items"]
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{scene.resumed}/checkpoints?checkpoint={newest['id']}")
    confirm(page, "Verify", f"ratchet checkpoints verify {scene.resumed} {newest['id']}")
    page.get_by_text("Every byte is as it was written").wait_for()
    confirm(page, "Pin", f"ratchet checkpoints pin {scene.resumed} {newest['id']}")
    wait_for(lambda: scene.server.call("GET", checkpoints).json()["items"][0]["pinned"], "the pin")
    confirm(page, "Unpin", f"ratchet checkpoints unpin {scene.resumed} {newest['id']}")
    wait_for(lambda: not scene.server.call("GET", checkpoints).json()["items"][0]["pinned"], "the pin's end")
    page.get_by_text("The job has succeeded: a fork goes on from here.").wait_for()
    seen.assert_clean()


def test_selected_jobs_are_cancelled_together_after_a_question(chromium: Any, idle_server: Server) -> None:
    server = idle_server
    first, second, other = (server.submit(digits(name)) for name in ("first", "second", "other"))
    seen = watch(chromium, str(server.url))
    page = seen.open("#/jobs")
    for name in ("first", "second"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Cancel (2)").click()
    assert {server.job(job)["phase"] for job in (first, second)} == {"QUEUED"}, "nothing is done before the question"
    dialog = page.get_by_role("dialog")
    assert "Jobs: " in dialog.inner_text() and 'do ratchet cancel "$job"' in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel (2)").click()
    page.get_by_text("Cancel: 2 of 2 done.").wait_for()
    assert [server.job(job)["phase"] for job in (first, second, other)] == ["CANCELLED", "CANCELLED", "QUEUED"]
    seen.assert_clean()


@pytest.mark.slow
def test_parked_agents_are_shown_on_the_fleet_page_and_by_doctor(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(3600)\n")
    server = Server(tmp_path / "home", afresh=True, variables={env_vars.STANDBY: "processes=1,seconds=2"})
    try:
        server.start()
        seen = watch(chromium, str(server.url))
        page = seen.open("#/fleet")
        settle(page)
        line = page.get_by_text("parked agent")
        assert line.count() == 0
        one = {"ranks_per_node": 1, "device": "cpu"}
        job = server.submit({"name": "waits", "code": {"path": str(tmp_path)}, "script": ["train.py"], "world": one})
        wait_for(lambda: server.call("GET", "/v1/fleet").json()["parked"]["ready"], "a parked agent", 120)
        page.reload()
        line.wait_for()
        assert re.fullmatch(r"1 parked agent \(fast start\), [1-9]\d\d MB", line.inner_text())
        (row,) = (one for one in service(Settings(None, server.home)) if one.name == "parked agents")
        assert row.status == "ok" and re.fullmatch(r"on, 1 parked, [1-9]\d\d MiB", row.value)
        server.call("POST", f"/v1/jobs/{job}/cancel")
        line.wait_for(state="detached", timeout=60_000)
        seen.assert_clean()
    finally:
        server.stop()


def test_viewer_sees_no_actions(scene: Scene, chromium: Any) -> None:
    database = Database(sqlite_url(scene.server.paths.database))
    token = make_token(database, LOCAL_OWNER, Role.VIEWER)
    database.dispose()
    seen = watch(chromium, str(scene.server.url), token=token)
    page = seen.open(f"#/jobs/{scene.running}")
    page.get_by_role("heading", name="running").wait_for()
    page.wait_for_load_state("networkidle")
    assert page.get_by_role("button", name=re.compile("Cancel|Suspend|Fork|Preempt")).count() == 0
    page = seen.open("#/jobs")
    page.get_by_label("Select running").check()
    page.get_by_text("1 job selected").wait_for()
    assert page.get_by_role("group", name="Actions on the selected jobs").get_by_role("button").count() == 0


HIDE = (
    "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); "
    "document.dispatchEvent(new Event('visibilitychange', {bubbles: true}))"
)


def test_spec_shows_lines_without_a_value_on_request(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{scene.waiting}/spec")
    lines = page.locator(".yamlline")
    page.get_by_role("button", name=re.compile("Show [0-9]+ lines without a value")).click()
    hide = page.get_by_role("button", name=re.compile("Hide [0-9]+ lines without a value"))
    hide.wait_for()
    whole = [text.strip() for text in lines.all_inner_texts()]
    hide.click()
    page.get_by_role("button", name=re.compile("Show [0-9]+ lines")).wait_for()
    shown = [text.strip() for text in lines.all_inner_texts()]
    without = ["image: null", "env: {}", "resources:"]  # what is below the last one has no value
    assert set(without) <= set(whole) and not set(without) & set(shown)
    # null is a choice there: no saves by steps
    empty = re.compile(r":( null| \[\]| \{\})?$")
    values = [text for text in whole if not empty.search(text) or text == "every_steps: null"]
    assert "every_steps: null" in values and [text for text in shown if not text.endswith(":")] == values
    assert "policy:" in shown
    seen.assert_clean()


def test_hidden_page_asks_for_nothing(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open("#/jobs")
    settle(page)
    page.evaluate(HIDE % "true")
    page.wait_for_timeout(500)  # what was on its way arrives
    before = len(seen.requests)
    page.wait_for_timeout(5000)  # two polls of a visible page
    assert len(seen.requests) == before
    with page.expect_request(re.compile("/v1/jobs")):
        page.evaluate(HIDE % "false")


def test_restarted_service_needs_no_reload(chromium: Any, tmp_path: Path) -> None:
    with_port = _free_port()
    server = Server(tmp_path / "home", "--no-reconciler")
    server.options = (*server.options, "--port", str(with_port))
    try:
        server.start()
        job = server.submit(digits("before"))
        seen = watch(chromium, str(server.url))
        seen.expected = ("ERR_CONNECTION", "Failed to load resource")
        page = seen.open("#/jobs")
        page.get_by_role("link", name="before", exact=True).wait_for()
        server.kill()
        page.get_by_text("The service does not answer").wait_for()
        assert page.get_by_role("link", name="before", exact=True).count() == 1, "what was known stays in sight"
        server.start()
        server.submit(digits("after"))
        page.get_by_role("link", name="after", exact=True).wait_for()
        page.get_by_text("The service does not answer").wait_for(state="detached")
        assert job
        seen.assert_clean()
    finally:
        server.stop()


@pytest.fixture
def waiting_job(idle_server: Server) -> Iterator[tuple[Server, Database, str]]:
    """A service that starts no job, its database, and a job in it."""
    database = Database(sqlite_url(idle_server.paths.database))
    yield idle_server, database, idle_server.submit(digits("waiting"))
    database.dispose()


@pytest.mark.parametrize("width", [390, 1440])
def test_long_message_of_a_failure_leaves_the_page_its_width_and_what_to_do_in_sight(
    waiting_job: tuple[Server, Database, str], chromium: Any, width: int
) -> None:
    server, database, job = waiting_job
    text = "\n".join(f"line {n}" for n in range(300)) + "x" * 3000
    with database.write() as session:
        row = session.get_one(Job, job)
        row.phase, row.attempt, row.message = JobPhase.FAILED, 1, f"1 failure, 0 allowed: {text[:9000]}"
        attempt = Attempt(job_id=job, number=1, report_token_hash="-", last_step=5, created_at=utc_now())
        attempt.phase, attempt.cause, attempt.rank = AttemptPhase.ENDED, Cause.EXCEPTION, 0
        attempt.message, attempt.ended_at = f"raised {text}", utc_now()
        ended = Event(job_id=job, at=utc_now(), type="attempt-ended", attempt=1, message=attempt.message, data={})
        session.add_all([attempt, ended])
    seen = watch(chromium, str(server.url), viewport={"width": width, "height": 900})
    page = seen.open(f"#/jobs/{job}")
    page.locator(".latest").get_by_text("raised line 0").wait_for()
    page.get_by_text("After the cause is mended").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".card.bad").bounding_box()["height"] < 1000
    assert page.locator(".latest").bounding_box()["height"] < 600
    assert violations(page) == []


def add_events(database: Database, job: str, numbers: range) -> None:
    with database.write() as session:
        for n in numbers:
            kind = "note.rare" if n == 3 else "note.many"
            session.add(Event(job_id=job, at=utc_now(), type=kind, attempt=None, message=f"event {n} of many", data={}))


def test_newest_events_are_shown_at_once_later_ones_live_and_earlier_ones_on_request(
    waiting_job: tuple[Server, Database, str], chromium: Any
) -> None:
    server, database, job = waiting_job
    add_events(database, job, range(1000))
    seen = watch(chromium, str(server.url))
    page = seen.open(f"#/jobs/{job}/events")
    messages = page.locator(".events .message")
    page.get_by_text("event 999 of many").wait_for()
    assert messages.count() == 100 and messages.first.inner_text().strip() == "event 999 of many"
    add_events(database, job, range(1000, 1003))
    page.get_by_text("event 1002 of many").wait_for()
    page.get_by_role("button", name="Earlier events").click()
    page.get_by_text("event 400 of many").wait_for()
    page.get_by_role("button", name="Earlier events").click()
    page.get_by_text("event 0 of many").wait_for()
    numbers = [int(text.split()[1]) for text in messages.all_inner_texts()[:-1]]
    assert numbers == list(range(1002, -1, -1)), "each once, the newest first"
    assert page.get_by_role("button", name="Earlier events").count() == 0
    page.get_by_role("button", name="note.rare").click()
    page.get_by_text("event 3 of many").wait_for()
    wait_for(lambda: page.wait_for_timeout(50) or messages.count() == 1, "the only event of this type", 30)
    assert "type=note.rare" in page.url
    add_events(database, job, range(1003, 1004))
    add_events(database, job, range(3, 4))
    messages.nth(1).wait_for()
    assert messages.all_inner_texts() == ["event 3 of many"] * 2
    seen.assert_clean()


def test_event_that_comes_while_the_newest_page_is_read_is_shown_once(
    waiting_job: tuple[Server, Database, str], chromium: Any
) -> None:
    server, database, job = waiting_job
    seen = watch(chromium, str(server.url))
    page = seen.open(f"#/jobs/{job}/events?type=note.rare")
    messages = page.locator(".events .message")
    page.get_by_text("No event has the chosen").wait_for()
    page.evaluate(HIDE % "true")
    add_events(database, job, range(1))  # of another type
    held: list[tuple[Any, Any]] = []
    page.route("**/events?*type=note.rare", lambda route: held.append((route, route.fetch())))
    page.evaluate(HIDE % "false")
    wait_for(lambda: page.wait_for_timeout(50) or held, "the newest page", 30)
    add_events(database, job, range(3, 4))
    messages.wait_for()
    for route, answer in held:
        route.fulfill(response=answer)
    page.unroute_all()
    add_events(database, job, range(3, 4))
    messages.nth(1).wait_for()
    assert messages.all_inner_texts() == ["event 3 of many"] * 2
    seen.assert_clean()


def test_events_that_came_while_the_page_was_hidden_are_shown(
    waiting_job: tuple[Server, Database, str], chromium: Any
) -> None:
    server, database, job = waiting_job
    seen = watch(chromium, str(server.url))
    page = seen.open(f"#/jobs/{job}/events")
    page.get_by_text("submitted").first.wait_for()
    page.evaluate(HIDE % "true")
    add_events(database, job, range(1000))
    page.evaluate(HIDE % "false")
    page.get_by_text("event 999 of many").wait_for()
    add_events(database, job, range(1000, 1001))
    page.get_by_text("event 1000 of many").wait_for()
    texts = page.locator(".events .message").all_inner_texts()
    assert len(texts) == len(set(texts)) >= 101, "each once"
    seen.assert_clean()


def test_hook_page_keeps_its_curves_until_those_of_a_zoom_are_there(scene: Scene, chromium: Any) -> None:
    path = f"/v1/jobs/{scene.resumed}/hook/history?rank=0"
    steps = [one["summary"]["step"] for one in scene.server.call("GET", path).json()["items"]]
    assert len(steps) > 5
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open(f"#/jobs/{scene.resumed}/hook")
    curves = page.get_by_role("heading", name="Residual norm")
    curves.wait_for()
    held: list[Any] = []
    page.route(re.compile("/hook/history.*from_step"), lambda route: held.append(route))
    page.get_by_label("From step").fill(str(steps[1]))
    page.get_by_label("To step").fill(str(steps[3]))
    with page.expect_request(re.compile(f"/hook/history.*from_step={steps[1]}&to_step={steps[3]}")):
        page.get_by_label("To step").press("Enter")
    assert curves.is_visible() and page.get_by_text(f"{len(steps)} steps each").is_visible(), (
        "the answer is not here yet"
    )
    for route in held:
        route.continue_()
    page.get_by_text("3 steps each").wait_for()
    history = [url for url in seen.requests if "/hook/history?" in url]
    assert len(history) == len(set(history)), "one request reads a history"
    seen.assert_clean()


def _free_port() -> int:
    """A port for a service that starts twice at one address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_filters_are_in_the_address(scene: Scene, chromium: Any) -> None:
    seen = watch(chromium, str(scene.server.url), token=scene.token)
    page = seen.open("#/jobs")
    page.get_by_role("link", name="resumed", exact=True).wait_for()
    page.get_by_role("button", name="Failed").click()
    page.get_by_role("link", name="resumed", exact=True).wait_for(state="detached")
    page.get_by_role("link", name="failed", exact=True).wait_for()
    assert "phase=FAILED" in page.url
    page.get_by_label("Sort").select_option("highest priority first")
    page.get_by_role("link", name="failed", exact=True).wait_for()
    assert "sort=-priority" in page.url
    page = seen.open("#/jobs?label=team%3Dvision")
    page.get_by_role("link", name="resumed", exact=True).wait_for()
    assert page.get_by_role("link", name="failed", exact=True).count() == 0
    seen.assert_clean()


@pytest.fixture(scope="module")
def reports(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports of the scene's jobs, by the id of the job."""
    folder = tmp_path_factory.mktemp("reports")
    cli = Cli(folder, folder)
    cli.environment |= {"RATCHET_SERVER": str(scene.server.url), "RATCHET_TOKEN": scene.token}
    jobs = (scene.resumed, scene.failed, scene.running, scene.waiting)
    for job in jobs:
        cli("report", job, "-o", f"{job}.html", "--logs", "600")
    return {job: folder / f"{job}.html" for job in jobs}


def open_report(seen: Watched, file: Path, tab: str) -> Any:
    """Open a tab of a report from the disk, in a page of its own."""
    seen.page.goto("about:blank")
    seen.page.goto(f"{file.as_uri()}#/jobs/{file.stem}" + ("" if tab == "overview" else f"/{tab}"))
    settle(seen.page)
    return seen.page


@pytest.mark.parametrize(
    ("scheme", "width", "jobs"), [("light", 1440, ("resumed", "running")), ("dark", 390, ("failed", "waiting"))]
)
def test_report_opens_from_the_disk_without_any_request(
    scene: Scene, reports: dict[str, Path], chromium: Any, scheme: str, width: int, jobs: tuple[str, ...]
) -> None:
    seen = watch(chromium, "file://", viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong = []
    files = [reports[getattr(scene, job)] for job in jobs]
    for job, file in zip(jobs, files, strict=True):
        for tab in TABS_WITH_OWN_STATE.get(job, TABS):
            page = open_report(seen, file, tab)
            wrong += [f"{file.stem} {tab}: {text}" for text in violations(page)]
            if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                wrong.append(f"{tab}: is wider than the window")
            said = page.locator(".made summary").inner_text()
            assert re.fullmatch(
                r"Report of \w+, made .+ from http://\S+, Ratchet \S+\. Ages .+ \d parts? left out", said
            )
            assert page.get_by_text("Not in this report").count() == 0, tab
            assert page.get_by_role("button", name=re.compile("Cancel|Suspend|Fork|Preempt|Verify|Pin")).count() == 0
            elsewhere = page.eval_on_selector_all("a[href]", "all => all.map(one => one.getAttribute('href'))")
            assert [href for href in elsewhere if not href.startswith((f"#/jobs/{file.stem}", "#content"))] == []
    assert not wrong, "\n".join(wrong)
    assert {url.split(":")[0] for url in seen.requests} <= {"file", "data", "blob", "about"}
    assert {url.split("#")[0] for url in seen.requests if url.startswith("file:")} == {one.as_uri() for one in files}
    seen.assert_clean()


def test_report_shows_what_a_job_wrote_as_text(scene: Scene, reports: dict[str, Path], chromium: Any) -> None:
    seen = watch(chromium, "file://")
    for tab in HOSTILE_IN[1:]:
        page = open_report(seen, reports[scene.failed], tab)
        page.get_by_text("onerror").first.wait_for()
        assert page.evaluate("window.hostile") is None, tab
    seen.assert_clean()


VALUES = {
    "overview": ("main h1 ~ .badge", ".facts dd", ".card:has(h2:text('exact')) p", "section:has(h2:text('time'))"),
    "metrics": (".lead", ".chart figcaption", ".ends"),
    "hook": ("table tbody tr", ".terms", ".chart figcaption"),
    "attempts": ("table.timeline tbody tr", ".card dl", ".matrix tr"),
    "checkpoints": ("tbody tr td:nth-child(-n+7)", "svg text"),
    "logs": (".line .text",),
    "files": ("tbody td.name",),
    "events": ("tbody td.message", ".pick"),
    "spec": (".yamlline", ".pairs"),
}
"""By tab: what has values that do not change while a job has ended."""


@pytest.mark.parametrize("which", ["resumed", "failed"])
def test_report_shows_the_values_of_the_live_page(
    scene: Scene, reports: dict[str, Path], chromium: Any, which: str
) -> None:
    job = getattr(scene, which)
    live, report = watch(chromium, str(scene.server.url), token=scene.token), watch(chromium, "file://")
    said = {}
    for tab, places in VALUES.items():
        pages = [live.open(f"#/jobs/{job}/{tab}"), open_report(report, reports[job], tab)]
        settle(pages[0])
        for place in places:
            shown = [page.locator(place).all_text_contents() for page in pages]
            if tab == "logs":  # the report has their ends
                shown = [lines[-5:] for lines in shown]
            ages = re.compile(r"[\d. a-z]+ ago|just now")
            before, after = ([ages.sub("ago", text) for text in texts] for texts in shown)
            assert before == after, (tab, place)
            said[tab, place] = before
    live.assert_clean()
    report.assert_clean()
    if which == "failed":
        assert said["files", "tbody td.name"] and said["logs", ".line .text"]
    else:
        assert [tab for (tab, _), texts in said.items() if not texts] == ["files"]
        assert any("exact, proved" in text for text in said["attempts", "table.timeline tbody tr"])


def test_logs_of_a_report_end_as_the_files_do(scene: Scene, reports: dict[str, Path], chromium: Any) -> None:
    found = json.loads(recorded_text(reports[scene.failed]))
    assert any("parts of long logs" in text for text in found["left_out"])
    for attempt in range(1, found["job"]["attempt"] + 1):
        first, *lines = [one for one in found["logs"] if (one["attempt"], one["rank"]) == (attempt, 1)]
        written = scene.server.paths.job(scene.failed).attempt(attempt).log(1).read_text()
        ending = "".join(f"{one['text']}\n" for one in lines)
        assert written.endswith(ending) and 300 < len(ending) <= 600 and first["left_out"] == len(written) - len(ending)
    seen = watch(chromium, "file://")
    page = open_report(seen, reports[scene.failed], "logs")
    page.get_by_text("left out here").first.wait_for()
    page.get_by_label("Lines that contain").fill("ValueError")
    page.get_by_label("Lines that contain").press("Enter")
    page.locator("mark").first.wait_for()
    assert all("ValueError" in text for text in page.locator(".line .text:not(.left)").all_inner_texts())


def test_report_says_what_it_does_not_have_and_zooms_in_what_it_has(
    scene: Scene, reports: dict[str, Path], chromium: Any
) -> None:
    seen = watch(chromium, "file://")
    page = open_report(seen, reports[scene.failed], "files")
    page.locator("td.name a").first.click()
    page.get_by_text("Not in this report. While the service runs").wait_for()
    page.goto(f"{reports[scene.failed].as_uri()}#/queue")
    page.get_by_text("Not in this report. It has only").get_by_role("link", name="failed").click()
    page.get_by_role("heading", name="failed", exact=True).wait_for()
    page.goto(f"{reports[scene.resumed].as_uri()}")
    page.get_by_role("heading", name="resumed", exact=True).wait_for()
    page.get_by_role("link", name="Metrics", exact=True).click()
    page.get_by_label("From step").fill("20")
    page.get_by_label("To step").fill("29")
    page.get_by_label("To step").press("Enter")
    page.get_by_text("Values as a table").first.click()
    page.get_by_role("rowheader", name="step 29").first.wait_for()
    assert page.locator("figure").first.locator("tbody th").all_inner_texts() == [f"step {n}" for n in range(20, 30)]
    seen.assert_clean()
