"""Databases of benchmarks' own: empty, of the newest revision, durable, and gone behind the block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from tests.support.postgres import postgres_server


@contextmanager
def opened(engine: str, folder: Path) -> Iterator[Database]:
    """``engine``: ``sqlite``, in ``folder``, or ``postgresql``, with a server of its own."""
    if engine == "sqlite":
        database = Database(sqlite_url(folder / "ratchet.db"))
        upgrade(database)
        yield database
        database.dispose()
        return
    with postgres_server(durable=True) as url:
        database = Database(url)
        upgrade(database)
        yield database
        database.dispose()
