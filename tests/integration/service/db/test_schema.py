"""Migrations and the models say the same, up and down, on both databases; the settings that durability rests on hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from ratchet_service.__main__ import main
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, normalise_url, sqlite_url, utc_now
from ratchet_service.db.migrate import downgrade, upgrade
from ratchet_service.db.models import Base, Job, JobLabel
from tests.support.extra_migration import REVISION, add_revision


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of its own without any table."""
    if request.param == "sqlite":
        fresh = Database(sqlite_url(tmp_path / "deep" / "ratchet.db"))
        yield fresh
        fresh.dispose()
        return
    server = Database(request.getfixturevalue("postgres_url"))
    auto = server.engine.execution_options(isolation_level="AUTOCOMMIT")
    with auto.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE empty_one")
    fresh = Database(server.url.set(database="empty_one").render_as_string(hide_password=False))
    yield fresh
    fresh.dispose()
    with auto.connect() as connection:
        connection.exec_driver_sql("DROP DATABASE empty_one WITH (FORCE)")
    server.dispose()


def tables(database: Database) -> set[str]:
    return set(sa.inspect(database.engine).get_table_names()) - {"alembic_version"}


def job(**values: object) -> Job:
    facts = {"id": "job-000000000001", "name": "a", "spec": {}, "resolved": {}, "spec_digest": ""}
    return Job(**(facts | {"created_at": utc_now(), "updated_at": utc_now()} | values))


def test_migrations_create_the_models_schema_and_can_be_downgraded(empty: Database) -> None:
    upgrade(empty)
    assert tables(empty) == set(Base.metadata.tables)
    with empty.engine.connect() as connection:

        def is_of_dialect(_item: object, name: str | None, *_: object) -> bool:
            """Indexes for LIKE with a prefix exist on PostgreSQL alone; Alembic does not read ``ddl_if``."""
            return not (empty.is_sqlite and str(name).endswith("_prefix"))

        options = {"compare_type": True, "include_object": is_of_dialect}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
    upgrade(empty)  # nothing left to do
    downgrade(empty, "base")
    assert tables(empty) == set()
    upgrade(empty)
    assert tables(empty) == set(Base.metadata.tables)


def test_migrations_up_and_down_keep_existing_jobs(
    empty: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(empty)
    with empty.write() as session:
        session.add(job(name="old"))
    before = add_revision(tmp_path / "later", monkeypatch)
    for there, go in ((True, lambda: upgrade(empty)), (False, lambda: downgrade(empty, before))):
        go()
        columns = {column["name"] for column in sa.inspect(empty.engine).get_columns("jobs")}
        assert ("added_later" in columns) is there
        with empty.read() as session:
            assert session.scalars(sa.select(Job)).one().name == "old"


def test_upgrade_of_a_prerelease_database_is_refused_with_advice(empty: Database) -> None:
    upgrade(empty)
    with empty.write() as session:
        session.execute(sa.text("UPDATE alembic_version SET version_num = '0009'"))
    with pytest.raises(migrate.UnsupportedSchema, match=r"revision 0009.*empty run directory and database") as refused:
        upgrade(empty)
    assert refused.value.code == "schema-unsupported"
    with pytest.raises(migrate.UnsupportedSchema):
        migrate.check_revision(empty)


def test_services_that_start_together_migrate_once(empty: Database) -> None:
    errors: list[BaseException] = []

    def start() -> None:
        own = Database(empty.url.render_as_string(hide_password=False))
        try:
            upgrade(own)
        except BaseException as error:
            errors.append(error)
        finally:
            own.dispose()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert tables(empty) == set(Base.metadata.tables)


def test_datetime_columns_return_aware_utc_values_with_microseconds(database: Database) -> None:
    at = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    with database.write() as session:
        session.add(job(created_at=at))
    with database.read() as session:
        stored = session.scalars(sa.select(Job)).one()
    assert stored.created_at == at
    assert stored.created_at.tzinfo is UTC
    with pytest.raises(Exception, match="time zone"), database.write() as session:
        session.add(job(id="job-000000000002", created_at=datetime(2030, 1, 1)))


def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(sa.exc.IntegrityError), database.write() as session:
        session.add(JobLabel(job_id="job-nowhere", key="a", value="b", created_at=utc_now()))


def test_exception_in_a_write_transaction_rolls_back(database: Database) -> None:
    with pytest.raises(RuntimeError), database.write() as session:
        session.add(job())
        session.flush()
        raise RuntimeError
    with database.read() as session:
        assert session.scalars(sa.select(Job)).all() == []


def test_concurrent_read_then_write_transactions_all_succeed(database: Database) -> None:
    with database.write() as session:
        session.add(job())
    errors: list[BaseException] = []

    def add_one() -> None:
        try:
            for _ in range(5):
                with database.write() as session:
                    row = session.scalars(sa.select(Job).with_for_update()).one()
                    row.attempt += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add_one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    with database.read() as session:
        assert session.scalars(sa.select(Job)).one().attempt == 30


def test_nan_in_a_json_column_is_refused(database: Database) -> None:
    with pytest.raises((sa.exc.StatementError, ValueError), match="JSON compliant"), database.write() as session:
        session.add(job(spec={"x": float("nan")}))


def test_sqlite_uses_wal_foreign_keys_and_full_synchronous(tmp_path: Path) -> None:
    one = Database(sqlite_url(tmp_path / "x.db"))
    with one.read() as session:
        facts = {
            name: session.execute(sa.text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "foreign_keys", "synchronous")
        }
    one.dispose()
    assert facts == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2}


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://x/y"])
def test_in_memory_and_unsupported_database_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"in-memory|not supported"):
        normalise_url(url)


def test_token_command_does_not_migrate_the_database(
    empty: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command of a new version beside a service of an old one must not change the tables below it."""
    url = empty.url.render_as_string(hide_password=False)
    command = ["token", "list", "--home", str(tmp_path / "home"), "--database-url", url]

    def revision() -> str | None:
        if empty.is_sqlite and not Path(empty.url.database or "").exists():
            return None
        with empty.engine.connect() as connection:
            return migrate.revision_of(connection)

    assert main(command) == 2 and revision() is None
    assert "start the service first" in capsys.readouterr().err
    migrate.upgrade(empty)
    assert main(command) == 0
    with monkeypatch.context() as later:
        before = add_revision(tmp_path / "later", later)
        assert main(command) == 2 and revision() == before
        said = capsys.readouterr().err
        assert before in said and REVISION in said and "which migrates it" in said
    with empty.write() as session:
        session.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    assert main(command) == 2 and "newer version" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_session_that_reads_stores_nothing(empty: Database) -> None:
    upgrade(empty)
    with empty.write() as session:
        session.add(job())
    with empty.read() as session:
        session.get_one(Job, "job-000000000001").name = "changed"
    with pytest.raises(sa.exc.DBAPIError, match=r"readonly database|read-only transaction"), empty.read() as session:
        session.execute(sa.update(Job).values(name="changed"))
    with empty.write() as session:  # the same connection
        found = session.get_one(Job, "job-000000000001")
        assert found.name == "a"
        found.name = "b"
    with empty.read() as session:
        assert session.scalar(sa.select(Job.name)) == "b"
