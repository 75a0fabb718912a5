"""Sessions on SQLite or PostgreSQL. On SQLite, a write transaction starts with BEGIN IMMEDIATE: a second writer waits at its
start and does not fail half way, as a read that turns into a write would."""

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

from ratchet_service.db import clock as clocks
from ratchet_service.db import principal as principals
from ratchet_service.db.clock import Clock
from ratchet_service.db.principal import Principal
from ratchet_service.isolation.file_access import raise_if_impersonating

BUSY_TIMEOUT_MS: Final = 20_000
PING_SECONDS: Final = 2
"""Time limit in seconds for the connection of ``Database.ping`` to PostgreSQL, and for sent data that stay unacknowledged.
libpq's minimum."""
_POSTGRES_FORM: Final = (
    "it is postgresql://USER:PASSWORD@HOST:PORT/DATABASE, where %40 stands for an @ of the password, %3A for : and %2F for /; "
    "or omit :PASSWORD, and set PGPASSWORD or PGPASSFILE, where nothing is escaped"
)
_READ_ONLY: Final = "ratchet_read_only"
_IS_DIRECT: Final = "ratchet_is_direct"
_PREPARES: Final = "ratchet_prepares"
_NO_PREPARE: Final = "prepare_threshold"
"""With the value ``none`` in a URL's query: no statement is prepared on the server."""
_PREPARE_AFTER: Final = 5
"""Executions of a statement on one connection after which it is prepared on the PostgreSQL server."""
_SQLITE_OPTIONS: Final[dict[str, Any]] = {
    "pool_size": 10,
    "max_overflow": 40,
    "connect_args": {"timeout": BUSY_TIMEOUT_MS / 1000},
}
_POSTGRES_SESSION: Final = {
    "statement_timeout": "120s",
    # A process that is stopped, or whose machine is gone, during a transaction holds locks that all others wait for.
    "idle_in_transaction_session_timeout": "120s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
"""Server settings of each connection but that of ``Database.ping``, unless the URL contains ``options``."""


def utc_now() -> datetime:
    """Return the UTC time of this machine."""
    return datetime.now(UTC)


def sqlite_url(path: Path) -> str:
    """Return the database URL of this SQLite file."""
    return URL.create("sqlite", database=str(path.resolve())).render_as_string(hide_password=False)


def normalise_url(url: str) -> URL:
    """Return the parsed database URL. Raises ``ValueError``, whose message shows no password, for an unsupported or invalid
    one."""
    try:
        parsed = make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ValueError(f"the database URL cannot be understood: {_POSTGRES_FORM}") from None
    if parsed.drivername.startswith("postgres") and url.count("@") > 1:
        raise ValueError(f"the database URL has more than one @: {_POSTGRES_FORM}")
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        if parsed.query.get(_NO_PREPARE, "none") != "none":
            raise ValueError(f"{_NO_PREPARE} in the database URL can only be none")
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if not parsed.database or parsed.database == ":memory:":
            raise ValueError(
                "an in-memory SQLite database would lose every job: name a file, sqlite:////path/ratchet.db"
            )
        return parsed
    raise ValueError(f"database {parsed.drivername!r} is not supported: use sqlite:///FILE or postgresql://...")


def redacted_url(url: URL) -> str:
    """Return the URL for display: without its password, and without its query, which may hold another password."""
    return url.set(query={}).render_as_string(hide_password=True)


def passwords(url: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the passwords that must not be logged: those in ``url``, and libpq's PGPASSWORD in ``environ``."""
    found = [environ.get("PGPASSWORD")]
    with suppress(sa.exc.ArgumentError, ValueError):
        parsed = make_url(url or "")
        found += [text for text in (parsed.password, parsed.query.get("password")) if isinstance(text, str)]
    return [text for text in found if text]


def first_line(error: Exception) -> str:
    """Return the first line of the error's message. Further lines of SQLAlchemy's messages have statement and values."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _postgres_options(url: URL) -> dict[str, Any]:
    """Return the engine options for PostgreSQL."""
    connect: dict[str, Any] = {"connect_timeout": 10, "prepare_threshold": None}
    if "application_name" not in url.query:
        connect["application_name"] = f"ratchet/{os.getpid()}"
    if "options" not in url.query:
        connect["options"] = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SESSION.items())
    return {
        # at most 20, so that a few processes can share a server's usual 100; all stay open, since opening one takes as much
        # processor time as several reports
        "pool_size": 20, "max_overflow": 0, "pool_use_lifo": True, "pool_timeout": 30, "pool_pre_ping": True,
        "pool_recycle": 1800,
        "connect_args": connect,
    }  # fmt: skip


def _create_ping_engine(url: URL) -> Engine:
    """Return an engine without a pool and with short time limits, for ``Database.ping``."""
    milliseconds = 1000 * PING_SECONDS
    connect = {"connect_timeout": PING_SECONDS, "tcp_user_timeout": milliseconds, "prepare_threshold": None}
    return sa.create_engine(url, poolclass=sa.NullPool, connect_args=connect)


class Database:
    """The connections to one database. ``write()`` and ``read()`` yield sessions that end with the ``with`` block."""

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.url = normalise_url(url)
        postgres = self.url.drivername.startswith("postgresql")
        options = _postgres_options(self.url) if postgres else _SQLITE_OPTIONS
        prepares = postgres and _NO_PREPARE not in self.url.query
        self.engine: Engine = sa.create_engine(
            self.url,
            json_serializer=_strict_json,
            hide_parameters=True,  # error messages are logged, and rows hold secret values
            execution_options={_PREPARES: prepares},
            **options,
        )
        event.listen(self.engine, "connect", _postgres_connect if postgres else _sqlite_connect)
        event.listen(self.engine, "begin", _postgres_begin if postgres else _sqlite_begin)
        self.session_class = type("DatabaseSession", (Session,), {})
        """Session class of write transactions, separate for each database so that listeners receive only its commits."""
        self._write_lock = threading.Lock()
        self._session_info: dict[str, Any] = {**clocks.session_info(self.clock)}
        self._read_engine = self.engine.execution_options(**{_READ_ONLY: True})
        self._ping_engine = _create_ping_engine(self.url) if postgres else self._read_engine

    @property
    def is_sqlite(self) -> bool:
        """True if this is SQLite; False: PostgreSQL."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def write(self, caller: Principal | None = None) -> Iterator[Session]:
        """Context manager for a write transaction, committed at the block's end, rolled back after an error. May block.
        ``caller``: who makes the changes, for the audit log; None: the service itself. Raises ``RuntimeError`` within
        ``as_owner``."""
        raise_if_impersonating()
        info = self._session_info | principals.session_info(caller)
        make = self.session_class(self.engine, expire_on_commit=False, info=info)
        with self._serialise_writer(), make as session, session.begin():
            yield session

    @contextmanager
    def _serialise_writer(self) -> Iterator[None]:
        """On SQLite, let one writer of this process run at a time. A writer that has waited ``BUSY_TIMEOUT_MS`` proceeds all the
        same. On PostgreSQL do nothing."""
        # SQLite's own waiters poll its lock with ever longer pauses, so that later writers may overtake them
        acquired = self.is_sqlite and self._write_lock.acquire(timeout=BUSY_TIMEOUT_MS / 1000)
        try:
            yield
        finally:
            if acquired:
                self._write_lock.release()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Context manager for a session for reading; on SQLite it sees one snapshot. Changes of objects are discarded, statements
        that write are refused. Raises ``RuntimeError`` within ``as_owner``."""
        raise_if_impersonating()
        with Session(self._read_engine, expire_on_commit=False, autoflush=False, info=self._session_info) as session:
            yield session
            session.expunge_all()  # so that no change of an object is written
            session.commit()  # not rolled back: psycopg would prepare the connection's statements again

    def ping(self) -> None:
        """Check that the database answers. Raises SQLAlchemy's errors if it does not."""
        # a new connection with short limits: a pooled one to a machine that is gone would wait much longer
        with self._ping_engine.connect() as connection:
            connection.execute(sa.select(1))

    def dispose(self) -> None:
        """Close the pooled connections."""
        self.engine.dispose()


def _strict_json(value: Any) -> str:
    """Serialise to JSON for a column. Raises ``ValueError`` for NaN and infinities, which PostgreSQL would refuse."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _sqlite_connect(connection: Any, _record: Any) -> None:
    """Set up a new SQLite connection: waiting time for locks, WAL, full synchronisation, foreign keys."""
    connection.isolation_level = None  # this module sends BEGIN, not the driver
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged job survives a power cut
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _sqlite_begin(connection: Connection) -> None:
    """Start a SQLite transaction: deferred for a session that only reads, immediate for one that writes."""
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    driver: Any = connection.connection.driver_connection
    driver.execute(f"PRAGMA query_only = {int(read_only)}")
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _postgres_connect(connection: Any, record: Any) -> None:
    """Note whether a new connection always uses the same server process."""
    connection.autocommit = True
    (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    connection.autocommit = False
    # pgbouncer, whose next transaction may use another server process, gives its clients made-up pids
    record.info[_IS_DIRECT] = pid == connection.info.backend_pid


def _postgres_begin(connection: Connection) -> None:
    """Make the transaction of a session that reads read-only. Let one that writes prepare its statements on the server, if later
    transactions use the same server process. Statements that only read are planned for their values each time: lists of jobs need
    that."""
    options = connection.get_execution_options()
    driver: Any = connection.connection.driver_connection
    driver.read_only = read_only = bool(options.get(_READ_ONLY, False))
    prepares = options[_PREPARES] and connection.info[_IS_DIRECT] and not read_only
    driver.prepare_threshold = _PREPARE_AFTER if prepares else None
