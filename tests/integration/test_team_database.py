"""PostgreSQL as a team has it: several services on one database that goes away and comes back, and an upgrade under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from ratchet_contract.phases import JobPhase
from ratchet_service.database import Database
from ratchet_service.migrate import downgrade, upgrade
from ratchet_service.transitions import lock_job
from tests.support import invariants
from tests.support.plane import Plane
from tests.support.postgres import own_server
from tests.support.server import wait_for

one_database = pytest.mark.parametrize("migrated", ["postgresql"], indirect=True)


@pytest.fixture
def plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


@pytest.mark.slow
def test_two_services_share_a_database_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    """Both have an API and a reconciler. What was acknowledged is there again, and every job runs once."""
    with own_server() as server:
        database = Database(server.url)
        upgrade(database)
        plane = Plane(tmp_path, database)
        try:
            first, second = plane.start_process(), plane.start_process()
            jobs = [plane.submit({"steps": 60, "pause": 0.03}) for _ in range(4)]
            for job_id in jobs:
                plane.wait_job(job_id, lambda job: job.phase is not JobPhase.QUEUED, "launched")
            server.end()
            server.start()
            late = plane.submit({"steps": 10})
            second.kill()  # the API that was told of last; the other one makes itself known
            for job_id in [*jobs, late]:
                plane.wait(job_id, JobPhase.SUCCEEDED, deadline=90)
            assert first.poll() is None
            for job_id in [*jobs, late]:
                (attempt,) = plane.attempts(job_id)
                assert (
                    attempt.steps_lost,
                    "another agent" in plane.attempt_paths(job_id, 1).agent_log.read_text(),
                ) == (0, False)
            assert invariants.of_database(database, 4) == []
        finally:
            plane.close()
            database.dispose()


@pytest.mark.slow
def test_an_old_database_is_upgraded_under_a_running_attempt(plane: Plane) -> None:
    service = plane.start_process()
    job_id = plane.submit({"steps": 120, "pause": 0.03})
    plane.wait_job(job_id, lambda job: job.committed_step >= 10, "saved")
    service.kill()
    service.wait(10)
    try:
        downgrade(plane.database, "0005")
        columns = {column["name"] for column in sa.inspect(plane.database.engine).get_columns("jobs")}
        assert "owner" not in columns
    except BaseException:
        upgrade(plane.database)
        raise
    vars(plane).pop("token", None)  # the tokens were in tables that the old version did not have
    plane.start_process()
    job = plane.wait(job_id, JobPhase.SUCCEEDED, deadline=60)
    assert (job.epoch, job.owner, job.step) == (1, "local", 120)
    assert invariants.of_database(plane.database, 4) == []


@one_database
def test_who_stands_still_within_a_transaction_holds_others_up_for_a_bounded_time(
    plane: Plane, database: Database
) -> None:
    plane.start_process()
    job_id = plane.submit({"steps": 1})
    plane.wait(job_id, JobPhase.SUCCEEDED)
    with database.read() as session:
        shown = {name: session.scalar(sa.text(f"SHOW {name}")) for name in (
            "statement_timeout", "idle_in_transaction_session_timeout", "application_name",
        )}  # fmt: skip
    assert (shown["statement_timeout"], shown["idle_in_transaction_session_timeout"]) == ("2min", "2min")
    assert str(shown["application_name"]).startswith("ratchet/")
    option = "-c idle_in_transaction_session_timeout=300ms"
    url = database.url.update_query_dict({"options": option}).render_as_string(hide_password=False)
    stopped, through = Database(url), threading.Event()

    def other() -> None:
        with database.write() as session:
            lock_job(session, job_id)
        through.set()

    with pytest.raises(sa.exc.DBAPIError), stopped.write() as session:
        lock_job(session, job_id)
        thread = threading.Thread(target=other)
        thread.start()
        wait_for(through.is_set, "the row to be given free", 30)
        session.execute(sa.select(1))
    thread.join(10)
    stopped.dispose()


@one_database
def test_nothing_is_prepared_on_the_server(database: Database) -> None:
    """A pooler in transaction mode gives the next transaction another connection."""
    with database.read() as session:
        for _ in range(20):
            session.scalar(sa.text("SELECT count(*) FROM jobs WHERE id = :id"), {"id": "job-000000000001"})
        assert session.scalar(sa.text("SELECT count(*) FROM pg_prepared_statements")) == 0
