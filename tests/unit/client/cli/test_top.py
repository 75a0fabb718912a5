"""``ratchet top``: which jobs its table has, of answers that come one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_client.cli.commands import wait
from tests.support.scripted_server import JOB, Reply, ok, serving

pytestmark = pytest.mark.processes

ID = str(JOB["id"])


def test_ended_job_stays_in_the_table_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = iter((None, 30, 50, 70))  # seconds since its end, at each refresh
    job: dict[str, Any] = {}

    def refreshes(fetch: Callable[[], Any], *_: Any) -> Iterator[Any]:
        for age in ages:
            ended = (
                None
                if age is None
                else {"phase": "SUCCEEDED", "ended_at": str(datetime.now(UTC) - timedelta(seconds=age))}
            )
            job.update(JOB | (ended or {}))
            yield fetch()

    def script(request: BaseHTTPRequestHandler, _: int) -> Reply:
        if request.path.startswith("/v1/jobs?"):
            return ok({"items": [job] if job["phase"] == "RUNNING" else []})
        if request.path == f"/v1/jobs/{ID}":
            return ok(job)
        return ok(
            {
                "job_id": ID,
                "series": [],
                "items": [],
                "name": "allreduce",
                "wrapper": None,
                "parameters": {},
                "stateful": False,
            }
        )

    monkeypatch.setattr(wait, "poll", refreshes)
    with serving(script) as server:
        done = CliRunner().invoke(app, ["--server", server.url, "top", "--json"])
    shown = [[(job["id"], job["phase"]) for job in json.loads(line)["jobs"]] for line in done.stdout.splitlines()]
    assert shown == [[(ID, "RUNNING")], [(ID, "SUCCEEDED")], [(ID, "SUCCEEDED")], []], done.output
