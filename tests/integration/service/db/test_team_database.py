"""PostgreSQL as a team has it: several services on one database that goes away and comes back, and an upgrade under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from ratchet_contract.phases import JobPhase
from ratchet_service.db.engine import Database
from ratchet_service.db.migrate import downgrade, upgrade
from ratchet_service.db.transitions import lock_job
from tests.support import invariants
from tests.support.control_plane import Plane
from tests.support.extra_migration import add_revision
from tests.support.postgres import dedicated_postgres_server
from tests.support.server import wait_for

one_database = pytest.mark.parametrize("migrated_database", ["postgresql"], indirect=True)


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path, database)
    yield made
    made.close()


@pytest.mark.slow
def test_two_services_run_every_job_once_across_a_postgresql_restart(tmp_path: Path) -> None:
    """Both have an API and a reconciler. What was acknowledged is there again, and every job runs once."""
    with dedicated_postgres_server() as server:
        database = Database(server.url)
        upgrade(database)
        plane = Plane(tmp_path, database)
        try:
            first, second = plane.start_process(), plane.start_process()
            jobs = [plane.submit({"steps": 60, "pause": 0.03}) for _ in range(4)]
            for job_id in jobs:
                plane.wait_job(job_id, lambda job: job.phase is not JobPhase.QUEUED, "launched")
            server.shut_down()
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
            assert invariants.check_database(database, 4) == []
        finally:
            plane.close()
            database.dispose()


@pytest.mark.slow
def test_schema_upgrade_during_a_running_attempt_keeps_the_attempt(
    control_plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = control_plane.start_process()
    job_id = control_plane.submit({"steps": 120, "pause": 0.03})
    control_plane.wait_job(job_id, lambda job: job.committed_step >= 10, "saved")
    service.kill()
    service.wait(10)
    before = add_revision(tmp_path, monkeypatch)
    try:
        upgrade(control_plane.database)
        control_plane.serve_api()
        control_plane.start_reconciler()
        job = control_plane.wait(job_id, JobPhase.SUCCEEDED, deadline=60)
    finally:
        control_plane.close()
        downgrade(control_plane.database, before)
    assert (job.attempt, job.step) == (1, 120)
    assert invariants.check_database(control_plane.database, 4) == []


@one_database
def test_idle_transaction_blocks_others_only_until_its_timeout(control_plane: Plane, database: Database) -> None:
    control_plane.start_process()
    job_id = control_plane.submit({"steps": 1})
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
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
def test_process_opens_at_most_20_postgresql_connections(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    url = database.url.update_query_dict({"application_name": "limited"}).render_as_string(hide_password=False)
    limited = Database(url)
    monkeypatch.setattr(limited.engine.pool, "_timeout", 0.0)  # seconds that a 21st connection waits for a free one
    with ExitStack() as held:
        for _ in range(20):
            held.enter_context(limited.engine.connect())
        with pytest.raises(sa.exc.TimeoutError):
            limited.engine.connect()
        count = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'limited'")
        with database.read() as session:
            assert session.scalar(count) == 20
    limited.dispose()


@one_database
@pytest.mark.parametrize("pooler", [None, "found", "stated"])
def test_statements_are_prepared_only_without_a_pooler(
    database: Database, monkeypatch: pytest.MonkeyPatch, pooler: str | None
) -> None:
    """A pooler in transaction mode gives the next transaction another connection; to clients it names a made-up process."""
    if pooler == "found":
        monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", -1)
    more = {"prepare_threshold": "none"} if pooler == "stated" else {}
    own = Database(database.url.update_query_dict(more).render_as_string(hide_password=False))
    prepared, query = (
        sa.text("SELECT count(*) FROM pg_prepared_statements"),
        sa.text("SELECT id FROM jobs WHERE id = :id"),
    )
    for enter in (own.read, own.write):
        for _ in range(20):
            with enter() as session:
                session.execute(query, {"id": "job-000000000001"})
            with own.read() as session:  # its end keeps what is prepared
                count = session.scalar(prepared)
        assert count == (0 if pooler or enter == own.read else 1)
    own.dispose()
    with pytest.raises(ValueError, match="prepare_threshold in the database URL can only be none"):
        Database(database.url.update_query_dict({"prepare_threshold": "5"}).render_as_string(hide_password=False))
