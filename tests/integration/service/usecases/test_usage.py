"""Hours of GPUs, CPU slots and ranks: clipped to the interval, by owner or label, as JSON and CSV."""

from __future__ import annotations

import csv
import io
from datetime import datetime, timedelta
from typing import Any

import pytest

from ratchet_contract.phases import AttemptPhase, Desired
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.db.engine import utc_now
from ratchet_service.db.models import RECOVERED_FROM_DISK, Attempt, AttemptNode, Job
from ratchet_service.launchers.launch_file import build_launch_file
from tests.support.api import TOKEN, Api
from tests.support.team import Team, problem_status_and_code, team, token_required_service

__all__ = ["team", "token_required_service"]

NOW = utc_now().replace(microsecond=0)
HOUR = timedelta(hours=1)


def ran(api: Api, job: str, number: int, begun: datetime | None, ended: datetime | None, *cpu_slots: list[int]) -> None:
    """An attempt with one node for each of ``cpu_slots``."""
    phase = AttemptPhase.ENDED if ended else AttemptPhase.RUNNING
    with api.database.write() as session:
        session.add(Attempt(job_id=job, number=number, phase=phase, report_token_hash=TOKEN, created_at=NOW - 100 * HOUR,
                            begun_at=begun, ended_at=ended))  # fmt: skip
        session.flush()
        for node, slots in enumerate(cpu_slots):
            session.add(AttemptNode(job_id=job, attempt=number, node=node, cpu_slots=slots, phase=phase))


def job_of(api: Api, owner: str, device: str = "cpu", **changes: Any) -> str:
    job = api.submit(**changes)
    with api.database.write() as session:
        row = session.get_one(Job, job)
        row.owner, row.resolved = owner, row.resolved | {"device": device}
    return job


def read(api: Api, since: float, until: float, **query: Any) -> list[dict[str, Any]]:
    """``since``, ``until``: hours before now."""
    times = {"since": (NOW - since * HOUR).isoformat(), "until": (NOW - until * HOUR).isoformat()}
    answer = api.client.get("/v1/usage", params=times | query)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def item(value: str | None, jobs: int, attempts: int, gpu: float, cpu: float, rank: float) -> dict[str, Any]:
    return {"value": value, "jobs": jobs, "attempts": attempts, "gpu_hours": gpu, "cpu_hours": cpu, "rank_hours": rank}


def test_hours_are_clipped_to_the_interval_and_summed_by_owner(api: Api) -> None:
    cpu, gpu = job_of(api, "ann"), job_of(api, "bob", "cuda")
    other = job_of(api, "ann")
    ran(api, cpu, 1, NOW - 10 * HOUR, NOW - 8 * HOUR, [0, 1])  # the first of its two hours is before the interval
    ran(api, cpu, 2, NOW - 8 * HOUR, NOW - 7 * HOUR, [0, 1], [4])
    ran(api, cpu, 3, NOW - 6 * HOUR, NOW - 2 * HOUR, [0])  # the last two of its four hours are after it
    ran(api, other, 1, NOW - 30 * HOUR, NOW - 9 * HOUR, [0])  # it ends as the interval begins
    ran(api, other, 2, NOW - 4 * HOUR, NOW - 1 * HOUR, [0])  # it begins as the interval ends
    ran(api, other, 3, None, NOW - 5 * HOUR, [0])  # no agent has come
    ran(api, gpu, 1, NOW - 20 * HOUR, None, [])  # it runs
    assert read(api, 9, 4) == [item("bob", 1, 1, 10.0, 0.0, 10.0), item("ann", 1, 3, 0.0, 2 + 3 + 2, 2 + 2 + 4)]
    assert read(api, 30, 29) == [item("ann", 1, 1, 0.0, 1.0, 2.0)]
    assert read(api, 200, 150) == []
    ahead = read(api, 1, -1)
    passed = (utc_now() - NOW) / HOUR
    assert ahead[0]["gpu_hours"] == pytest.approx(2 * (1 + passed), abs=0.05), "what runs counts until now, not later"
    total = api.client.get("/v1/usage").json()["items"][0]["gpu_hours"]
    assert total == pytest.approx(2 * (20 + passed), abs=0.05)


def test_usage_by_label_and_fleet_agree_on_hours(api: Api) -> None:
    red, blue = (job_of(api, "ann", labels={"team": team}) for team in ("red", "blue"))
    without, gpu = job_of(api, "ann", labels={"other": "red"}), job_of(api, "bob", "cuda", labels={"team": "red"})
    for job in (red, blue, without, gpu):
        ran(api, job, 1, NOW - 4 * HOUR, NOW - 2 * HOUR, [0] if job == blue else [])
    assert read(api, 5, 0, by="label:team") == [
        item("red", 2, 2, 4.0, 0.0, 8.0), item("blue", 1, 1, 0.0, 2.0, 4.0), item(None, 1, 1, 0.0, 0.0, 4.0)
    ]  # fmt: skip
    by_owner = {entry["value"]: entry for entry in read(api, 24, 0)}
    for owner in api.client.get("/v1/fleet", params={"days": 1}).json()["owners"]:
        used = by_owner[owner["owner"]]
        assert owner["gpu_hours"] == used["gpu_hours"]
        assert owner["rank_hours"] == (0 if used["gpu_hours"] else used["rank_hours"])


def test_resize_leaves_the_hours_of_earlier_attempts_as_they_were(api: Api) -> None:
    job = job_of(api, "ann", "cuda")
    ran(api, job, 1, NOW - 4 * HOUR, NOW - 3 * HOUR, [])
    ran(api, job, 2, NOW - 2 * HOUR, NOW - 1 * HOUR, [])  # recovered from disk: its file may have any number
    with api.database.write() as session:
        row = session.get_one(Job, job)
        launch = build_launch_file(
            api.settings.paths, job, 1, JobSpec.model_validate(row.spec), Resolved.model_validate(row.resolved), (), "",
            Desired.RUN,
        ).model_dump(mode="json", exclude={"report_token", "spec"})  # fmt: skip
        session.get_one(Attempt, (job, 1)).launch = {"launch_file": launch}
        forged = launch | {"world_size": 10**30}
        session.get_one(Attempt, (job, 2)).launch = {"launch_file": forged, RECOVERED_FROM_DISK: True}
    before = read(api, 10, 2.5)
    assert before == [item("ann", 1, 1, 2.0, 0.0, 2.0)]
    with api.database.write() as session:
        row = session.get_one(Job, job)
        row.spec = row.spec | {"world": {"nodes": 1, "ranks_per_node": 8}}
        row.resolved = row.resolved | {"device": "cpu"}
    assert read(api, 10, 2.5) == before
    assert read(api, 2.5, 0) == [item("ann", 1, 1, 0.0, 0.0, 8.0)]
    (owner,) = api.client.get("/v1/fleet", params={"days": 1}).json()["owners"]
    assert (owner["gpu_hours"], owner["rank_hours"]) == (2.0, 8.0)


def test_csv_quotes_values_and_disarms_formulas(api: Api) -> None:
    hostile = ['=HYPERLINK("http://x","y")', "+1", "-1", "@SUM(A1)", "\t=1", 'a "b", c', "a\nb", "plain"]
    for value in hostile:
        ran(api, job_of(api, "ann", labels={"team": value}), 1, NOW - 2 * HOUR, NOW - HOUR, [])
    ran(api, job_of(api, "ann"), 1, NOW - 3 * HOUR, NOW - HOUR, [])
    answer = api.client.get("/v1/usage?by=label:team", headers={"Accept": "text/csv"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    head, first, *rows = csv.reader(io.StringIO(answer.text, newline=""))
    assert head == ["label:team", "jobs", "attempts", "gpu_hours", "cpu_hours", "rank_hours"]
    assert first == ["", "1", "1", "0.0", "0.0", "4.0"]
    disarmed = {"'" + value if value[0] in "=+-@\t" else value for value in hostile}
    assert {row[0] for row in rows} == disarmed
    assert {entry["value"] for entry in read(api, 5, 0, by="label:team")} == {*hostile, None}


@pytest.mark.parametrize(
    "query",
    [
        {"by": "phase"},
        {"by": "label:"},
        {"since": "2026-01-02T00:00:00Z", "until": "2026-01-02T00:00:00Z"},
        {"since": "2026-01-02T00:00:00"},
        {"until": "1960-01-01T00:00:00Z"},
        {"since": "2025-01-01T00:00:00Z", "until": "2026-01-02T00:00:01Z"},
    ],
)
def test_invalid_queries_are_refused(api: Api, query: dict[str, str]) -> None:
    answer = api.client.get("/v1/usage", params=query)
    assert problem_status_and_code(answer) == (422, "invalid-parameter")


def test_usage_of_a_leap_year_is_one_request(api: Api) -> None:
    year = {"since": "2024-01-01T00:00:00Z", "until": "2025-01-01T00:00:00Z"}
    assert api.client.get("/v1/usage", params=year).json()["items"] == []


def test_usage_needs_a_token_that_may_read_jobs(team: Team) -> None:
    assert team.eve.get("/v1/usage").status_code == 200
    assert team.nobody.get("/v1/usage").status_code == 401
    assert team.ann.get("/v1/usage", headers={"Accept": "image/png"}).status_code == 406
