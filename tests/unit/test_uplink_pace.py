"""Which reports may wait: what is only figures goes every second time, or less often to a service whose answers
are slow; everything else at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ratchet_contract.messages import (
    AGENT_RANK,
    AgentReport,
    AttemptResult,
    Control,
    Metrics,
    Note,
    Progress,
    ReportAck,
)
from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_worker.service_link import Unreachable, retry_after
from ratchet_worker.spool import Spool
from ratchet_worker.uplink import Status, Uplink, waiting_turns
from tests.support.report_service import TOKEN, ReportService
from tests.unit.test_worker_upload import launch_in

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
        self.uplink = Uplink(launch_in(folder), spools, self, period=0.3)
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
        """How many of so many rounds sent one; each has new figures."""
        before = len(self.sent)
        for step in range(rounds):
            self.figures(step + 1)
            self.uplink._once()
        return len(self.sent) - before


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


def test_figures_alone_are_sent_every_second_time_and_all_of_them(group: Group) -> None:
    assert group.reports(8) == 4
    steps = [m.step for report in group.sent for batch in report.batches for m in batch.messages if m.kind == "metrics"]
    assert steps == list(range(1, 9))


def test_a_slow_service_is_asked_for_less_and_gets_everything(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    post = group.post

    def slow(report: AgentReport, timeout: float | None = None) -> ReportAck:
        clock[0] += 0.1
        return post(report, timeout)

    monkeypatch.setattr("ratchet_worker.uplink.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(group.uplink._link, "post", slow)
    assert group.reports(30) == 5  # 0.1 s of 2.1: a turn in seven
    steps = [m.step for report in group.sent for batch in report.batches for m in batch.messages if m.kind == "metrics"]
    assert steps == list(range(1, 31))
    group.spool.append(Note(rank=0, at=AT, type="hello", message="now"))
    group.uplink._once()
    assert len(group.sent) == 6


@pytest.mark.parametrize(("answer", "turns"), [(0.0, 1), (0.02, 1), (0.1, 6), (0.2, 13), (5.0, 15)])
def test_figures_wait_for_twenty_times_the_answer_and_five_seconds_at_most(answer: float, turns: int) -> None:
    assert waiting_turns(answer, 0.3, 120.0) == turns


@pytest.mark.parametrize(("grace", "turns"), [(4.0, 3), (1.0, 1), (0.0, 1), (18.0, 15)])
def test_a_wish_to_stop_comes_within_a_quarter_of_the_time_that_it_gives(grace: float, turns: int) -> None:
    assert waiting_turns(5.0, 0.3, grace) == turns


@pytest.mark.parametrize(
    ("asked", "grace", "turns"), [(0.0, 120.0, 1), (0.5, 120.0, 1), (6.0, 120.0, 20), (6.0, 4.0, 3), (60.0, 120.0, 33)]
)
def test_figures_wait_as_long_as_the_service_asks_and_ten_seconds_at_most(
    asked: float, grace: float, turns: int
) -> None:
    assert waiting_turns(0.0, 0.3, grace, asked) == turns


@contextmanager
def over_http(tmp_path: Path) -> Iterator[tuple[ReportService, Spool, Uplink]]:
    """A service, what rank 0 has to tell, and the uplink that tells it."""
    launch = launch_in(tmp_path).model_copy(update={"report_token": TOKEN})
    service = ReportService(Path(launch.service_file))
    service.start()
    spool = Spool(tmp_path / "rank.jsonl")
    uplink = Uplink(launch, {0: tmp_path / "rank.jsonl"}, Group(tmp_path), period=0.3)
    try:
        yield service, spool, uplink
    finally:
        uplink._link._close()
        service.stop()


def test_figures_come_when_the_service_has_asked_for_them_and_the_rest_at_once(tmp_path: Path) -> None:
    """Over HTTP: the header of one answer counts until the next one."""
    with over_http(tmp_path) as (service, spool, uplink):

        def told(*steps: int) -> list[int]:
            """Figures of these steps, one in each round; the steps that the service has heard of then."""
            for step in steps:
                spool.append(Metrics(rank=0, at=AT, step=step, values={"loss": 1.0}))
                uplink._once()
            return [m.step for m in service.messages[0] if m.kind == "metrics"]

        service.report_after = "9.0"  # thirty periods: twice what a slow answer makes them wait
        assert told(1, 2) == [1, 2]
        assert told(*range(3, 33)) == [1, 2]
        assert told(33) == list(range(1, 34))
        service.report_after = None
        spool.append(Note(rank=0, at=AT, type="hello", message="now"))
        assert told(34) == list(range(1, 35))
        assert uplink._turns <= 15 and service.repeated == 0


def test_what_an_agent_says_of_checkpoints_comes_behind_all_that_rank_0_has_said(tmp_path: Path) -> None:
    ranks = [0, 1, 2, AGENT_RANK]
    group = Group(tmp_path, *ranks)
    for rank, spool in zip(ranks, group.spools, strict=True):
        for number in range(150 if rank == 0 else 700 if rank == 1 else 2):
            spool.append(Note(rank=rank, at=AT, type="hello", message=f"{number:0{LENGTHS[rank]}}"))
    for _ in range(8):
        group.uplink._once()
    heard = [batch.rank for report in group.sent for batch in report.batches for _ in batch.messages]
    assert heard.count(AGENT_RANK) == 2 and (heard.count(0), heard.count(1)) == (150, 700)
    assert AGENT_RANK not in heard[: len(heard) - heard[::-1].index(0)]
    assert heard.index(2) < heard.index(AGENT_RANK)  # and keeps no other rank from being heard


def test_what_is_no_figure_goes_at_once(group: Group) -> None:
    for number in range(4):
        group.spool.append(Note(rank=0, at=AT, type="hello", message=str(number)))
        group.uplink._once()
        assert len(group.sent) == number + 1


@pytest.mark.parametrize("phase", [AttemptPhase.LAUNCHING, AttemptPhase.STOPPING])
def test_a_group_that_starts_or_stops_is_heard_every_time(group: Group, phase: AttemptPhase) -> None:
    group.phase = phase
    assert group.reports(5) == 5


def test_a_stop_that_is_wanted_is_followed_closely(group: Group) -> None:
    group.desired = Desired.SUSPEND
    assert group.reports(6) >= 5


def test_an_outage_ends_as_soon_as_somebody_answers(group: Group) -> None:
    group.reports(1)
    group.away = True
    assert group.reports(5) == 0
    group.away = False
    assert group.reports(1) == 1


def test_a_service_that_says_when_to_come_back_is_asked_no_earlier_and_gets_everything(tmp_path: Path) -> None:
    """429 with Retry-After, over HTTP; then the same lines by the same numbers."""
    with over_http(tmp_path) as (service, spool, uplink):
        for step in (1, 2, 3):
            spool.append(Note(rank=0, at=AT, type="step", message=str(step)))
        service.refuse, service.retry_after = (429, "too-many-requests"), "7"
        assert uplink._once() >= 7.0 and service.messages == {}
        service.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
        assert uplink._once() < 7.0
        service.refuse = None
        uplink._once()
        assert [m.message for m in service.messages[0]] == ["1", "2", "3"] and service.repeated == 0


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, 0.0), ("3", 3.0), (" 3 ", 3.0), ("-1", 0.0), ("9" * 30, 60.0), ("\u0663", 0.0)]
)
def test_what_retry_after_says(header: str | None, seconds: float) -> None:
    assert retry_after(header) == seconds


def test_the_last_word_is_not_kept_back_by_a_wait_beyond_the_end(tmp_path: Path) -> None:
    launch = launch_in(tmp_path).model_copy(update={"report_token": TOKEN})
    service = ReportService(Path(launch.service_file))
    service.start()
    uplink = Uplink(launch, {}, Group(tmp_path), period=0.3)
    delays: list[float] = []

    def pause(delay: float) -> None:
        delays.append(delay)
        service.refuse = None

    try:
        service.refuse, service.retry_after = (503, "busy"), "60"
        uplink._pause = pause  # type: ignore[method-assign]
        uplink._end = time.monotonic() + 8.0
        uplink._result = AttemptResult(
            job_id=launch.job_id,
            epoch=launch.epoch,
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
