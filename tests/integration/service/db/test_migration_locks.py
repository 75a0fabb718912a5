"""A migration behind a long reader, on a real PostgreSQL: it lets all others go on, says who is in its way, and gets there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from ratchet_service.db import migrate
from ratchet_service.db.engine import Database
from ratchet_service.db.migrate import downgrade, revision_of, upgrade
from tests.support.extra_migration import REVISION, add_revision
from tests.support.server import wait_for


@pytest.fixture
def older(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A database of its own, one revision behind."""
    monkeypatch.setattr(migrate, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(migrate, "PAUSE_SECONDS", 0.05)
    server = Database(postgres_url)
    auto = server.engine.execution_options(isolation_level="AUTOCOMMIT")
    with auto.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE locked_one")
    made = Database(server.url.set(database="locked_one").render_as_string(hide_password=False))
    upgrade(made, add_revision(tmp_path, monkeypatch))
    yield made
    made.dispose()
    with auto.connect() as connection:
        connection.exec_driver_sql("DROP DATABASE locked_one WITH (FORCE)")
    server.dispose()


def revision(database: Database) -> str | None:
    with database.engine.connect() as connection:
        return revision_of(connection)


def blocked_by(database: Database, pid: int) -> int:
    waits = sa.text("SELECT count(*) FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")
    with database.engine.connect() as connection:
        return connection.scalar(waits, {"pid": pid}) or 0


def test_migration_blocked_by_a_reader_logs_its_pid_and_retries(
    older: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    before = revision(older)
    reader = older.engine.connect()
    reader.execute(sa.text("SELECT count(*) FROM attempts"))
    pid = reader.scalar(sa.text("SELECT pg_backend_pid()"))

    def gone() -> None:
        """Between two tries: whoever comes now is not kept waiting; then the reader ends."""
        assert revision(older) == before
        with older.engine.begin() as other:
            other.execute(sa.text("SET LOCAL lock_timeout = 5000"))
            other.execute(sa.text("UPDATE attempts SET message = message"))
        reader.rollback()

    monkeypatch.setattr(migrate, "pause", gone)
    upgrade(older)
    reader.close()
    assert revision(older) == REVISION
    (told,) = [record.getMessage() for record in caplog.records if "the migration waits" in record.getMessage()]
    assert f"pid {pid} (user" in told and "idle in transaction" in told and f"pg_terminate_backend({pid})" in told


def test_migration_aborted_by_a_deadlock_is_retried(older: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "LOCK_SECONDS", 30.0)
    monkeypatch.setattr(migrate, "pause", lambda: tries.append(revision(older)))
    before = revision(older)
    tries: list[str | None] = []
    with older.engine.connect() as reader:
        reader.execute(sa.text("SET LOCAL deadlock_timeout = '60s'"))  # so that it is the migration that is ended
        reader.execute(sa.text("SELECT count(*) FROM jobs"))
        migration = threading.Thread(target=upgrade, args=(older,), daemon=True)
        migration.start()
        pid = reader.scalar(sa.text("SELECT pg_backend_pid()"))
        wait_for(lambda: blocked_by(older, pid), "the migration to wait for the reader", 30)
        reader.execute(sa.text("SELECT count(*) FROM attempts"))  # which the migration has changed
        reader.rollback()
        migration.join(60)
    assert tries == [before] and revision(older) == REVISION


def test_migration_blocked_for_long_fails_and_changes_nothing(older: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "MAX_TRIES", 2)
    before = revision(older)
    assert before is not None
    with older.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM attempts"))
        with pytest.raises(migrate.MigrationBlocked, match="Nothing was changed") as refused:
            upgrade(older)
        assert refused.value.code == "migration-blocked" and revision(older) == before
    upgrade(older)
    with older.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM attempts"))
        with pytest.raises(migrate.MigrationBlocked):
            downgrade(older, before)
    assert revision(older) == REVISION
