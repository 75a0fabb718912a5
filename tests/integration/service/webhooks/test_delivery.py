"""Events reach webhooks at least once and in order per job, whatever the receiver does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from ratchet_contract.api.webhooks import NOT_EXACT, WebhookChange, WebhookRequest
from ratchet_contract.phases import Event as Transition
from ratchet_contract.phases import EventType
from ratchet_service.db import rounds
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.leases import LeaseLost, lease_values
from ratchet_service.db.models import Event, Job, JobLabel, Webhook, WebhookDelivery
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.usecases import webhooks
from ratchet_service.webhooks import deliver as deliver_module
from ratchet_service.webhooks.deliver import MAX_TRIES, Deliverer, passable, pause_after
from ratchet_service.webhooks.settled import SettledEvents
from tests.support.receiver import Receiver, happen, job_row, receiving, to_loopback
from tests.support.server import wait_for

pytestmark = pytest.mark.takes_turns


@pytest.fixture(autouse=True)
def hold_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, the next try is that after ``make_due``."""
    monkeypatch.setattr(deliver_module, "pause_after", lambda _: 3600.0)


def create(database: Database, receiver: Receiver, **fields: Any) -> tuple[str, str]:
    """Id and secret of a webhook."""
    with database.write() as session:
        made = webhooks.create(session, "root", WebhookRequest(url=receiver.url, **fields))
    return made.id, made.secret or ""


def deliver(database: Database, webhook_id: str) -> None:
    """All that is due now, as a process of its own would send it."""
    settled = SettledEvents(database).newest()
    if has_work(database, webhook_id, settled):
        Deliverer(database, to_loopback()).deliver(webhook_id, settled)
    assert not has_work(database, webhook_id, settled)


def has_work(database: Database, webhook_id: str, settled: int) -> bool:
    with database.read() as session:
        return passable(session, session.get_one(Webhook, webhook_id), settled) is None


def make_due(database: Database) -> None:
    """The pause before the next try is over."""
    with database.write() as session:
        session.execute(sa.update(WebhookDelivery).values(next_try=utc_now() - timedelta(days=1)))


def statuses(database: Database, webhook_id: str) -> list[str]:
    with database.read() as session:
        return [one.status for one in webhooks.deliveries(session, webhook_id, 100).items][::-1]


def test_a_failing_job_holds_back_only_its_own_later_events(database: Database) -> None:
    bad, good = job_row(database, "bad"), job_row(database, "good")
    broken = True
    with receiving(lambda request: "500" if broken and request.event[0] == bad else "200") as receiver:
        webhook_id, _ = create(database, receiver)
        for job_id in (bad, good, bad, good, bad):
            happen(database, job_id)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.accepted()] == [good, good]
        assert statuses(database, webhook_id) == ["retrying", "delivered", "delivered"]
        deliver(database, webhook_id)
        assert len(receiver.requests) == 3, "it pauses before the next try"
        broken = False
        make_due(database)
        deliver(database, webhook_id)
        assert statuses(database, webhook_id) == ["delivered"] * 5
    events = [one.event[1] for one in receiver.accepted() if one.event[0] == bad]
    assert len(events) == 3 and events == sorted(events)
    assert receiver.requests[0].id == receiver.accepted()[2].id, "the same message, so the same id"
    assert receiver.requests[0].body == receiver.accepted()[2].body


def add_many(database: Database, job_id: str, count: int) -> None:
    """``count`` more events of the job, whose messages are their numbers."""
    with database.write() as session:
        lock_job(session, job_id)
        for number in range(count):
            add_event(session, job_id, EventType.CHECKPOINT_FAILED, str(number))


def test_job_with_many_waiting_events_delays_no_other_and_gets_them_in_order(
    database: Database,
) -> None:
    bad, good = job_row(database, "bad"), job_row(database, "good")
    half = 40  # each takes some transactions
    with receiving(lambda request: "500" if request.event[0] == bad else "200") as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, bad)
        add_many(database, bad, half)
        happen(database, good)
        add_many(database, bad, half)
        happen(database, good)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.requests] == [bad, good, good]
        assert statuses(database, webhook_id) == ["retrying", "delivered", "delivered"], "a held job has one row"
        receiver.behave = lambda _: "200"
        make_due(database)
        deliver(database, webhook_id)
        held = [one.json["data"]["message"] for one in receiver.accepted() if one.event[0] == bad]
        assert held[1:] == [str(number) for number in [*range(half), *range(half)]]
        assert len({one.id for one in receiver.accepted()}) == len(receiver.accepted()) == 2 * half + 3
        happen(database, bad)
        deliver(database, webhook_id)
        assert len(receiver.accepted()) == 2 * half + 4, "its job is no longer held"


def test_new_event_is_sent_among_the_waiting_ones_of_a_job(database: Database) -> None:
    bad, good = job_row(database, "bad"), job_row(database, "good")
    with receiving(lambda _: "500") as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, bad)
        add_many(database, bad, 100)
        deliver(database, webhook_id)

        def behave(_: Any) -> str:
            if len(receiver.requests) == 10:
                happen(database, good)
            return "200"

        receiver.behave = behave
        make_due(database)
        with Deliverer(database, to_loopback()).running():
            wait_for(lambda: len(receiver.accepted()) == 102, "every event")
    assert good in [one.event[0] for one in receiver.accepted()]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_waiting_events_survive_a_process_that_is_lost_between_any_two(database: Database, after: int) -> None:
    """The lease is taken away while a request is answered, so that its result is not recorded, as after a kill."""
    bad = job_row(database, "bad")
    with receiving(lambda _: "500") as receiver:
        webhook_id, _ = create(database, receiver)
        for _ in range(4):
            happen(database, bad)
        deliver(database, webhook_id)
        receiver.requests.clear()

        def behave(_: Any) -> str:
            if len(receiver.requests) + 1 == after:
                with database.write() as session:
                    webhooks.find(session, webhook_id, lock=True)
            return "200"

        receiver.behave = behave
        make_due(database)
        settled = SettledEvents(database).newest()
        with pytest.raises(LeaseLost):
            Deliverer(database, to_loopback()).deliver(webhook_id, settled)
        deliver(database, webhook_id)
    events = [one.event[1] for one in receiver.accepted()]
    assert len(events) == 5 and len(set(events)) == 4 and events == sorted(events)
    assert statuses(database, webhook_id) == ["delivered"] * 4


def test_cursor_does_not_pass_an_event_whose_job_was_held_a_moment_ago(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service delivers the held event after this one has looked, and before this one advances the cursor."""
    job_id = job_row(database, "a")
    with receiving(lambda _: "500") as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)
        deliver(database, webhook_id)
        held = SettledEvents(database).newest()
        happen(database, job_id)
        receiver.behave = lambda _: "200"
        real, passed = deliver_module.passable, []

        def other_first(session: Session, webhook: Webhook, settled: int) -> int | None:
            upto = real(session, webhook, settled)
            if not passed:
                passed.append(upto)
                session.rollback()
                make_due(database)
                Deliverer(database, to_loopback()).deliver(webhook_id, held)
            return upto

        monkeypatch.setattr(deliver_module, "passable", other_first)
        deliverer = Deliverer(database, to_loopback())
        wait_for(lambda: deliverer.run_round() or len(receiver.accepted()) == 2, "both events")
        assert passed and passed[0] is not None
        wait_for(lambda: statuses(database, webhook_id) == ["delivered"] * 2, "both deliveries")


def test_waiting_events_are_chosen_by_the_filters_at_the_time_of_their_delivery(database: Database) -> None:
    job_id = job_row(database, "a", "ann", team="vision")
    with receiving(lambda _: "500") as receiver:
        webhook_id, _ = create(database, receiver, owner="ann", label="team=vision")
        happen(database, job_id)
        happen(database, job_id, EventType.CHECKPOINT)
        happen(database, job_id, EventType.PINNED)
        happen(database, job_id, EventType.CHECKPOINT_FAILED)
        deliver(database, webhook_id)
        with database.write() as session:
            webhooks.change(session, webhook_id, WebhookChange(types=["job.checkpoint-failed", "job.pinned"]))
        receiver.behave = lambda _: "200"
        make_due(database)
        deliver(database, webhook_id)
        kinds = [one.json["type"] for one in receiver.accepted()]
        assert kinds == ["job.checkpoint-failed", "job.pinned", "job.checkpoint-failed"]
        receiver.behave = lambda _: "500"
        for _ in range(2):
            happen(database, job_id)
        deliver(database, webhook_id)
        with database.write() as session:
            session.execute(sa.update(JobLabel).values(value="speech"))
        receiver.behave = lambda _: "200"
        make_due(database)
        deliver(database, webhook_id)
        assert len(receiver.accepted()) == 4, "the event that was tried before; the other does not match any more"


def test_disabled_and_enabled_webhook_continues_with_the_waiting_events(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving(lambda _: "500") as receiver:
        webhook_id, _ = create(database, receiver)
        for _ in range(3):
            happen(database, job_id)
        deliver(database, webhook_id)
        with database.write() as session:
            webhooks.change(session, webhook_id, WebhookChange(enabled=False))
        receiver.behave = lambda _: "200"
        happen(database, job_id)
        with database.write() as session:
            webhooks.change(session, webhook_id, WebhookChange(enabled=True))
        deliver(database, webhook_id)
    events = [one.event[1] for one in receiver.accepted()]
    assert len(events) == 4 and events == sorted(events)


def test_no_new_event_is_sent_while_too_many_jobs_are_held(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver_module, "_MAX_HELD", 3)
    jobs = [job_row(database, f"j{number}") for number in range(4)]
    with receiving(lambda request: "500" if request.event[0] != jobs[3] else "200") as receiver:
        webhook_id, _ = create(database, receiver)
        for job_id in jobs:
            happen(database, job_id)
        deliver(database, webhook_id)
        assert len(receiver.requests) == 3
        receiver.behave = lambda _: "200"
        make_due(database)
        deliver(database, webhook_id)
    assert [one.event[0] for one in receiver.accepted()] == jobs


@pytest.mark.parametrize(("status", "pauses"), [("429", True), ("503", True), ("500", False)])
def test_retry_after_of_429_and_503_pauses_the_events_of_all_jobs_for_an_hour_at_most(
    database: Database, monkeypatch: pytest.MonkeyPatch, status: str, pauses: bool
) -> None:
    monkeypatch.setattr(deliver_module, "pause_after", lambda _: 0.0)
    first, second, third = (job_row(database, name) for name in ("a", "b", "c"))
    with receiving(lambda _: "400") as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, first)
        monkeypatch.setattr(deliver_module, "pause_after", lambda _: 60.0)
        deliver(database, webhook_id)
        receiver.behave, receiver.fields["Retry-After"] = lambda _: status, "7200"
        happen(database, second)
        deliver(database, webhook_id)
        receiver.behave = lambda _: "200"
        happen(database, third)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.accepted()] == ([] if pauses else [third])
        with database.read() as session:
            until = webhooks.view(session, webhooks.find(session, webhook_id)).new_after
            tries = {one.job_id: one.next_try for one in session.scalars(sa.select(WebhookDelivery))}
        if not pauses:
            assert until is None
            return
        assert until is not None and 3590 < (until - utc_now()).total_seconds() <= 3600
        assert tries[first] == until < utc_now() + timedelta(hours=1.5) < (tries[second] or until)
        end_pause(database)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.accepted()] == [third]
        with database.read() as session:
            assert webhooks.view(session, webhooks.find(session, webhook_id)).new_after is None


def test_next_event_of_a_job_waits_too_if_the_last_refusal_of_the_first_asks_for_a_pause(database: Database) -> None:
    bad, good = job_row(database, "bad"), job_row(database, "good")
    with receiving(lambda request: "429" if request.event[0] == bad else "200") as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, bad)
        happen(database, bad)
        deliver(database, webhook_id)
        happen(database, good)
        deliver(database, webhook_id)
        with database.write() as session:
            failing = WebhookDelivery.status == "pending"
            session.execute(sa.update(WebhookDelivery).where(failing).values(tries=MAX_TRIES - 1, next_try=None))
        receiver.fields["Retry-After"] = "600"
        deliver(database, webhook_id)
    assert statuses(database, webhook_id) == ["failed", "waiting", "delivered"]
    assert len(receiver.requests) == 3


@pytest.mark.both_databases
def test_index_serves_the_search_for_the_next_event_of_a_held_job(database: Database) -> None:
    jobs = [job_row(database, f"j{number}") for number in range(50)]
    with database.write() as session:
        rows = [
            {"job_id": jobs[number % 50], "at": utc_now(), "type": "checkpoint", "message": "", "data": {}}
            for number in range(10_000)
        ]
        session.execute(sa.insert(Event), rows)
    with database.write() as session:
        session.execute(sa.text("ANALYZE"))
    explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"
    seen: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append(statement)
        given.append(parameters)

    given: list[Any] = []
    with receiving(lambda _: "500") as receiver:
        webhook_id, _ = create(database, receiver)
        with database.read() as session:
            webhook = session.get_one(Webhook, webhook_id)
            newest = session.scalar(sa.select(sa.func.max(Event.id))) or 0
            sa.event.listen(database.engine, "before_cursor_execute", record)
            try:
                deliver_module._matching(
                    session, webhook, 1, Event.job_id == jobs[7], Event.id > newest - 5000, Event.id <= newest
                )
            finally:
                sa.event.remove(database.engine, "before_cursor_execute", record)
            connection = session.connection()
            lines = connection.exec_driver_sql(f"{explain} {seen[-1]}", given[-1]).all()
    plan = "\n".join(str(line) for line in lines)
    assert "ix_events_job_id_id" in plan, plan


@pytest.mark.parametrize("answer", ["close", "redirect", "404"])
def test_what_is_not_accepted_is_sent_again(database: Database, answer: str) -> None:
    job_id = job_row(database, "a")
    with receiving(lambda _: answer) as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)
        deliver(database, webhook_id)
        assert len(receiver.requests) == 1 and statuses(database, webhook_id) == ["retrying"]
        receiver.behave = lambda _: "200"
        make_due(database)
        deliver(database, webhook_id)
    assert statuses(database, webhook_id) == ["delivered"]


@pytest.mark.both_databases
def test_event_committed_after_one_with_a_larger_id_is_sent(database: Database) -> None:
    """On SQLite the second writer waits for the first; on PostgreSQL it overtakes it."""
    slow, fast = job_row(database, "slow"), job_row(database, "fast")
    settled = SettledEvents(database)
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        with database.write() as session:
            _write(session, slow)
            if not database.is_sqlite:
                happen(database, fast)
                for _ in range(3):
                    largest = settled.newest()
                    with database.read() as other:
                        assert largest < (other.scalar(sa.select(sa.func.max(Event.id))) or 0)
                    Deliverer(database, to_loopback()).deliver(webhook_id, largest)
                assert receiver.requests == []
        if database.is_sqlite:
            happen(database, fast)
        settled.newest()
        Deliverer(database, to_loopback()).deliver(webhook_id, settled.newest())
    assert [one.event[0] for one in receiver.accepted()] == [slow, fast]


@pytest.mark.both_databases
def test_writers_that_never_pause_do_not_hold_delivery_back(database: Database) -> None:
    """At each look another transaction has written and not committed; only those of the look before matter."""
    if database.is_sqlite:
        pytest.skip("SQLite has one writer at a time: the test on PostgreSQL runs it")
    settled, jobs = SettledEvents(database), [job_row(database, name) for name in "abc"]
    with ExitStack() as later:
        with database.write() as open_at_first:
            happen(database, jobs[0])
            _write(open_at_first, jobs[1])
            assert settled.newest() == 0
            _write(later.enter_context(database.write()), jobs[2])
        first = settled.newest()
        with database.read() as session:
            assert session.scalars(sa.select(Event.job_id).where(Event.id <= first)).all() == [jobs[0]]


def _write(session: Session, job_id: str) -> None:
    """An event that is not committed yet."""
    lock_job(session, job_id)
    add_event(session, job_id, EventType.CHECKPOINT_FAILED, "x")
    session.flush()


def test_webhook_is_disabled_after_the_last_try_and_continues_where_it_stood(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = job_row(database, "a")
    with receiving(lambda _: "503") as receiver, receiving() as other:
        webhook_id, _ = create(database, receiver)
        other_id, _ = create(database, other)
        happen(database, job_id)
        happen(database, job_id)
        with caplog.at_level(logging.WARNING):
            for _ in range(MAX_TRIES - 1):
                deliver(database, webhook_id)
                make_due(database)
            assert caplog.records == []
            with pytest.raises(LeaseLost, match="disabled"):
                deliver(database, webhook_id)
        assert webhook_id in caplog.text and receiver.url not in caplog.text
        assert len(receiver.requests) == MAX_TRIES
        with database.read() as session:
            view = webhooks.view(session, webhooks.find(session, webhook_id))
        assert not view.enabled and f"of {job_id} was not accepted in {MAX_TRIES} tries" in str(view.disabled_reason)
        deliver(database, other_id)
        assert [one.json["type"] for one in other.accepted()][-1] == "job.webhook-disabled"
        deliver(database, webhook_id)
        assert len(receiver.requests) == MAX_TRIES, "a disabled webhook gets nothing"
        receiver.behave = lambda _: "200"
        happen(database, job_id)
        with database.write() as session:
            assert webhooks.change(session, webhook_id, WebhookChange(enabled=True)).enabled
        deliver(database, webhook_id)
        assert [one.json["type"] for one in receiver.accepted()] == [
            "job.checkpoint-failed",
            "job.checkpoint-failed",
            "job.webhook-disabled",
            "job.checkpoint-failed",
        ]
    assert 2 < sum(pause_after(tries) for tries in range(1, MAX_TRIES)) / 86400 < 4, "about three days"


def test_answer_410_disables_the_webhook_at_once(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving(lambda _: "410") as receiver, receiving() as other:
        webhook_id, _ = create(database, receiver)
        other_id, _ = create(database, other)
        for _ in range(2):
            happen(database, job_id)
        with pytest.raises(LeaseLost, match="disabled"):
            deliver(database, webhook_id)
        with database.read() as session:
            view = webhooks.view(session, webhooks.find(session, webhook_id))
        assert not view.enabled and "was answered with 410 Gone" in str(view.disabled_reason)
        deliver(database, other_id)
        assert [one.json["type"] for one in other.accepted()][-1] == "job.webhook-disabled"
        receiver.behave = lambda _: "200"
        with database.write() as session:
            webhooks.change(session, webhook_id, WebhookChange(enabled=True))
        deliver(database, webhook_id)
        assert len(receiver.accepted()) == 3 and receiver.requests[0].id == receiver.accepted()[0].id


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7200", 7199, 7205),
        ("999999999999", 6 * 3600 - 1, 6 * 3600 + 5),
        (lambda: format_datetime(utc_now() + timedelta(hours=1), usegmt=True), 3590, 3605),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 5),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 6 * 3600 - 1, 6 * 3600 + 5),
        ("-5", 0, 5),
        ("1e400", 0, 5),
        ("nan", 0, 5),
        ("٣", 0, 5),
        ("soon", 0, 5),
    ],
)
def test_retry_after_lengthens_the_pause_up_to_six_hours(
    database: Database, monkeypatch: pytest.MonkeyPatch, header: Any, least: float, most: float
) -> None:
    monkeypatch.setattr(deliver_module, "pause_after", lambda _: 1.0)
    job_id = job_row(database, "a")
    with receiving(lambda _: "429") as receiver:
        receiver.fields["Retry-After"] = header if isinstance(header, str) else header()
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)
        settled = SettledEvents(database).newest()
        Deliverer(database, to_loopback()).deliver(webhook_id, settled)
        with database.read() as session:
            (row,) = session.scalars(sa.select(WebhookDelivery))
        assert row.next_try is not None and least <= (row.next_try - row.at).total_seconds() <= most


def test_enabled_from_now_drops_what_was_not_delivered(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving(lambda _: "503") as receiver:
        webhook_id, _ = create(database, receiver)
        for _ in range(2):
            happen(database, job_id)
        deliver(database, webhook_id)
        with database.write() as session:
            webhooks.change(session, webhook_id, WebhookChange(enabled=False))
        happen(database, job_id)
        with database.write() as session:
            view = webhooks.change(session, webhook_id, WebhookChange(enabled=True, from_now=True))
        assert view.enabled and (view.pending, view.failures) == (0, 0)
        receiver.behave = lambda _: "200"
        happen(database, job_id)
        deliver(database, webhook_id)
        assert statuses(database, webhook_id) == ["dropped", "delivered"]
        with database.read() as session:
            newest = session.scalar(sa.select(sa.func.max(Event.id)))
            dropped = webhooks.deliveries(session, webhook_id, 100).items[1]
        assert [one.event for one in receiver.accepted()] == [(job_id, newest)]
        assert dropped.error == "an admin let the webhook begin with new events"


def test_receiver_that_is_down_gets_only_the_events_that_failed(database: Database) -> None:
    jobs = [job_row(database, f"j{number}") for number in range(12)]
    with receiving(lambda _: "503") as receiver:
        webhook_id, _ = create(database, receiver)
        for job_id in jobs:
            happen(database, job_id)
        for _ in range(2):
            deliver(database, webhook_id)
            make_due(database)
        assert {one.event[0] for one in receiver.requests} == set(jobs[:5])
        receiver.behave = lambda _: "200"
        deliver(database, webhook_id)
        assert sorted(one.event[0] for one in receiver.accepted()) == sorted(jobs)


def test_receiver_that_came_back_is_noticed_by_a_new_event(database: Database) -> None:
    jobs = [job_row(database, f"j{number}") for number in range(8)]
    with receiving(lambda _: "503") as receiver:
        webhook_id, _ = create(database, receiver)
        for job_id in jobs:
            happen(database, job_id)
        deliver(database, webhook_id)
        assert len(receiver.requests) == 5
        end_pause(database)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.requests[5:]] == [jobs[5]], "one new event is tried"
        receiver.behave = lambda _: "200"
        deliver(database, webhook_id)
        assert receiver.accepted() == []
        end_pause(database)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.accepted()] == jobs[6:]


def end_pause(database: Database) -> None:
    """The pause before new events is over."""
    with database.write() as session:
        session.execute(sa.update(Webhook).values(new_after=utc_now() - timedelta(seconds=1)))


def test_one_job_whose_events_are_rejected_does_not_hold_others_back(database: Database) -> None:
    bad, good = job_row(database, "bad"), job_row(database, "good")
    with receiving(lambda request: "400" if request.event[0] == bad else "200") as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, bad)
        for _ in range(7):
            deliver(database, webhook_id)
            make_due(database)
        happen(database, good)
        deliver(database, webhook_id)
        assert [one.event[0] for one in receiver.accepted()] == [good]


def test_event_that_alone_is_never_accepted_is_given_up(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = job_row(database, "bad"), job_row(database, "good")
    with receiving(lambda _: "400") as receiver:
        webhook_id, _ = create(database, receiver, types=["job.*"])
        for _ in range(2):
            happen(database, bad)
        deliver(database, webhook_id)
        rejected = receiver.requests[0].event
        receiver.behave = lambda request: "400" if request.event == rejected else "200"
        happen(database, good)
        for _ in range(MAX_TRIES - 1):
            make_due(database)
            deliver(database, webhook_id)
        deliver(database, webhook_id)
        assert statuses(database, webhook_id) == ["failed", "delivered", "delivered", "delivered"]
        with database.read() as session:
            assert webhooks.view(session, webhooks.find(session, webhook_id)).enabled
    assert [one.event[0] for one in receiver.accepted()] == [good, bad, bad]
    assert receiver.accepted()[-1].json["type"] == "job.webhook-gave-up"
    assert f"of {bad} is given up after {MAX_TRIES} tries" in caplog.text


def test_error_of_the_database_is_raised_as_it_is_and_the_lease_ends(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)
        with failing_at_insert(database), pytest.raises(OperationalError, match="disk I/O error"):
            Deliverer(database, to_loopback()).deliver(webhook_id, SettledEvents(database).newest())
        deliver(database, webhook_id)
    assert statuses(database, webhook_id) == ["delivered"]


@contextmanager
def failing_at_insert(database: Database) -> Iterator[None]:
    """The database stores no delivery meanwhile."""

    def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO webhook_deliveries"):
            raise OperationalError(statement, None, Exception("disk I/O error"))

    sa.event.listen(database.engine, "before_cursor_execute", fail)
    yield
    sa.event.remove(database.engine, "before_cursor_execute", fail)


def test_webhook_with_an_error_pauses_before_it_is_tried_again(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ERROR_PAUSE", 3600.0)
    job_id = job_row(database, "a")
    with receiving() as receiver, failing_at_insert(database):
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)
        deliverer = Deliverer(database, to_loopback())
        wait_for(lambda: deliverer.run_round() or "disk I/O error" in caplog.text, "the error to be logged")
        deliverer._at_work[webhook_id].join(1)
        deliverer.run_round()
        deliverer._stopping.set()
        deliverer._at_work[webhook_id].join(30)
        assert len(receiver.requests) == 1 and len(caplog.records) == 1


def test_expired_lease_does_not_stop_the_cursor_of_an_idle_webhook(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        with database.write() as session:
            for key, value in lease_values(session, "elsewhere/1/1", -1).items():
                setattr(session.get_one(Webhook, webhook_id), key, value)
        happen(database, job_id, EventType.CHECKPOINT)
        deliverer = Deliverer(database, to_loopback())
        for _ in range(2):
            deliverer.run_round()
    with database.read() as session:
        assert session.get_one(Webhook, webhook_id).cursor == session.scalar(sa.select(sa.func.max(Event.id)))


def test_one_process_delivers_at_a_time(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)
        settled = SettledEvents(database).newest()
        with database.write() as session:  # of a process on another machine
            for key, value in lease_values(session, "elsewhere/1/1", 60).items():
                setattr(session.get_one(Webhook, webhook_id), key, value)
        assert not has_work(database, webhook_id, settled)
        Deliverer(database, to_loopback()).deliver(webhook_id, settled)
        assert receiver.requests == []
        with database.write() as session:  # it has died
            session.get_one(Webhook, webhook_id).lease_expires_at = utc_now() - timedelta(seconds=1)
        both = [Deliverer(database, to_loopback()) for _ in range(2)]
        threads = [threading.Thread(target=one.deliver, args=(webhook_id, settled)) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(receiver.requests) == 1


@pytest.mark.both_databases
def test_two_services_deliver_each_event_once_and_in_order(database: Database) -> None:
    jobs = [job_row(database, name) for name in "abc"]
    with receiving() as receiver, ExitStack() as services:
        webhook_id, _ = create(database, receiver)
        for _ in range(2):
            services.enter_context(Deliverer(database, to_loopback()).running())
        for number in range(60):
            happen(database, jobs[number % 3])
        wait_for(lambda: statuses(database, webhook_id) == ["delivered"] * 60, "every event to be delivered")
    events = [one.event for one in receiver.requests]
    assert len(events) == 60
    assert all(events == sorted(events) for events in ([n for job, n in events if job == one] for one in jobs))


def test_process_that_lost_the_lease_records_nothing(database: Database) -> None:
    """It was suspended while it sent: the next one has sent the event, too, and recorded it."""
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        happen(database, job_id)

        def change(_: Any) -> str:
            with database.write() as session:
                webhooks.find(session, webhook_id, lock=True)
            return "200"

        receiver.behave = change
        settled = SettledEvents(database).newest()
        with pytest.raises(LeaseLost):
            Deliverer(database, to_loopback()).deliver(webhook_id, settled)
        assert statuses(database, webhook_id) == []
        receiver.behave = lambda _: "200"
        deliver(database, webhook_id)
    assert [one.id for one in receiver.requests] == [receiver.requests[0].id] * 2


def test_filters_by_type_owner_and_label(database: Database) -> None:
    vision = job_row(database, "vision", "ann", team="vision")
    speech = job_row(database, "speech", "bob", team="speech")
    with receiving() as receiver:
        makes: dict[str, dict[str, Any]] = {
            "default": {},
            "all": {"types": ["job.*"]},
            "owner": {"owner": "ann", "types": ["job.failed", "job.cancelled"]},
            "label": {"label": "team=speech", "types": ["job.*"]},
            "elsewhere": {"label": "team=other", "types": ["job.*"]},
        }
        ids = {name: create(database, receiver, **fields)[0] for name, fields in makes.items()}
        for job_id in (vision, speech):
            happen(database, job_id, Transition.TRAINING, **{"from": "STARTING", "to": "RUNNING"})
            happen(database, job_id, EventType.RESUMED, verdict="exact")
            happen(database, job_id, EventType.RESUMED, verdict="not-exact")
            happen(database, job_id, Transition.CANCEL, **{"from": "QUEUED", "to": "CANCELLED"})
        found = {}
        for name, webhook_id in ids.items():
            receiver.requests.clear()
            deliver(database, webhook_id)
            found[name] = [(one.event[0], one.json["type"]) for one in receiver.requests]
    every = ["job.training", "job.resumed", NOT_EXACT, "job.cancelled"]
    assert found == {
        "default": [(job_id, kind) for job_id in (vision, speech) for kind in (NOT_EXACT, "job.cancelled")],
        "all": [(job_id, kind) for job_id in (vision, speech) for kind in every],
        "owner": [(vision, "job.cancelled")],
        "label": [(speech, kind) for kind in every],
        "elsewhere": [],
    }


def test_changed_filter_applies_to_later_events_alone(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        deliverer = Deliverer(database, to_loopback())
        happen(database, job_id, EventType.CHECKPOINT)
        for _ in range(2):
            deliverer.run_round()
        with database.write() as session:
            webhooks.change(session, webhook_id, WebhookChange(types=["job.*"]))
        happen(database, job_id, EventType.PINNED)
        for _ in range(2):
            deliverer.run_round()
        wait_for(lambda: receiver.requests, "the event to be sent")
        wait_for(lambda: statuses(database, webhook_id) == ["delivered"], "the delivery to be recorded")
    assert [one.json["type"] for one in receiver.requests] == ["job.pinned"]


def test_many_events_without_a_match_are_passed_and_old_deliveries_not_kept(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, _ = create(database, receiver)
        with database.write() as session:
            lock_job(session, job_id)
            for number in range(1000):
                kind = EventType.CHECKPOINT_FAILED if number % 8 == 7 else EventType.CHECKPOINT
                add_event(session, job_id, kind, str(number))
        deliver(database, webhook_id)
    assert [one.json["data"]["message"] for one in receiver.accepted()] == [str(n) for n in range(7, 1000, 8)]
    with database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(WebhookDelivery)) == 100


def test_events_of_a_deleted_job_are_dropped_and_said_to_be(database: Database) -> None:
    gone, stays = job_row(database, "gone"), job_row(database, "stays")
    with receiving(lambda _: "503") as receiver:
        webhook_id, _ = create(database, receiver)
        for _ in range(6):
            happen(database, gone)
        deliver(database, webhook_id)
        with database.write() as session:
            session.execute(sa.delete(Job).where(Job.id == gone))
        receiver.behave = lambda _: "200"
        happen(database, stays)
        make_due(database)
        deliver(database, webhook_id)
    assert statuses(database, webhook_id) == ["dropped", "delivered"]
    assert [one.event[0] for one in receiver.accepted()] == [stays]


def verifies(secret: str, receiver: Receiver) -> bool:
    request = receiver.requests[-1]
    try:
        Verifier(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


def test_signatures_are_those_of_standard_webhooks_and_rotation_has_both(database: Database) -> None:
    job_id = job_row(database, "a")
    with receiving() as receiver:
        webhook_id, old = create(database, receiver)
        happen(database, job_id)
        deliver(database, webhook_id)
        assert verifies(old, receiver) and not verifies("whsec_" + "A" * 43 + "=", receiver)
        with database.write() as session:
            new = webhooks.rotate(session, webhook_id).secret
        assert new is not None and new != old
        happen(database, job_id)
        deliver(database, webhook_id)
        assert verifies(old, receiver) and verifies(new, receiver)
        with database.write() as session:
            new = webhooks.rotate(session, webhook_id).secret
        happen(database, job_id)
        deliver(database, webhook_id)
        assert verifies(old, receiver) and verifies(str(new), receiver), (
            "a second rotation keeps the first secret's time"
        )
        with database.write() as session:
            session.get_one(Webhook, webhook_id).old_secret_until = utc_now() - timedelta(seconds=1)
        happen(database, job_id)
        deliver(database, webhook_id)
        assert not verifies(old, receiver) and verifies(str(new), receiver)
        with database.read() as session:
            assert session.get_one(Webhook, webhook_id).old_secret is None, "it is forgotten"
    assert receiver.requests[0].json["data"]["job"] == {"id": job_id, "name": "a", "owner": "local"}


def test_slack_gets_a_text_without_formatting_commands(database: Database) -> None:
    with receiving() as receiver:
        webhook_id, secret = create(database, receiver, format="slack")
        job_id = job_row(database, "a")
        with database.write() as session:
            lock_job(session, job_id)
            add_event(session, job_id, EventType.CHECKPOINT_FAILED, "<!channel> & more")
        deliver(database, webhook_id)
        data = {"title": "spike", "text": "loss 9", "level": "warning", "step": 7, "rank": 0}
        with database.write() as session:
            lock_job(session, job_id)
            add_event(session, job_id, EventType.ALERT, "spike: loss 9", data=data)
        deliver(database, webhook_id)
    assert receiver.requests[1].json == {"text": f"alert: spike: loss 9 (warning, step 7 of a, {job_id}, local)"}
    text = f"job.checkpoint-failed: a ({job_id}, local): &lt;!channel&gt; &amp; more"
    assert secret == "" and receiver.requests[0].json == {"text": text}
    assert "webhook-signature" not in receiver.requests[0].headers
