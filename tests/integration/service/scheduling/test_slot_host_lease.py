"""Slots are one host's: a second host's launcher on the same database is refused, by name, as long as the first one lives."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service.commands.serve import StartError, acquire_slots
from ratchet_service.db.engine import Database
from ratchet_service.db.models import SlotHost
from ratchet_service.scheduling import slot_host_lease
from tests.support.control_plane import single_launcher, trainer_launcher
from tests.support.queue_harness import Queue

on_postgresql = pytest.mark.parametrize("migrated_database", ["postgresql"], indirect=True)
"""An SQLite file belongs to one host."""


def lend(database: Database, seconds: float) -> str | None:
    with database.write() as session:
        return slot_host_lease.acquire(session, seconds)


def test_second_host_starts_no_job_while_the_first_holds_the_slot_lease(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (lambda: "here"), (lambda: "there")
    monkeypatch.setattr(slot_host_lease, "own_host", there)
    assert lend(database, 600.0) is None and lend(database, 600.0) is None
    monkeypatch.setattr(slot_host_lease, "own_host", here)
    queue = Queue(tmp_path, database)
    job = queue.submit()
    if database.is_sqlite:  # a file of one host
        assert lend(database, 600.0) is None and queue.run_round() == [job]
        return
    assert lend(database, 600.0) == "there"
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", None)
        assert queue.run_round() == [], (
            "nothing is started that would share its slots, and nothing is tried again and again"
        )
    with database.write() as session:
        slot_host_lease.shorten(session, -1.0)
    assert lend(database, 600.0) == "there", "only its own"
    monkeypatch.setattr(slot_host_lease, "own_host", there)
    with database.write() as session:
        slot_host_lease.shorten(session, 900.0)  # ends no later than it would have
        slot_host_lease.shorten(session, -1.0)
    monkeypatch.setattr(slot_host_lease, "own_host", here)
    assert queue.run_round() == [job]


@on_postgresql
def test_slot_lease_expiring_too_far_in_the_future_is_taken_over(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_host_lease, "own_host", lambda: "there")
    assert lend(database, 15.0) is None
    monkeypatch.setattr(slot_host_lease, "own_host", lambda: "here")
    assert lend(database, 15.0) == "there"
    with database.write() as session:
        session.scalars(sa.select(SlotHost)).one().expires_at += timedelta(hours=1)
    assert lend(database, 15.0) is None


@on_postgresql
def test_take_slots_fails_for_a_living_host_and_waits_for_a_dead_one(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = single_launcher(trainer_launcher(Queue(tmp_path, database).paths))
    ended = threading.Event()

    def host() -> str:  # the other one renews between two looks
        return "here" if threading.current_thread() is threading.main_thread() else "there"

    monkeypatch.setattr(slot_host_lease, "own_host", host)
    monkeypatch.setattr(slot_host_lease, "_PAUSE", 0.02)

    def renew() -> None:
        while not ended.wait(0.01):
            lend(database, 600.0)

    first = threading.Thread(target=lend, args=(database, 600.0))
    first.start()
    first.join(30)
    other = threading.Thread(target=renew)
    other.start()
    try:
        with pytest.raises(StartError, match="a reconciler on there manages the slots of this database"):
            acquire_slots(database, kinds)
    finally:
        ended.set()
        other.join(30)
    dying = threading.Thread(target=lend, args=(database, 0.2))
    dying.start()
    dying.join(30)
    acquire_slots(database, kinds)
    assert lend(database, 600.0) is None


@on_postgresql
def test_take_slots_waits_for_the_end_of_a_lease_that_its_host_shortens(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = single_launcher(trainer_launcher(Queue(tmp_path, database).paths))
    acquire, looked = slot_host_lease.acquire, threading.Event()

    def host() -> str:
        return "here" if threading.current_thread() is threading.main_thread() else "there"

    def observed(session: Session, seconds: float) -> str | None:  # its transaction keeps the row locked
        other = acquire(session, seconds)
        looked.set()
        return other

    def exit_cleanly() -> None:
        assert looked.wait(30)
        with database.write() as session:
            slot_host_lease.shorten(session, 0.5)

    monkeypatch.setattr(slot_host_lease, "own_host", host)
    monkeypatch.setattr(slot_host_lease, "_PAUSE", 0.02)
    first = threading.Thread(target=lend, args=(database, 600.0))
    first.start()
    first.join(30)
    monkeypatch.setattr(slot_host_lease, "acquire", observed)
    leaving = threading.Thread(target=exit_cleanly)
    leaving.start()
    acquire_slots(database, kinds)
    leaving.join(30)
    assert lend(database, 600.0) is None
