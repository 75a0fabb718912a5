"""Agent and service: nothing lost, nothing twice, whatever the network and the service do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_LEASE_LOST
from ratchet_contract.phases import Cause
from tests.support.attempts import Attempt
from tests.support.server import wait_for


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[list[Attempt]]:
    made: list[Attempt] = []
    yield made
    for attempt in made:
        attempt.close()


def make(attempts: list[Attempt], tmp_path: Path, plans: list[dict[str, Any]]) -> Attempt:
    attempts.append(Attempt(tmp_path / "home", plans))
    return attempts[-1]


def texts(attempt: Attempt, rank: int) -> list[str]:
    return [message.message for message in attempt.service.messages[rank]]


def expected(rank: int, count: int) -> list[str]:
    return [f"{rank}:{i}" for i in range(count)]


def test_reports_are_delivered_exactly_once_despite_drops_and_errors(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = make(attempts, tmp_path, [{"messages": 1300, "steps": 100}, {"messages": 20, "steps": 100}])
    attempt.service.faults = ["500", "drop", "garbage", "drop"]
    attempt.service.start()
    attempt.start(report=0.02)
    result = attempt.wait()
    assert result.cause is Cause.COMPLETED
    assert attempt.service.faults == []
    assert attempt.service.repeated > 0  # a lost answer was met, and its messages were sent again
    assert texts(attempt, 0) == expected(0, 1300)
    assert texts(attempt, 1) == expected(1, 20)
    assert attempt.service.results[0] == result


def test_report_sender_finds_service_restarted_on_another_port(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = make(attempts, tmp_path, [{"messages": 10}])
    attempt.service.start()
    agent = attempt.start()
    wait_for(lambda: len(attempt.service.messages[0]) == 10, "the first messages")
    attempt.service.stop()
    seen = attempt.service.requests
    attempt.wait_log("trying again until it answers")
    attempt.service.start()
    wait_for(lambda: attempt.service.requests > seen, "a report on the new port")
    assert agent.poll() is None
    agent.terminate()
    assert attempt.wait().cause is Cause.SIGTERM
    assert 0 in attempt.service.results
    assert texts(attempt, 0) == expected(0, 10)


def test_stale_epoch_kills_the_ranks_at_once(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = make(attempts, tmp_path, [{"obey": False}, {"obey": False}])
    attempt.service.start()
    agent = attempt.start()
    attempt.wait_step(0)
    attempt.service.refuse = (409, "stale-attempt")
    result = attempt.wait(10)
    assert (result.cause, agent.returncode) == (Cause.LEASE_LOST, EXIT_LEASE_LOST)
    assert attempt.rank_pids() == []


def test_not_found_from_a_foreign_service_does_not_end_the_attempt(attempts: list[Attempt], tmp_path: Path) -> None:
    """A foreign service on our service's old port answers 404 and is not believed; our own, insisting, is."""
    attempt = make(attempts, tmp_path, [{}])
    attempt.service.start()
    ours = attempt.home.service_file.read_text()
    attempt.home.service_file.write_text(ours.replace(f'"pid":{_own_pid()}', f'"pid":{_dead_pid()}'))
    attempt.service.refuse = (404, "not-found")
    agent = attempt.start()
    wait_for(lambda: attempt.service.requests >= 5, "five refused reports")
    assert agent.poll() is None and attempt.rank_pids(), attempt.log()
    attempt.home.service_file.write_text(ours)
    assert attempt.wait(15).cause is Cause.LEASE_LOST


def test_training_completes_without_a_service(attempts: list[Attempt], tmp_path: Path) -> None:
    attempt = make(attempts, tmp_path, [{"messages": 3, "steps": 20}])
    attempt.start()
    assert attempt.wait().cause is Cause.COMPLETED
    assert len(attempt.paths.spool(0).read_text().splitlines()) == 3  # for the service to read later


def _own_pid() -> int:
    return os.getpid()


def _dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid
