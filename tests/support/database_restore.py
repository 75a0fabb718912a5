"""All rows of a database, put aside and put back: what a backup and its restore are to those who only see rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from tests.support.databases import EMPTIED

Rows = dict[str, list[dict[str, Any]]]


def dump_rows(database: Database) -> Rows:
    with database.read() as session:
        return {
            table.name: [dict(row) for row in session.execute(sa.select(table)).mappings()]
            for table in reversed(EMPTIED)
        }


def restore_rows(database: Database, rows: Rows) -> None:
    """Nothing may be writing."""
    with database.write() as session:
        session.execute(sa.delete(Job))  # first: events go with their job or not at all
        for table in EMPTIED:
            session.execute(sa.delete(table))
        for table in reversed(EMPTIED):
            if rows[table.name]:
                session.execute(sa.insert(table), rows[table.name])
        if not database.is_sqlite:
            largest = sa.text("SELECT setval(pg_get_serial_sequence('events', 'id'), coalesce(max(id), 1)) FROM events")
            session.execute(largest)
