"""One query for all waiting agents; none waits for a service that stops, or longer than it said."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from ratchet_contract.phases import Desired
from ratchet_service.agent_reports import control_watch
from ratchet_service.agent_reports.control_watch import ControlWatch, Requests
from ratchet_service.db.engine import Database, sqlite_url

KNOWN = Requests(1, Desired.RUN, 0)


class Watch(ControlWatch):
    """Over rows that the test sets, in the place of a database."""

    def __init__(self, folder: Path) -> None:
        self.stopping, self.reads, self.fails = False, 0, False
        self.rows = {f"job-{number}": KNOWN for number in range(1000)}
        super().__init__(Database(sqlite_url(folder / "none.db")), lambda: self.stopping)

    def _read(self) -> dict[str, Requests]:
        self.reads += 1
        if self.fails:
            raise OperationalError("SELECT", {}, Exception("the disk is away"))
        return self.rows


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(control_watch, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(control_watch, "_ERROR_PAUSE_SECONDS", 0.01)
    return Watch(tmp_path)


async def read_again(watch: Watch) -> None:
    before = watch.reads
    while watch.reads < before + 2:
        await asyncio.sleep(0.001)


def test_thousand_agents_wait_with_one_query_and_the_right_one_is_answered(watch: Watch) -> None:
    async def run() -> list[str]:
        agents = {name: asyncio.create_task(watch.wait(name, KNOWN, 60)) for name in watch.rows}
        await read_again(watch)
        assert watch.reads < 100 and not any(agent.done() for agent in agents.values())
        watch.rows = watch.rows | {"job-7": KNOWN._replace(desired=Desired.SUSPEND)}
        assert await asyncio.wait_for(agents["job-7"], 10)
        done = [name for name, agent in agents.items() if agent.done()]
        watch.stopping = True
        answers = await asyncio.wait_for(asyncio.gather(*agents.values()), 10)
        assert answers.count(True) == 1
        return done

    assert asyncio.run(run()) == ["job-7"]


def test_nothing_is_read_while_nobody_waits(watch: Watch) -> None:
    async def run() -> None:
        assert not await watch.wait("job-1", KNOWN, 0.05)
        await asyncio.sleep(0.05)
        before = watch.reads
        await asyncio.sleep(0.1)
        assert watch.reads == before
        assert not await watch.wait("job-1", KNOWN, 0.05) and watch.reads > before

    asyncio.run(run())


def test_agents_go_on_waiting_while_the_database_is_away(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        watch.fails = True
        agent = asyncio.create_task(watch.wait("job-1", KNOWN, 60))
        await read_again(watch)
        watch.fails, watch.rows = False, {}
        assert await asyncio.wait_for(agent, 10)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "requests to running jobs are not read" in caplog.text
