"""``python -m ratchet_service.doctor --home DIR``: could the service work with its database? Prints one JSON document.

Nothing is written: an SQLite file that no service has open is read as immutable, so that not even ``-shm`` and ``-wal`` files
appear beside it; one that is open is read through its own.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract import environment
from ratchet_contract.findings import Finding, ProbeReport, failed, ok, warning
from ratchet_contract.paths import HomePaths
from ratchet_service import doctor_jobs, migrate
from ratchet_service.database import Database, normalise_url, printable
from ratchet_service.models import Base
from ratchet_service.settings import Settings

_NEWER: Final = "use the Ratchet that wrote it, or a newer one: pip install --upgrade 'ratchet-train[service]'"
_BUSY_SECONDS: Final = 5.0
_RESTORE: Final = (
    "end the service, keep a copy of the file, and rescue what can be read: sqlite3 {path} .recover | sqlite3 new.db; "
    "or move it away: checkpoints on disk are not touched"
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ratchet_service.doctor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    options = parser.parse_args(argv)
    settings = Settings(options.home.expanduser().absolute(), os.environ.get(environment.DATABASE_URL) or None)
    print(ProbeReport(findings=[*probe(settings), doctor_jobs.user(settings.paths)]).model_dump_json())
    return 0


def probe(settings: Settings) -> list[Finding]:
    """The database that ``ratchet serve`` would use with these settings."""
    try:
        url = normalise_url(settings.url)
    except ValueError as error:
        return [
            failed(
                "database",
                "wrong URL",
                detail=str(error),
                cure=f"set {environment.DATABASE_URL} to sqlite:////path/ratchet.db or postgresql://user@host/name",
            )
        ]
    home = settings.paths
    return _sqlite(Path(str(url.database)), home) if url.drivername.startswith("sqlite") else _postgres(url, home)


# --- SQLite --------------------------------------------------------------------------------------------------------------


def _sqlite(path: Path, home: HomePaths) -> list[Finding]:
    if not path.exists():
        return [ok("database", "none yet", f"`ratchet serve` makes {path}")]
    try:
        found = _read_sqlite(path)
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            return [
                warning("database", "locked", detail=f"{path} was locked for {_BUSY_SECONDS:g} s", cure="try again")
            ]
        return [_damaged(path, str(error))]
    except sqlite3.DatabaseError as error:
        return [_damaged(path, str(error))]
    problem, revision, tables = found
    if problem != "ok":
        return [_damaged(path, problem)]
    size = f"{path.stat().st_size / 2**20:.1f} MiB"
    schema = _schema(revision, tables)
    rows = [ok("database", f"SQLite {sqlite3.sqlite_version}, {size}", "quick_check ok"), schema]
    if schema.status != "ok" or "jobs" not in tables:
        return rows
    try:
        with _opened(path) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            rows += doctor_jobs.sqlite_files(path, str(mode))
            return rows + _jobs(home, lambda query: connection.execute(query).fetchall())
    except sqlite3.DatabaseError as error:
        return [*rows, warning("jobs on disk", "not compared", detail=f"{path}: {error}", cure="try again")]


def _read_sqlite(path: Path) -> tuple[str, str | None, set[str]]:
    """(answer of quick_check, schema revision, names of tables); without a trace in the directory where nobody has it open."""
    with _opened(path) as connection:
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        row = (
            connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if "alembic_version" in tables
            else None
        )
    return str(problem), None if row is None else str(row[0]), tables


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
    uri = f"file:{quote(str(path))}?{mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)) as connection:
        yield connection


def _damaged(path: Path, why: str) -> Finding:
    return failed("database", "damaged", detail=f"{path}: {why}", cure=_RESTORE.format(path=path))


# --- PostgreSQL ----------------------------------------------------------------------------------------------------------


def _postgres(url: URL, home: HomePaths) -> list[Finding]:
    shown = printable(url)
    try:
        database = Database(url.render_as_string(hide_password=False))
    except ModuleNotFoundError as error:
        return [
            failed("database", "no driver", detail=f"{shown}: {error}", cure="pip install 'ratchet-train[postgres]'")
        ]
    try:
        with database.engine.connect() as connection:
            return _ask_postgres(connection, shown, home)
    except SQLAlchemyError as error:
        why = (str(getattr(error, "orig", None) or error).strip().splitlines() or [type(error).__name__])[0]
        return [
            failed(
                "database",
                "no connection",
                detail=f"{shown}: {why}",
                cure=f"start the server, and check host, port, user and password in {environment.DATABASE_URL}",
            )
        ]
    finally:
        database.dispose()


def _ask_postgres(connection: Connection, shown: str, home: HomePaths) -> list[Finding]:
    version = str(connection.scalar(sa.text("SHOW server_version")))
    found = [ok("database", f"PostgreSQL {version.split()[0]}", shown)]
    if connection.scalar(sa.text("SELECT pg_is_in_recovery()")):
        return [
            failed(
                "database",
                f"PostgreSQL {version.split()[0]}",
                detail=f"{shown} is a standby: it can only be read",
                cure="name the primary server in the URL",
            )
        ]
    found.append(doctor_jobs.clock(connection.scalar(sa.text("SELECT clock_timestamp()"))))
    user = connection.scalar(sa.text("SELECT current_user"))
    schema = connection.scalar(sa.text("SELECT current_schema()"))
    tables = set(sa.inspect(connection).get_table_names(schema)) if schema else set()
    if not schema or not connection.scalar(sa.text("SELECT has_schema_privilege(current_schema(), 'CREATE')")):
        found.append(
            failed(
                "database rights",
                "none",
                detail=f"{user} may not create tables in schema {schema or '(none)'}",
                cure=f"GRANT CREATE, USAGE ON SCHEMA {schema or 'public'} TO {user}",
            )
        )
    elif foreign := _owned_by_others(connection):
        found.append(
            failed(
                "database rights",
                "not owner",
                detail=f"{user} does not own {', '.join(foreign[:3])}: no migration can change them",
                cure=f"ALTER TABLE ... OWNER TO {user}, or connect as the owner",
            )
        )
    else:
        found.append(ok("database rights", "ok", f"{user} may create and change tables in schema {schema}"))
    revision = _scalar(connection, "SELECT version_num FROM alembic_version") if "alembic_version" in tables else None
    schema = _schema(revision, tables)
    if schema.status != "ok" or "jobs" not in tables:
        return [*found, schema]
    try:
        return [*found, schema, *_jobs(home, lambda query: connection.execute(sa.text(query)).all())]
    except SQLAlchemyError:  # no right to read, which the finding about rights tells
        return [*found, schema]


def _owned_by_others(connection: Connection) -> list[str]:
    query = (
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() "
        "AND NOT pg_has_role(tableowner, 'USAGE') ORDER BY tablename"
    )
    ours = set(Base.metadata.tables) | {"alembic_version"}
    return [name for (name,) in connection.execute(sa.text(query)) if name in ours]


def _scalar(connection: Connection, query: str) -> str | None:
    try:
        value: Any = connection.scalar(sa.text(query))
    except SQLAlchemyError:  # no right to read it, which the finding about rights tells
        return None
    return None if value is None else str(value)


def _jobs(home: HomePaths, ask: Callable[[str], Sequence[Any]]) -> list[Finding]:
    """Run directory and processes against the rows. ``ask``: a query's rows; one without values of others."""

    def epochs() -> dict[str, int]:
        return {str(job_id): int(epoch) for job_id, epoch in ask("SELECT id, epoch FROM jobs")}

    def alive() -> set[str]:
        query = "SELECT job_id, number FROM attempts WHERE phase <> 'ENDED'"
        return {f"{job_id}/{number:04d}" for job_id, number in ask(query)}

    known = epochs()
    begun = (job_id for job_id, epoch in known.items() if epoch > 0)
    return [
        doctor_jobs.run_directory(home, lambda ids: {i: known[i] for i in ids if i in known}, lambda: begun),
        doctor_jobs.orphans(home, alive),
    ]


# --- both ----------------------------------------------------------------------------------------------------------------


def _schema(revision: str | None, tables: set[str]) -> Finding:
    """The schema's revision against those that this Ratchet has migrations for."""
    head, known = migrate.head(), migrate.known()
    if revision == head:
        return ok("schema", revision, "this Ratchet's own")
    if revision in known:
        return ok("schema", str(revision), f"older: the next `ratchet serve` brings it to {head}")
    if revision is not None:
        return failed(
            "schema", revision, detail=f"this Ratchet knows up to {head}: the database is a newer one's", cure=_NEWER
        )
    if "jobs" in tables:
        return failed(
            "schema",
            "unknown",
            detail="it has a table `jobs` that no migration of Ratchet made, or whose revision cannot be read",
            cure=f"give Ratchet a database of its own in {environment.DATABASE_URL}",
        )
    return ok("schema", "none yet", f"the next `ratchet serve` makes {head}")


if __name__ == "__main__":
    sys.exit(main())
