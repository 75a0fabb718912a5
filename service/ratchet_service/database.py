"""Sessions on SQLite or PostgreSQL: short transactions, committed before anything is answered.

SQLite runs in WAL mode with foreign keys; every write transaction starts with BEGIN IMMEDIATE, so that two writers wait for
each other at the start and never fail half way (a read that turns into a write could not wait). Reads start deferred.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.orm import Session

from ratchet_service import clock as clocks
from ratchet_service.clock import Clock
from ratchet_service.file_owner import refuse_within

BUSY_TIMEOUT_MS: Final = 20_000
PING_SECONDS: Final = 2
"""For PostgreSQL's answer to ``Database.ping``, and for the connection that it is asked on. libpq takes no less."""
_POSTGRES_FORM: Final = (
    "it is postgresql://USER:PASSWORD@HOST:PORT/DATABASE, where %40 stands for an @ of the password, %3A for : and %2F for /; "
    "or leave :PASSWORD out, and set PGPASSWORD or PGPASSFILE, where nothing is replaced"
)
_READ_ONLY: Final = "ratchet_read_only"
_SQLITE_OPTIONS: Final[dict[str, Any]] = {
    "pool_size": 10,
    "max_overflow": 40,
    "connect_args": {"timeout": BUSY_TIMEOUT_MS / 1000},
}
_POSTGRES_SESSION: Final = {
    "statement_timeout": "120s",
    # A process that is stopped, or whose machine is gone, within a transaction holds rows that all others wait for.
    "idle_in_transaction_session_timeout": "120s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
"""What the server is told of each of our connections, unless the URL says ``options`` itself."""


def utc_now() -> datetime:
    return datetime.now(UTC)


def sqlite_url(path: Path) -> str:
    return URL.create("sqlite", database=str(path.resolve())).render_as_string(hide_password=False)


def normalise_url(url: str) -> URL:
    """``postgres://`` and ``postgresql://`` mean psycopg 3. Raises ``ValueError`` for other databases, and for what is no URL: of
    that the message has nothing, since any part of it may be a part of the password."""
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError(f"the database URL cannot be understood: {_POSTGRES_FORM}") from None
    if parsed.drivername.startswith("postgres") and url.count("@") > 1:
        raise ValueError(f"the database URL has more than one @: {_POSTGRES_FORM}")
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if not parsed.database or parsed.database == ":memory:":
            raise ValueError(
                "an in-memory SQLite database would lose every job: give a file, sqlite:////path/ratchet.db"
            )
        return parsed
    raise ValueError(f"database {parsed.drivername!r} is not supported: use sqlite:///FILE or postgresql://...")


def printable(url: URL) -> str:
    """The URL for people: without its password, and without its query, which may hold another."""
    return url.set(query={}).render_as_string(hide_password=True)


def passwords(url: str | None, environ: Mapping[str, str]) -> list[str]:
    """What no log may have: the password of the URL, and the one that ``environ`` has for libpq."""
    found = [environ.get("PGPASSWORD")]
    with suppress(sa.exc.ArgumentError, ValueError):
        parsed = make_url(url or "")
        found += [text for text in (parsed.password, parsed.query.get("password")) if isinstance(text, str)]
    return [text for text in found if text]


def first_line(error: Exception) -> str:
    """Of what the error says: SQLAlchemy's go on with the statement and its values. Its class where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _postgres_options(url: URL) -> dict[str, Any]:
    """At most 20 connections per process, so that a few of them share a server's usual 100; who waits longer than 30 seconds for
    one gets an error. Statements are not prepared on the server: behind pgbouncer in transaction mode the next one may meet
    another connection."""
    connect: dict[str, Any] = {"connect_timeout": 10, "prepare_threshold": None}
    if "application_name" not in url.query:
        connect["application_name"] = f"ratchet/{os.getpid()}"
    if "options" not in url.query:
        connect["options"] = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SESSION.items())
    return {
        "pool_size": 5, "max_overflow": 15, "pool_timeout": 30, "pool_pre_ping": True, "pool_recycle": 1800,
        "connect_args": connect,
    }  # fmt: skip


def _pinger(url: URL) -> Engine:
    milliseconds = 1000 * PING_SECONDS
    connect = {"connect_timeout": PING_SECONDS, "tcp_user_timeout": milliseconds, "prepare_threshold": None}
    return sa.create_engine(url, poolclass=sa.NullPool, connect_args=connect)


class Database:
    """One engine; ``write()`` and ``read()`` give sessions that end with the ``with`` block."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.url = normalise_url(url)
        postgres = self.url.drivername.startswith("postgresql")
        options = _postgres_options(self.url) if postgres else _SQLITE_OPTIONS
        self.engine: Engine = sa.create_engine(
            self.url,
            json_serializer=_strict_json,
            hide_parameters=True,  # an error's text gets into logs, and rows have values that nobody is shown
            **options,
        )
        if self.is_sqlite:
            event.listen(self.engine, "connect", _sqlite_connect)
            event.listen(self.engine, "begin", _sqlite_begin)
        self.sessions = type("DatabaseSession", (Session,), {})
        """Of write transactions: a class of its own, so that what this database commits can be listened to."""
        self._writing = threading.Lock()
        self._info = clocks.info(self.clock)
        self._reader = self.engine.execution_options(**{_READ_ONLY: True})
        self._pinger = _pinger(self.url) if postgres else self._reader

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session in a write transaction: committed when the block ends, rolled back when it raises."""
        refuse_within()
        make = self.sessions(self.engine, expire_on_commit=False, info=self._info)
        with self._turn(), make as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Who waits for SQLite's lock looks again and again, after longer and longer pauses, and may be passed over by all who
        come later: writers of one process take turns instead. One that waits too long meets SQLite's own refusal."""
        taken = self.is_sqlite and self._writing.acquire(timeout=BUSY_TIMEOUT_MS / 1000)
        try:
            yield
        finally:
            if taken:
                self._writing.release()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading: it sees one moment on SQLite, committed rows on PostgreSQL; nothing it does is kept."""
        refuse_within()
        with Session(self._reader, expire_on_commit=False, autoflush=False, info=self._info) as session:
            yield session

    def ping(self) -> None:
        """Raises SQLAlchemy's errors when the database does not answer. PostgreSQL gets ``PING_SECONDS`` for each step, on a
        connection of its own: those of the pool would wait for a server that is gone until its network says so."""
        with self._pinger.connect() as connection:
            connection.execute(sa.select(1))

    def dispose(self) -> None:
        self.engine.dispose()


def _strict_json(value: Any) -> str:
    """NaN is no JSON: PostgreSQL would refuse the row, SQLite would keep something nobody can read."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # this module says BEGIN, not the driver
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged job survives a power cut
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
