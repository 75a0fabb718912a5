"""Counts the SQL statements of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from ratchet_service.db.engine import Database


@contextmanager
def recorded_queries(database: Database) -> Iterator[list[str]]:
    """The SQL queries of the block, those of other threads included."""
    seen: list[str] = []

    def see(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("SELECT", "WITH")):
            seen.append(statement)

    sa.event.listen(database.engine, "before_cursor_execute", see)
    try:
        yield seen
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", see)
