"""Fixtures: every database test runs on SQLite and on PostgreSQL. Schema made once by the migrations, emptied between tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from ratchet_service.db.models import Base, Job
from tests.support.postgres import postgres_server

ENGINES = ("sqlite", "postgresql")
EMPTIED = [table for table in reversed(Base.metadata.sorted_tables) if table.name != "audit"]
"""The tables that are emptied between tests: rows of the audit log are only ever added."""


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A server of this test run's own."""
    with postgres_server() as url:
        yield url


@pytest.fixture(scope="session", params=ENGINES)
def migrated_database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A database with the newest schema."""
    if request.param == "sqlite":
        url = sqlite_url(tmp_path_factory.mktemp("sqlite") / "ratchet.db")
    else:
        url = request.getfixturevalue("postgres_url")
    database = Database(url)
    upgrade(database)
    yield database
    database.dispose()


@pytest.fixture
def database(migrated_database: Database) -> Database:
    """The same, with no rows in it but those of the audit log."""
    with migrated_database.write() as session:
        session.execute(sa.delete(Job))  # first: events go with their job or not at all
        for table in EMPTIED:
            session.execute(sa.delete(table))
    return migrated_database
