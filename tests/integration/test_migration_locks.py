"""A migration behind a long reader, on a real PostgreSQL: it lets all others go on, says who is in its way, and gets there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from ratchet_service import migrate_locks
from ratchet_service.database import Database
from ratchet_service.migrate import downgrade, head, revision_of, upgrade
from tests.support.server import wait_for


@pytest.fixture
def older(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A database of its own, two revisions behind."""
    monkeypatch.setattr(migrate_locks, "LOCK_SECONDS", 1.0)
    monkeypatch.setattr(migrate_locks, "PAUSE", 0.05)
    server = Database(postgres_url)
    auto = server.engine.execution_options(isolation_level="AUTOCOMMIT")
    with auto.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE locked_one")
    made = Database(server.url.set(database="locked_one").render_as_string(hide_password=False))
    upgrade(made, "0010")
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


def test_a_migration_behind_a_reader_names_it_and_ends_once_it_is_gone(
    older: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    reader = older.engine.connect()
    reader.execute(sa.text("SELECT count(*) FROM attempts"))
    pid = reader.scalar(sa.text("SELECT pg_backend_pid()"))

    def gone() -> None:
        """Between two tries: whoever comes now is not kept waiting; then the reader ends."""
        assert revision(older) == "0010"
        with older.engine.begin() as other:
            other.execute(sa.text("SET LOCAL lock_timeout = 5000"))
            other.execute(sa.text("UPDATE attempts SET message = message"))
        reader.rollback()

    monkeypatch.setattr(migrate_locks, "pause", gone)
    upgrade(older)
    reader.close()
    assert revision(older) == head()
    (told,) = [record.getMessage() for record in caplog.records if "the migration waits" in record.getMessage()]
    assert f"pid {pid} (user" in told and "idle in transaction" in told and f"pg_terminate_backend({pid})" in told


def test_a_migration_that_a_deadlock_ends_is_tried_again(older: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate_locks, "LOCK_SECONDS", 30.0)
    monkeypatch.setattr(migrate_locks, "pause", lambda: tries.append(revision(older)))
    upgrade(older, "0011")
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
    assert tries == ["0011"] and revision(older) == head()


def test_a_reader_that_stays_ends_the_migration_in_words_and_nothing_is_changed(
    older: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_locks, "TRIES", 2)
    with older.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM attempts"))
        with pytest.raises(migrate_locks.MigrationBlocked, match="Nothing was changed") as refused:
            upgrade(older)
        assert refused.value.code == "migration-blocked" and revision(older) == "0010"
    upgrade(older)
    with older.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM attempts"))
        with pytest.raises(migrate_locks.MigrationBlocked):
            downgrade(older, "0010")
    assert revision(older) == head()
