"""Work beside the reconciler's rounds where no thread can be started (``pids_limit``, ``ulimit -u``), and where renewals fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.leases import Lease
from ratchet_service.observability.health import MAX_CONCURRENT_FINISHES
from ratchet_service.reconciler.background_work import Background
from tests.support.server import wait_for


class Threads:
    """Those of the kinds in ``refused`` cannot be started."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.started: list[str] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        kind = name.split()[0]
        if kind in self.refused:
            raise RuntimeError("can't start new thread")
        self.started.append(kind)
        threading.Thread(target=work, name=name, daemon=True).start()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(sqlite_url(tmp_path / "ratchet.db"))
    yield made
    made.dispose()


def lease(number: int) -> Lease:
    return Lease(f"job-{number}", 1, "token")


def test_attempt_ends_run_once_threads_can_be_started_again(database: Database) -> None:
    threads, ends = Threads("end"), threading.Event()
    background = Background(database, 15.0, lambda: None, threads.start)
    for number in range(MAX_CONCURRENT_FINISHES + 1):
        with pytest.raises(RuntimeError, match="can't start"):
            background.start_finishing(lease(number), lambda: True)
    assert not background.finishing_jobs
    background.wait(60)  # at once: nothing is under way

    threads.refused.clear()
    made = [
        background.start_finishing(lease(number), lambda: ends.wait(60))
        for number in range(MAX_CONCURRENT_FINISHES + 1)
    ]
    assert made[MAX_CONCURRENT_FINISHES] is None, "the others' ends come first"
    ends.set()
    assert [end.result(60) for end in made[:MAX_CONCURRENT_FINISHES] if end is not None] == [
        True
    ] * MAX_CONCURRENT_FINISHES
    last = background.start_finishing(lease(MAX_CONCURRENT_FINISHES), lambda: True)
    assert last is not None and last.result(60)


def test_housekeeping_is_done_once_threads_can_be_started_again(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    threads, done = Threads("expiry"), threading.Event()
    background = Background(database, 15.0, lambda: None, threads.start)
    background.run_housekeeping(
        "expiry", done.set
    )  # nobody who asks for it fails: an attempt that has just ended has ended
    assert "can't start new thread" in caplog.text
    background.wait(60)
    threads.refused.clear()
    background.run_housekeeping("expiry", done.set)
    assert done.wait(60)


def test_lease_renewal_starts_once_a_thread_can_be_started(database: Database) -> None:
    threads, ends = Threads("leases"), threading.Event()
    background = Background(database, 15.0, lambda: None, threads.start)
    end = background.start_finishing(lease(0), lambda: ends.wait(60))
    assert end is not None and "leases" not in threads.started
    threads.refused.clear()
    for _ in range(3):  # as the rounds do
        background.ensure_lease_renewal()
    assert threads.started.count("leases") == 1
    ends.set()
    assert end.result(60)


def test_lease_renewal_is_retried_after_any_exception(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, tries = threading.Event(), list[int]()

    @contextmanager
    def write() -> Iterator[Any]:
        tries.append(1)
        raise RuntimeError("of the driver's own")
        yield

    monkeypatch.setattr(database, "write", write)
    background = Background(database, 0.05, lambda: None)
    end = background.start_finishing(lease(0), lambda: ends.wait(60))
    wait_for(lambda: len(tries) >= 3, "more tries", 30)
    ends.set()
    assert end is not None and end.result(60)
