"""Reports that come twice, late, in another order and in other portions leave the very rows that those leave which come once.

And an agent that could not reach its service for long delivers everything then, in order, without a pause in between.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import AttemptPhase
from ratchet_contract.protocol.messages import AgentReport, Control, LaunchFile, Note, ReportAck
from ratchet_service.agent_reports.deduplicate import AcknowledgedReports
from ratchet_service.agent_reports.ingest import ingest
from ratchet_service.config.output_limits import Bounds
from ratchet_service.db.models import AttemptNode, Base, Job
from ratchet_worker.agent import report_sender as uplink_module
from ratchet_worker.agent.report_sender import ReportSender, Status
from ratchet_worker.agent.service_client import Unreachable
from ratchet_worker.ipc.report_spool import Spool
from tests.integration.service.agent_reports.test_ingest import hook_message
from tests.support.api import TOKEN, Api, checkpoint_message, message, training_message
from tests.support.launch import RESOLVED

pytestmark = pytest.mark.takes_turns

BOUNDS = Bounds(points=16, series=4, notes=25)
_OF_THE_MOMENT = {
    "created_at", "updated_at", "at", "reported_at", "id", "job_id", "spec_digest", "phase_since", "queued_at",
}  # fmt: skip
"""Columns that differ between two jobs that are told the same."""


def story(seed: int) -> list[dict[int, list[dict[str, Any]]]]:
    """What the two ranks of three attempts say, in order."""
    draw = random.Random(seed)
    attempts, base = [], 0
    for attempt in (1, 2, 3):
        reached = base + draw.randint(10, 60)
        zero: list[dict[str, Any]] = [message("started", pid=1, host="h", device="cpu", torch="2")]
        zero.append(training_message(base, attempt - 1 if base else None, total_steps=200))
        saved = base
        for step in range(base + 1, reached + 1):
            values = {"loss": step / attempt} | ({"acc": 1.0} if step % 5 == 0 else {}) | {f"x{step % 7}": 0.5}
            zero.append(message("metrics", step=step, values=values))
            if step % 4 == 0:
                zero.append(message("progress", step=step, steps_per_second=float(step)))
            if step % 9 == 0:
                zero.append(checkpoint_message(step, attempt, parent=saved if saved != base else 0))
                saved = step
        one = [hook_message(step, 1) for step in range(base + 1, reached, 3)]
        one += [message("note", 1, type="n", message=f"{attempt}.{i}") for i in range(draw.randint(0, 50))]
        attempts.append({0: zero, 1: one})
        base = saved
    return attempts


def report(job: str, attempt: int, batches: list[tuple[int, int, list[dict[str, Any]]]]) -> AgentReport:
    told = [{"rank": rank, "from_seq": begin + 1, "messages": part} for rank, begin, part in batches]
    return AgentReport.model_validate({"job_id": job, "attempt": attempt, "phase": "RUNNING", "batches": told})


def portions(said: dict[int, list[dict[str, Any]]], draw: random.Random) -> list[list[tuple[int, int, int]]]:
    """Reports as ``(rank, begin, end)``: every message in at least one, some in many, in any order."""
    out = []
    for rank, lines in said.items():
        begin = 0
        while begin < len(lines):
            end = min(len(lines), begin + draw.randint(1, 40))
            out += [[(rank, max(0, begin - draw.choice((0, 0, 3, 20))), end)]] * draw.choice((1, 1, 2, 3))
            begin = end
    draw.shuffle(out)
    return [a + b if draw.random() < 0.3 else a for a, b in zip(out, out[1:] + out[:1], strict=True)]


def rows(api: Api, job: str) -> dict[str, Counter[str]]:
    """Everything that the database has of a job, but for what is of the moment."""
    out = {}
    with api.database.read() as session:
        for table in Base.metadata.sorted_tables:
            key = table.c.get("job_id", table.c.id if table.name == "jobs" else None)
            if key is None:
                continue
            columns = [c for c in table.c if c.name not in _OF_THE_MOMENT]
            found = session.execute(sa.select(*columns).where(key == job))
            out[table.name] = Counter(json.dumps(dict(row._mapping), sort_keys=True, default=str) for row in found)
    return out


def tell(api: Api, attempts: list[dict[int, list[dict[str, Any]]]], draw: random.Random | None) -> str:
    job = api.submit()
    for attempt, said in enumerate(attempts, 1):
        api.attempt(job, number=attempt)
        homes = api.settings.paths
        if draw is None:
            for rank, lines in said.items():
                ingest(api.database, report(job, attempt, [(rank, 0, lines)]), TOKEN, homes, BOUNDS)
            continue
        sent, told = portions(said, draw), AcknowledgedReports()
        acked: dict[int, int] = {}
        while any(acked.get(rank, 0) < len(lines) for rank, lines in said.items()):
            for parts in sent:  # until all is there; what leaves a gap is refused, and comes again
                batches = [(rank, begin, said[rank][begin:end]) for rank, begin, end in parts]
                known = draw.choice((told, None))  # one of two services, of which the other has told nothing yet
                acked = ingest(api.database, report(job, attempt, batches), TOKEN, homes, BOUNDS, known).acked
            draw.shuffle(sent)
    return job


@pytest.mark.parametrize("seed", range(int(os.environ.get("RATCHET_TEST_STORIES", "4"))))
def test_duplicate_late_and_rebatched_reports_store_the_same_rows(api: Api, seed: int) -> None:
    attempts = story(seed)
    once = rows(api, tell(api, attempts, None))
    again = rows(api, tell(api, attempts, random.Random(seed)))
    assert set(once) >= {"jobs", "attempts", "attempt_nodes", "events", "metrics", "metric_series", "hook_samples"}
    for table, expected in once.items():
        assert again[table] == expected, (table, again[table] - expected, expected - again[table])
    assert sum(once["metrics"].values()) > 20 and sum(once["checkpoints"].values()) > 2


@pytest.mark.parametrize("size", [1, 7])
def test_metrics_only_reports_store_the_same_rows_as_mixed_reports(api: Api, size: int) -> None:
    """Reports of nothing else are written by statements of their own."""
    zero: list[dict[str, Any]] = [training_message()]
    for step in range(1, 40):
        zero.append(message("metrics", step=step, values={"loss": 1 / step, f"x{step % 6}": "NaN"}))
        more = {"total_steps": 50, "data_epoch": step // 20} if step % 3 else {"steps_per_second": float(step)}
        zero.append(message("progress", step=step, **more) if step % 10 else message("progress", step=-1))
    one = [hook_message(step, 1) for step in range(1, 30)]
    together, alone = api.submit(), api.submit()
    for job in (together, alone):
        api.attempt(job)
    homes, told = api.settings.paths, AcknowledgedReports()
    ingest(api.database, report(together, 1, [(0, 0, zero), (1, 0, one)]), TOKEN, homes, BOUNDS)
    ingest(api.database, report(alone, 1, [(0, 0, zero[:1])]), TOKEN, homes, BOUNDS, told)

    def times() -> list[datetime]:
        with api.database.read() as session:
            query = sa.select(Job.updated_at, AttemptNode.reported_at).join(AttemptNode, AttemptNode.job_id == Job.id)
            return list(session.execute(query.where(Job.id == alone)).one())

    first_times = times()
    for rank, lines, first in ((0, zero, 1), (1, one, 0)):
        for begin in range(first, len(lines), size):
            ingest(
                api.database, report(alone, 1, [(rank, begin, lines[begin : begin + size])]), TOKEN, homes, BOUNDS, told
            )
    assert rows(api, alone) == rows(api, together)
    assert all(after > before for before, after in zip(first_times, times(), strict=True))


def test_events_keep_the_message_order_of_their_rank(api: Api) -> None:
    lines = [message("note", type="n", message=str(i)) for i in range(20)]
    job = tell(api, [{0: lines, 1: []}], random.Random(1))
    events = api.client.get(f"/v1/jobs/{job}/events").json()["items"]
    assert [e["message"] for e in events if e["type"] == "note.n"] == [str(i) for i in range(20)]


class Deaf:
    """A supervisor that has nothing to say."""

    def status(self) -> Status:
        return Status(AttemptPhase.RUNNING, 0)

    def on_control(self, control: Control) -> None:
        pass

    def on_fenced(self, reason: str) -> None:
        raise AssertionError(reason)


class Link:
    """In the place of the HTTP connection: the service's own ``ingest``, away for a while, and losing every third answer."""

    report_after = 0.0

    def __init__(self, api: Api) -> None:
        self.api, self.away, self.requests, self.largest = api, True, 0, 0

    def known(self) -> bool:
        return True

    def watch(self, control: Control, seconds: float) -> None: ...

    def has_news(self) -> bool:
        return False

    def post(self, report: AgentReport, timeout: float | None = None) -> ReportAck:
        if self.away:
            raise Unreachable("away")
        self.requests += 1
        self.largest = max(self.largest, len(report.model_dump_json()))
        ack = ingest(self.api.database, report, TOKEN, self.api.settings.paths, Bounds(notes=10**6))
        if self.requests % 3 == 0:
            raise Unreachable("the answer was lost")
        return ack


def test_report_sender_after_a_long_outage_delivers_all_messages_once_in_order(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour of two ranks: 14 400 messages. Routes and sockets are left out, the service's ``ingest`` is the real one."""
    job = api.submit()
    api.attempt(job)
    paths, count = AttemptPaths(tmp_path), 7200
    for rank in (0, 1):
        spool = Spool(paths.spool(rank))
        for i in range(count):
            spool.append(Note(rank=rank, at="2030-01-01T00:00:00Z", type="n", message=f"{rank}:{i}"))
        spool.close()
    with api.database.read() as session:
        spec = session.get_one(Job, job).spec
    launch = LaunchFile.model_validate(
        {"job_id": job, "attempt": 1, "world_size": 2, "ranks": [0, 1], "spec": spec, "resolved": RESOLVED,
         "job_root": "/j", "attempt_dir": str(tmp_path), "workdir": "/w", "report_token": TOKEN, "service_file": "/s"}
    )  # fmt: skip
    link = Link(api)
    monkeypatch.setattr(uplink_module, "ServiceLink", lambda _: link)
    sent = ReportSender(launch, {rank: paths.spool(rank) for rank in (0, 1)}, Deaf(), period=0.3)
    delays = [sent._send_report() for _ in range(5)]
    assert all(delay > 0 for delay in delays), "while it is away there are pauses"
    link.away = False
    pauses = []
    while (delay := sent._send_report()) == 0.0 or link.requests % 3 == 0:
        pauses += [delay] if link.requests % 3 else []
    with api.database.read() as session:
        notes = sa.text("SELECT message FROM events WHERE job_id = :job AND type = 'note.n' ORDER BY id")
        found = list(session.scalars(notes, {"job": job}))
    for rank in (0, 1):
        mine = [text for text in found if text.startswith(f"{rank}:")]
        assert mine == [f"{rank}:{i}" for i in range(len(mine))] and mine
    assert api.report(job).json()["acked"] == {"0": count, "1": count}
    firsts = [found.index(f"{rank}:0") for rank in (0, 1)]
    assert max(firsts) <= 500, "a rank that has much to say does not keep the other from being heard"
    assert set(pauses) == {0.0}, "no pause while more is waiting, but after a lost answer"
    assert link.largest < 512 * 1024
    assert link.requests <= 1.6 * (2 * count / 500) + 3
