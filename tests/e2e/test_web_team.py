"""The pages for teams in a real Chromium: webhooks, the audit log, hours used, and faults of nodes, ranks and trackers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.resources.client import RatchetClient
from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.roles import Role
from ratchet_contract.phases import AttemptPhase, Cause, EventType, JobPhase
from ratchet_service.db.engine import Database, sqlite_url, utc_now
from ratchet_service.db.models import Attempt, AttemptNode, Event, Job, TrackerRun
from tests.e2e.test_web_pages import HOSTILE, closed_afterwards, confirm, settle, violations
from tests.support.browser import chromium, watch
from tests.support.receiver import Receiver, happen, receiving
from tests.support.server import Server, wait_for
from tests.support.tokens import make_token

__all__ = ["chromium", "closed_afterwards"]
SPEC = {
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask"},
    "world": {"ranks_per_node": 2, "device": "cpu"},
}


@dataclass
class Team:
    """A service that starts nothing, a receiver of webhooks, and jobs of two owners that ran for hours."""

    server: Server
    database: Database
    receiver: Receiver
    answers: list[str] = field(default_factory=lambda: ["200"])
    jobs: dict[str, str] = field(default_factory=dict)

    def token(self, role: Role, owner: str = "ann") -> str:
        return make_token(self.database, owner, role)

    def watched(self, chromium: Any, **options: Any) -> Any:
        return watch(chromium, str(self.server.url), token=str(self.server.token), **options)

    def webhooks(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.server.call("GET", "/v1/webhooks").json()["items"]
        return items


def used(database: Database, job: str, owner: str, hours: float) -> None:
    """An attempt of two ranks with two CPU slots that has ended a minute ago."""
    end = utc_now() - timedelta(minutes=1)
    with database.write() as session:
        session.get_one(Job, job).owner = owner
        session.add(Attempt(job_id=job, number=1, phase=AttemptPhase.ENDED, report_token_hash="0" * 64, created_at=end,
                            begun_at=end - timedelta(hours=hours), ended_at=end))  # fmt: skip
        session.flush()
        session.add(AttemptNode(job_id=job, attempt=1, node=0, cpu_slots=[0, 1], phase=AttemptPhase.ENDED))


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    server = Server(
        tmp_path_factory.mktemp("team") / "home",
        *("--auth", "token", "--no-reconciler", "--webhook-network", "127.0.0.0/8"),
    )
    try:
        server.start().use_admin_token()
        database = Database(sqlite_url(server.paths.database))
        answers = ["200"]
        with receiving(lambda _: answers[-1]) as receiver:
            made = Team(server, database, receiver, answers)
            for owner, label, hours in (("ann", "vision", 3), ("bob", HOSTILE, 5)):
                job = server.submit(SPEC | {"name": f"of-{owner}", "labels": {"team": label}})
                used(database, job, owner, hours)
                made.jobs[owner] = job
            server.call("PATCH", f"/v1/jobs/{made.jobs['ann']}", json={"priority": 7, "labels": {"note": HOSTILE}},
                        headers={"Content-Type": "application/merge-patch+json"})  # fmt: skip
            yield made
        database.dispose()
    finally:
        server.stop()


@pytest.fixture
def webhook(team: Team) -> Iterator[str]:
    made = team.server.call("POST", "/v1/webhooks", json={"url": team.receiver.url}).json()["id"]
    yield made
    for one in team.webhooks():
        team.server.call("DELETE", f"/v1/webhooks/{one['id']}")
    team.answers[:] = ["200"]


def test_added_webhook_shows_its_secret_once_and_sends_what_was_chosen(team: Team, chromium: Any) -> None:
    seen = team.watched(chromium)
    page = seen.open("#/team")
    page.get_by_role("link", name="Webhooks").click()
    page.get_by_text("No webhook yet").wait_for()
    page.get_by_role("button", name="Add a webhook").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL", exact=True).fill(team.receiver.url)
    dialog.get_by_label(re.compile("Types of events")).fill("job.failed\njob.note.*")
    dialog.get_by_label("Only jobs with this label").fill("team=vision")
    line = f"ratchet webhook add {team.receiver.url} --type job.failed --type 'job.note.*' --label team=vision"
    assert line in dialog.inner_text()
    dialog.get_by_role("button", name="Add a webhook").click()
    secret = page.get_by_role("dialog", name="The secret of the webhook").locator("code").inner_text()
    assert secret.startswith("whsec_")
    page.get_by_role("button", name="Done").click()
    page.get_by_role("heading", name=team.receiver.url).wait_for()
    [made] = team.webhooks()
    assert (made["types"], made["label"], made["owner"]) == (["job.failed", "job.note.*"], "team=vision", None)
    page.get_by_text("job.failed, job.note.*").wait_for()
    page.reload()
    page.get_by_role("heading", name=team.receiver.url).wait_for()
    assert secret not in page.content()
    confirm(page, "Delete", f"ratchet webhook rm {made['id']}")
    page.get_by_text("No webhook yet").wait_for()
    assert team.webhooks() == []
    seen.assert_clean()


def test_refused_webhook_stays_in_the_dialog_with_the_reason(team: Team, chromium: Any) -> None:
    seen = team.watched(chromium)
    seen.expected = ("422",)
    page = seen.open("#/team/webhooks")
    page.get_by_role("button", name="Add a webhook").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL", exact=True).fill("https://example.org/")
    dialog.get_by_label(re.compile("Types of events")).fill("job.faild")
    dialog.get_by_role("button", name="Add a webhook").click()
    dialog.get_by_role("alert").get_by_text("did you mean 'job.failed'?").wait_for()
    assert team.webhooks() == []
    seen.assert_clean()


def test_webhook_is_tested_disabled_enabled_and_gets_a_new_secret(team: Team, webhook: str, chromium: Any) -> None:
    seen = team.watched(chromium)
    page = seen.open("#/team/webhooks")
    confirm(page, "Send a test", f"ratchet webhook test {webhook}")
    page.get_by_text("Accepted with status 200").wait_for()
    assert team.receiver.accepted()[-1].json["type"] == "webhook.test"
    team.answers.append("503")
    page.get_by_role("button", name="Send a test").click()
    page.get_by_role("dialog").get_by_role("button", name="Send a test").click()
    page.get_by_role("alert").get_by_text("Not accepted: ").wait_for()
    page.get_by_role("button", name="Back").click()
    confirm(page, "Disable", f"ratchet webhook disable {webhook}")
    page.get_by_text("disabled by an admin").wait_for()
    assert not team.webhooks()[0]["enabled"]
    confirm(page, "Enable", f"ratchet webhook enable {webhook}")
    page.get_by_role("button", name="Disable").wait_for()
    assert team.webhooks()[0]["enabled"]
    page.get_by_role("button", name="New secret").click()
    assert f"ratchet webhook rotate {webhook}" in page.get_by_role("dialog").inner_text()
    page.get_by_role("dialog").get_by_role("button", name="New secret").click()
    page.get_by_role("dialog", name="The secret of the webhook").get_by_text("whsec_").wait_for()
    page.get_by_role("button", name="Done").click()
    page.get_by_text("Old secret signs until").wait_for()
    seen.assert_clean()


def test_deliveries_have_status_tries_and_error_and_their_job(team: Team, webhook: str, chromium: Any) -> None:
    happen(team.database, team.jobs["ann"])
    wait_for(lambda: any(team.jobs["ann"] in str(one.body) for one in team.receiver.accepted()), "the delivery")
    team.answers.append("503")
    happen(team.database, team.jobs["bob"], EventType.REPLAY_DIFFERENCE)
    wait_for(lambda: team.webhooks()[0]["failures"], "a failure")
    seen = team.watched(chromium)
    page = seen.open("#/team/webhooks")
    page.get_by_text(re.compile(r"failing: \d+ failures? in a row")).wait_for()
    rows = page.get_by_role("table", name="Last deliveries").locator("tbody tr")
    for job, status, answer in ((team.jobs["ann"], "delivered", "200"), (team.jobs["bob"], "retrying", "503")):
        row = rows.filter(has_text=job)
        row.get_by_text(status).wait_for()
        assert answer in row.inner_text()
    assert "next try" in rows.filter(has_text=team.jobs["bob"]).inner_text()
    assert re.search(r"\b[1-9]\d* (try|tries)\b", rows.filter(has_text=team.jobs["bob"]).inner_text())
    rows.filter(has_text=team.jobs["ann"]).get_by_role("link").click()
    page.get_by_role("heading", name="of-ann").wait_for()
    seen.assert_clean()


def test_only_admins_see_webhooks(team: Team, webhook: str, chromium: Any) -> None:
    seen = watch(chromium, str(team.server.url), token=team.token(Role.SUBMITTER))
    page = seen.open("#/team")
    page.locator("header").get_by_text("ann", exact=True).wait_for()  # the page knows who it is
    page.get_by_role("table", name="Changes").wait_for()
    assert page.get_by_role("link", name="Audit log").count() == 1
    assert page.get_by_role("link", name="Webhooks").count() == 0
    seen.assert_clean()


def test_audit_log_is_filtered_in_the_address_and_has_pages(team: Team, chromium: Any) -> None:
    job = team.jobs["ann"]
    headers = {"Content-Type": "application/merge-patch+json"}
    for priority in range(60):
        team.server.call("PATCH", f"/v1/jobs/{team.jobs['bob']}", json={"priority": priority - 100}, headers=headers)
    seen = team.watched(chromium)
    page = seen.open(f"#/jobs/{job}/events")
    page.get_by_role("link", name="Who changed this job").click()
    changes = page.get_by_role("table", name="Changes")
    changes.get_by_text("priority 0 → 7").wait_for()
    assert changes.locator("tbody tr").count() == 2 and f"ratchet audit --subject {job}" in page.inner_text("main")
    offered = page.get_by_label("Action").evaluate("select => [...select.options].map(one => one.value)")
    assert sorted(offered) == sorted(["", *AuditAction])
    page.get_by_label("Action").select_option("submit")
    changes.get_by_text("priority 0 → 7").wait_for(state="detached")
    assert changes.locator("tbody tr").count() == 1 and page.url.endswith(f"?subject={job}&action=submit")
    page.get_by_role("link", name="All changes").click()
    changes.get_by_text("priority -42 → -41").wait_for()
    assert changes.locator("tbody tr").count() == 50
    page.get_by_role("link", name="Next page").click()
    changes.get_by_text("priority 0 → -100").wait_for()
    changes.get_by_text("priority 0 → 7").wait_for()
    page.get_by_role("link", name="First page").click()
    changes.get_by_text("priority -42 → -41").wait_for()
    page.get_by_label("Before").fill("2020-01-01")
    page.get_by_text("No such change.").wait_for()
    seen.assert_clean()


def test_hours_used_are_shown_by_owner_and_label_and_saved_as_csv(team: Team, chromium: Any) -> None:
    seen = team.watched(chromium)
    page = seen.open("#/fleet")
    table = page.get_by_role("table", name="Hours used")
    table.get_by_role("row", name=re.compile("bob")).wait_for()
    texts = [[cell.inner_text() for cell in row.locator("td").all()] for row in table.locator("tbody tr").all()]
    assert texts == [["bob", "0", "10", "10", "1", "1"], ["ann", "0", "6", "6", "1", "1"]]
    page.get_by_label("By the label").fill("note")
    page.get_by_label("By the label").press("Enter")
    table.get_by_text("without the label").wait_for()
    table.get_by_role("link", name=HOSTILE).wait_for()
    assert "by=note" in page.url
    assert "ratchet usage --by label:note --since 20" in page.locator("#usage").inner_text()
    with page.expect_download() as waiting:
        page.locator("#usage").get_by_role("button", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert waiting.value.suggested_filename.startswith("usage-20") and [row["cpu_hours"] for row in rows] == [
        "10.0",
        "6.0",
    ]
    page.get_by_label("Before").fill("2020-01-01")
    page.locator("#usage").get_by_text("since must be before until").wait_for()
    assert page.evaluate("window.hostile") is None
    seen.expected = ("422",)
    seen.assert_clean()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_pages_of_a_team_are_accessible_fit_the_width_and_show_text_as_text(
    team: Team, webhook: str, chromium: Any, scheme: str, width: int
) -> None:
    team.answers.append("503")
    happen(team.database, team.jobs["bob"])
    wait_for(lambda: team.webhooks()[0]["failures"], "a failure")
    seen = team.watched(chromium, viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong = []
    for address, text in (
        (f"#/team?subject={team.jobs['ann']}", "onerror"),
        ("#/team/webhooks", "next try"),
        ("#/fleet?by=note", "onerror"),
    ):
        page = seen.open(address)
        page.get_by_text(text).first.wait_for()
        settle(page)
        wrong += [f"{address}: {found}" for found in violations(page)]
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            wrong.append(f"{address}: is wider than the window")
        assert page.evaluate("window.hostile") is None
    page = seen.open("#/team/webhooks")
    page.get_by_role("button", name="Add a webhook").click()
    page.get_by_role("dialog").wait_for()
    wrong += violations(page)
    assert not wrong, "\n".join(wrong)
    seen.assert_clean()


PLACE = "https://mlflow.example/#/experiments/1/runs/2"
LONG_HOST = f"gpu-node.{'x' * 60}.{'y' * 60}.example"
SCRIPTED = "javascript:window.hostile=1"


@pytest.fixture(scope="module")
def faulty(team: Team) -> str:
    """A job: two attempts that hung on one node, one that stays away from it with two slow ranks, and runs in three trackers."""
    now, job = utc_now(), team.server.submit(SPEC | {"name": "faulty"})
    slow = {"rank": 1, "node": 1, "host": HOSTILE, "ready_seconds": 0.31, "others_seconds": 0.104, "share": 0.42}
    tracked = {
        ("mlflow", 1): TrackerRun(state={"url": "https://mlflow.example/#/runs/1"}, marks={"loss": 10}, done=True),
        ("mlflow", 2): TrackerRun(state={"url": PLACE}, marks={"loss": 1234}, done=True),
        ("tensorboard", 1): TrackerRun(state={"path": f"/runs/{HOSTILE}"}, marks={"loss": 1200}, failures=3, error=HOSTILE,
                                       failing_since=now - timedelta(minutes=7)),
        ("wandb", 1): TrackerRun(state={"url": SCRIPTED}),
    }  # fmt: skip
    with team.database.write() as session:
        row = session.get_one(Job, job)
        row.phase, row.attempt = JobPhase.RUNNING, 3
        for number in (1, 2, 3):
            made = Attempt(
                job_id=job, number=number, report_token_hash="-", created_at=now, base_step=0, base_attempt=None
            )
            made.phase, made.node = AttemptPhase.RUNNING, None
            if number < 3:
                made.phase, made.ended_at, made.cause, made.node, made.rank = AttemptPhase.ENDED, now, Cause.HANG, 0, 0
            else:
                made.stragglers = {"1": slow, "0": slow | {"rank": 0, "node": 0, "host": None}}
                made.launch = {"launch_file": {"exclude_nodes": [LONG_HOST]}}
            session.add(made)
            session.flush()
            host = LONG_HOST if number < 3 else "gpu-node-2"
            session.add(AttemptNode(job_id=job, attempt=number, node=0, host=host, phase=made.phase))
        for (sink, number), run in tracked.items():
            run.job_id, run.sink, run.number = job, sink, number
            session.add(run)
        for kind in ("straggler", "node-excluded", "alert", "tracker-failing", "tracker-back", "tracker-branched"):
            data = {"level": "error", "title": HOSTILE} if kind == "alert" else {"rank": 1}
            event = Event(job_id=job, at=now, type=EventType(kind), attempt=3, message=f"{kind}: {HOSTILE}", data=data)
            session.add(event)
    return job


def assert_trackers(page: Any, job: str) -> None:
    """The overview has the newest run of each tracker."""
    card = page.locator(".card", has=page.get_by_role("heading", name="Trackers"))
    card.wait_for()
    mlflow, tensorboard, wandb = card.get_by_role("listitem").all()
    assert "step 1\u202f234, all sent" in mlflow.inner_text()
    assert mlflow.get_by_role("link", name=f"{job}-2", exact=True).get_attribute("href") == PLACE
    assert f"/runs/{HOSTILE}" in tensorboard.inner_text() and tensorboard.get_by_role("link").count() == 0
    assert re.search(r"Fails since .+, values are kept: " + re.escape(HOSTILE), tensorboard.inner_text())
    assert "step 1\u202f200" in tensorboard.inner_text() and "all sent" not in tensorboard.inner_text()
    assert "nothing sent yet" in wandb.inner_text() and SCRIPTED in wandb.inner_text()
    assert wandb.get_by_role("link").count() == 0, "what is no web address is no link"
    assert re.search(rf"1 earlier run:\s+ratchet trackers {job}", card.inner_text())


def assert_attempt(page: Any, job: str) -> None:
    """The newest attempt has its slow ranks, and the nodes that it stays away from."""
    rows = page.get_by_role("table", name="Slow ranks").locator("tbody tr")
    rows.first.wait_for()
    texts = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows.all()]
    assert texts[0] == ["1", "310 ms", "104 ms", "42 %", f"1, {HOSTILE}"] and (texts[1][0], texts[1][-1]) == ("0", "0")
    link = rows.first.get_by_role("link", name="1", exact=True)
    assert link.get_attribute("href") == f"#/jobs/{job}/logs?attempt=3&rank=1"
    away = page.get_by_role("link", name=LONG_HOST)
    assert away.get_attribute("href") == f"#/jobs/{job}/events?type=node-excluded"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_faults_are_shown_as_text_accessible_and_within_the_width(
    team: Team, faulty: str, chromium: Any, scheme: str, width: int
) -> None:
    seen = team.watched(chromium, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for tab in ("", "/attempts", "/events"):
        page = seen.open(f"#/jobs/{faulty}{tab}")
        page.get_by_text("onerror").first.wait_for()
        if tab == "":
            assert_trackers(page, faulty)
        elif tab == "/attempts":
            assert_attempt(page, faulty)
        if tab != "/events":
            settle(page)
            assert violations(page) == [], tab
        assert page.evaluate("document.documentElement.scrollWidth") == width, tab
        assert page.evaluate("window.hostile") is None
    page = seen.open("#/fleet")
    node = page.get_by_role("row", name=re.compile(re.escape(LONG_HOST)))
    node.get_by_text("Perhaps its hardware: hang 2").wait_for()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert node.get_by_role("link", name=faulty).get_attribute("href") == f"#/jobs/{faulty}"
    with page.expect_response(re.compile("/trackers")):
        seen.open(f"#/jobs/{team.jobs['ann']}")
    settle(page)
    assert page.get_by_role("heading", name="Trackers").count() == 0
    seen.assert_clean()


def test_report_has_trackers_slow_ranks_and_excluded_nodes(
    team: Team, faulty: str, chromium: Any, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    with RatchetClient(str(team.server.url), token=str(team.server.token)) as client:
        client.report(faulty, file)
    seen = watch(chromium, "file://")
    seen.page.goto(f"{file.as_uri()}#/jobs/{faulty}")
    assert_trackers(seen.page, faulty)
    seen.page.goto(f"{file.as_uri()}#/jobs/{faulty}/attempts")
    assert_attempt(seen.page, faulty)
    assert seen.page.evaluate("window.hostile") is None
    seen.assert_clean()
