"""Which reports may wait: what is only figures goes every second time, or less often to a service whose answers
are slow; everything else at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_contract.protocol.messages import (
    AGENT_RANK,
    AgentReport,
    AttemptResult,
    Control,
    Metrics,
    Note,
    Progress,
    ReportAck,
)
from ratchet_worker.agent.report_sender import ReportSender, Status, periods_to_wait
from ratchet_worker.agent.service_client import Unreachable, parse_retry_after
from ratchet_worker.ipc.report_spool import Spool
from tests.support.fake_report_service import TOKEN, ReportService
from tests.support.server import wait_for
from tests.unit.worker.agent.test_checkpoint_upload import launch_in

AT = "2030-01-01T00:00:00Z"
LENGTHS = {0: 3900, 1: 1, 2: 1, AGENT_RANK: 1}
"""Of what ranks say: where no more of rank 0's lines fit into a report, others still would."""


class Group:
    """The supervisor's part of the agent, and the service's: the connection is the one thing that is not real."""

    def __init__(self, folder: Path, *ranks: int) -> None:
        self.phase, self.desired, self.away = AttemptPhase.RUNNING, Desired.RUN, False
        self.sent: list[AgentReport] = []
        spools = {rank: folder / f"{rank}.jsonl" for rank in ranks or (0,)}
        self.spools = [Spool(path) for path in spools.values()]
        self.spool = self.spools[0]
        self.uplink = ReportSender(launch_in(folder), spools, self, period=0.3)
        self.uplink._link.post = self.post  # type: ignore[method-assign]

    def status(self) -> Status:
        return Status(self.phase, 0)

    def on_control(self, control: Control) -> None: ...

    def on_fenced(self, reason: str) -> None: ...

    def post(self, report: AgentReport, timeout: float | None = None) -> ReportAck:
        if self.away:
            raise Unreachable("nobody there")
        self.sent.append(report)
        acked = {b.rank: b.from_seq + len(b.messages) - 1 for b in report.batches}
        return ReportAck(acked=acked, control=Control(desired=self.desired))

    def figures(self, step: int) -> None:
        self.spool.append(Metrics(rank=0, at=AT, step=step, values={"loss": 1.0}))
        self.spool.append(Progress(rank=0, at=AT, step=step))

    def reports(self, rounds: int) -> int:
        """The number of reports that ``rounds`` rounds send; each round has new figures."""
        before = len(self.sent)
        for step in range(rounds):
            self.figures(step + 1)
            self.uplink._send_report()
        return len(self.sent) - before


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


def test_metrics_only_reports_are_sent_every_second_period(group: Group) -> None:
    assert group.reports(8) == 4
    steps = [m.step for report in group.sent for batch in report.batches for m in batch.messages if m.kind == "metrics"]
    assert steps == list(range(1, 9))


def test_slow_service_gets_fewer_reports_but_every_message(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    post = group.post

    def slow(report: AgentReport, timeout: float | None = None) -> ReportAck:
        clock[0] += 0.1
        return post(report, timeout)

    monkeypatch.setattr("ratchet_worker.agent.report_sender.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(group.uplink._link, "post", slow)
    assert group.reports(30) == 5  # 0.1 s of 2.1: a turn in seven
    steps = [m.step for report in group.sent for batch in report.batches for m in batch.messages if m.kind == "metrics"]
    assert steps == list(range(1, 31))
    group.spool.append(Note(rank=0, at=AT, type="hello", message="now"))
    group.uplink._send_report()
    assert len(group.sent) == 6


@pytest.mark.parametrize(("answer", "turns"), [(0.0, 1), (0.02, 1), (0.1, 6), (0.2, 13), (5.0, 15)])
def test_report_delay_is_twenty_times_response_time_up_to_five_seconds(answer: float, turns: int) -> None:
    assert periods_to_wait(answer, 0.3, 120.0) == turns


@pytest.mark.parametrize(("grace", "turns"), [(4.0, 3), (1.0, 1), (0.0, 1), (18.0, 15)])
def test_report_delay_is_at_most_a_quarter_of_stop_grace(grace: float, turns: int) -> None:
    assert periods_to_wait(5.0, 0.3, grace) == turns


@pytest.mark.parametrize(
    ("asked", "grace", "turns"), [(0.0, 120.0, 1), (0.5, 120.0, 1), (6.0, 120.0, 20), (6.0, 4.0, 3), (60.0, 120.0, 33)]
)
def test_report_delay_follows_service_request_up_to_ten_seconds(asked: float, grace: float, turns: int) -> None:
    assert periods_to_wait(0.0, 0.3, grace, asked) == turns


@contextmanager
def over_http(tmp_path: Path) -> Iterator[tuple[ReportService, Spool, ReportSender]]:
    """A service, what rank 0 has to tell, and the uplink that tells it."""
    launch = launch_in(tmp_path).model_copy(update={"report_token": TOKEN})
    service = ReportService(Path(launch.service_file))
    service.start()
    spool = Spool(tmp_path / "rank.jsonl")
    uplink = ReportSender(launch, {0: tmp_path / "rank.jsonl"}, Group(tmp_path), period=0.3)
    try:
        yield service, spool, uplink
    finally:
        uplink._link._close()
        service.stop()


def test_metrics_follow_service_delay_and_notes_are_sent_at_once(tmp_path: Path) -> None:
    """Over HTTP: the header of one answer counts until the next one."""
    with over_http(tmp_path) as (service, spool, uplink):

        def told(*steps: int) -> list[int]:
            """Figures of these steps, one in each round; the steps that the service has heard of then."""
            for step in steps:
                spool.append(Metrics(rank=0, at=AT, step=step, values={"loss": 1.0}))
                uplink._send_report()
            return [m.step for m in service.messages[0] if m.kind == "metrics"]

        service.report_after = "9.0"  # thirty periods: twice what a slow answer makes them wait
        assert told(1, 2) == [1, 2]
        assert told(*range(3, 33)) == [1, 2]
        assert told(33) == list(range(1, 34))
        service.report_after = None
        spool.append(Note(rank=0, at=AT, type="hello", message="now"))
        assert told(34) == list(range(1, 35))
        assert uplink._periods_left <= 15 and service.repeated == 0


def test_changed_request_is_learned_while_figures_wait(tmp_path: Path) -> None:
    """Over HTTP, on the connection of the reports: the agent does not wait for its turn."""
    with over_http(tmp_path) as (service, spool, uplink):

        def rounds(number: int) -> int:
            """The number of reports that ``number`` rounds send; each round has figures."""
            before = service.requests
            for _ in range(number):
                spool.append(Metrics(rank=0, at=AT, step=1, values={"loss": 1.0}))
                uplink._send_report()
            return service.requests - before

        service.report_after = "9.0"
        assert rounds(2) == 1 and rounds(5) == 0
        wait_for(lambda: len(service.watches) == 1, "the watch", 10)
        assert service.watches[0] == {"desired": "run", "checkpoint_request": "0", "wait": "9.0"}
        service.control = Control(checkpoint_request=1)
        wait_for(lambda: rounds(1), "the report", 10)
        assert rounds(5) == 0
        wait_for(lambda: len(service.watches) == 2, "the next watch", 10)
        assert service.watches[1]["checkpoint_request"] == "1"
        spool.append(Note(rank=0, at=AT, type="hello", message="now"))
        assert rounds(1) == 1, "what must not wait goes out although an answer is open"
        service.control = Control(checkpoint_request=1, desired=Desired.SUSPEND)
        wait_for(lambda: rounds(1), "the report", 10)
        assert rounds(3) == 3, "a group that is to stop reports every time"
        assert len(service.watches) <= 3 and service.repeated == 0


def test_watch_that_the_service_refuses_or_cuts_off_costs_nothing(tmp_path: Path) -> None:
    with over_http(tmp_path) as (service, spool, uplink):
        service.report_after = "1.5"
        for step in range(12):
            spool.append(Metrics(rank=0, at=AT, step=step, values={"loss": 1.0}))
            uplink._send_report()
            if step == 3:
                assert uplink._link._connection is not None
                uplink._link._connection.sock.shutdown(socket.SHUT_RDWR)
        assert [m.step for m in service.messages[0]] == list(range(8)) and service.repeated == 0


def test_agent_messages_are_sent_after_pending_rank_0_messages(tmp_path: Path) -> None:
    ranks = [0, 1, 2, AGENT_RANK]
    group = Group(tmp_path, *ranks)
    for rank, spool in zip(ranks, group.spools, strict=True):
        for number in range(150 if rank == 0 else 700 if rank == 1 else 2):
            spool.append(Note(rank=rank, at=AT, type="hello", message=f"{number:0{LENGTHS[rank]}}"))
    for _ in range(8):
        group.uplink._send_report()
    heard = [batch.rank for report in group.sent for batch in report.batches for _ in batch.messages]
    assert heard.count(AGENT_RANK) == 2 and (heard.count(0), heard.count(1)) == (150, 700)
    assert AGENT_RANK not in heard[: len(heard) - heard[::-1].index(0)]
    assert heard.index(2) < heard.index(AGENT_RANK)  # and keeps no other rank from being heard


def test_notes_are_reported_at_once(group: Group) -> None:
    for number in range(4):
        group.spool.append(Note(rank=0, at=AT, type="hello", message=str(number)))
        group.uplink._send_report()
        assert len(group.sent) == number + 1


@pytest.mark.parametrize("phase", [AttemptPhase.LAUNCHING, AttemptPhase.STOPPING])
def test_launching_or_stopping_group_reports_every_period(group: Group, phase: AttemptPhase) -> None:
    group.phase = phase
    assert group.reports(5) == 5


def test_requested_stop_makes_reports_frequent(group: Group) -> None:
    group.desired = Desired.SUSPEND
    assert group.reports(6) >= 5


def test_reports_resume_as_soon_as_service_answers(group: Group) -> None:
    group.reports(1)
    group.away = True
    assert group.reports(5) == 0
    group.away = False
    assert group.reports(1) == 1


def test_retry_after_response_delays_reports_without_loss(tmp_path: Path) -> None:
    """429 with Retry-After, over HTTP; then the same lines by the same numbers."""
    with over_http(tmp_path) as (service, spool, uplink):
        for step in (1, 2, 3):
            spool.append(Note(rank=0, at=AT, type="step", message=str(step)))
        service.refuse, service.retry_after = (429, "too-many-requests"), "7"
        assert uplink._send_report() >= 7.0 and service.messages == {}
        service.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
        assert uplink._send_report() < 7.0
        service.refuse = None
        uplink._send_report()
        assert [m.message for m in service.messages[0]] == ["1", "2", "3"] and service.repeated == 0


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, 0.0), ("3", 3.0), (" 3 ", 3.0), ("-1", 0.0), ("9" * 30, 60.0), ("\u0663", 0.0)]
)
def test_retry_after_header_is_parsed(header: str | None, seconds: float) -> None:
    assert parse_retry_after(header) == seconds


def test_final_report_wait_is_limited_by_remaining_time(tmp_path: Path) -> None:
    launch = launch_in(tmp_path).model_copy(update={"report_token": TOKEN})
    service = ReportService(Path(launch.service_file))
    service.start()
    uplink = ReportSender(launch, {}, Group(tmp_path), period=0.3)
    delays: list[float] = []

    def pause(delay: float) -> None:
        delays.append(delay)
        service.refuse = None

    try:
        service.refuse, service.retry_after = (503, "busy"), "60"
        uplink._pause = pause  # type: ignore[method-assign]
        uplink._deadline = time.monotonic() + 8.0
        uplink._result = AttemptResult(
            job_id=launch.job_id,
            attempt=launch.attempt,
            cause=Cause.UNKNOWN,
            last_step=0,
            started_at=AT,
            ended_at=AT,
            ranks=[],
        )
        uplink._run()
        assert uplink._result is None and len(delays) == 1 and 3.0 < delays[0] <= 4.0
        assert list(service.results) == [0]
    finally:
        uplink._link._close()
        service.stop()
