"""``python -m ratchet_service.doctor --home DIR``: could the service work with its database? Prints one JSON document.

The database is not changed. An SQLite file without a write-ahead log (``-wal``) is read as immutable, so that no ``-shm`` and
``-wal`` files appear next to it. If the log exists, for example while a service runs, the file is read together with it.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract import env_vars
from ratchet_contract.doctor.findings import Finding, ProbeReport, failed, ok, warning
from ratchet_contract.paths import HomePaths
from ratchet_service.commands import doctor_jobs
from ratchet_service.config import output_limits, standby_bounds
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, normalise_url, redacted_url
from ratchet_service.db.models import Base
from ratchet_service.isolation import run_as

_EMPTY: Final = (
    "suspend and export its jobs with the version that made it, then start `ratchet serve` with an empty run directory and "
    "database"
)
_NEWER: Final = "use the Ratchet that wrote it, or a newer one: pip install --upgrade 'ratchet-train[service]'"
_BUSY_SECONDS: Final = 5.0
_VARIABLES: Final[Mapping[str, Callable[[str], object]]] = {
    env_vars.STANDBY: standby_bounds.parse,
    env_vars.BOUNDS: output_limits.parse_bounds,
    env_vars.RUN_AS_LIMITS: run_as.parse_limits,
}
_RESTORE: Final = (
    "end the service, keep a copy of the file, and rescue what can be read: sqlite3 {path} .recover | sqlite3 new.db; "
    "or move it away: checkpoints on disk are not touched"
)


def main(argv: list[str] | None = None) -> int:
    """Check the database, the jobs' user and variables of `ratchet serve`, print the findings as JSON, and return 0, also if
    checks have failed."""
    parser = argparse.ArgumentParser(prog="python -m ratchet_service.doctor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    options = parser.parse_args(argv)
    settings = Settings(options.home.expanduser().absolute(), os.environ.get(env_vars.DATABASE_URL) or None)
    findings = [*probe(settings), doctor_jobs.check_job_user(settings.paths), *check_variables(os.environ)]
    print(ProbeReport(findings=findings).model_dump_json())
    return 0


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each variable with whose value no service can start."""
    found = []
    for name, parse in _VARIABLES.items():
        try:
            parse(environ.get(name, ""))
        except ValueError as error:
            cure = f"correct {name}, or unset it: with this value, `ratchet serve` does not start"
            found.append(failed(name, "wrong", detail=str(error), cure=cure))
    return found


def probe(settings: Settings) -> list[Finding]:
    """Check the database that ``ratchet serve`` would use with these settings, and, if possible, compare the jobs'
    directories and processes with it. Return the findings. Nothing is changed."""
    try:
        url = normalise_url(settings.url)
    except ValueError as error:
        return [
            failed(
                "database",
                "wrong URL",
                detail=str(error),
                cure=f"set {env_vars.DATABASE_URL} to sqlite:////path/ratchet.db or postgresql://user@host/name",
            )
        ]
    home = settings.paths
    return (
        _check_sqlite(Path(str(url.database)), home)
        if url.drivername.startswith("sqlite")
        else _check_postgres(url, home)
    )


# --- SQLite --------------------------------------------------------------------------------------------------------------


def _check_sqlite(path: Path, home: HomePaths) -> list[Finding]:
    """Return the findings on a SQLite file. After a failed check the later ones are left out."""
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
    schema = _check_schema(revision, tables)
    rows = [ok("database", f"SQLite {sqlite3.sqlite_version}, {size}", "quick_check ok"), schema]
    if schema.status != "ok" or "jobs" not in tables:
        return rows
    try:
        with _open_read_only(path) as connection:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            rows += doctor_jobs.check_wal(path, str(mode))
            return rows + _check_jobs(home, lambda query: connection.execute(query).fetchall())
    except sqlite3.DatabaseError as error:
        return [*rows, warning("jobs on disk", "not compared", detail=f"{path}: {error}", cure="try again")]


def _read_sqlite(path: Path) -> tuple[str, str | None, set[str]]:
    """Return the result of quick_check (``ok``: sound), the schema revision, and the table names. Raises
    ``sqlite3.DatabaseError``."""
    with _open_read_only(path) as connection:
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        row = (
            connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if "alembic_version" in tables
            else None
        )
    return str(problem), None if row is None else str(row[0]), tables


@contextmanager
def _open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the SQLite file for reading: as immutable, unless a write-ahead log shows that it may be open elsewhere."""
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
    uri = f"file:{quote(str(path))}?{mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)) as connection:
        yield connection


def _damaged(path: Path, why: str) -> Finding:
    """Return the finding that the database is damaged."""
    return failed("database", "damaged", detail=f"{path}: {why}", cure=_RESTORE.format(path=path))


# --- PostgreSQL ----------------------------------------------------------------------------------------------------------


def _check_postgres(url: URL, home: HomePaths) -> list[Finding]:
    """Return the findings on a PostgreSQL database. If no connection can be made, the only finding says why."""
    displayed_url = redacted_url(url)
    try:
        database = Database(url.render_as_string(hide_password=False))
    except ModuleNotFoundError as error:
        return [
            failed(
                "database",
                "no driver",
                detail=f"{displayed_url}: {error}",
                cure="pip install 'ratchet-train[postgres]'",
            )
        ]
    try:
        with database.engine.connect() as connection:
            return _query_postgres(connection, displayed_url, home)
    except SQLAlchemyError as error:
        why = (str(getattr(error, "orig", None) or error).strip().splitlines() or [type(error).__name__])[0]
        return [
            failed(
                "database",
                "no connection",
                detail=f"{displayed_url}: {why}",
                cure=f"start the server, and check host, port, user and password in {env_vars.DATABASE_URL}",
            )
        ]
    finally:
        database.dispose()


def _query_postgres(connection: Connection, displayed_url: str, home: HomePaths) -> list[Finding]:
    """Return the findings on a PostgreSQL database that accepts connections."""
    version = str(connection.scalar(sa.text("SHOW server_version")))
    found = [ok("database", f"PostgreSQL {version.split()[0]}", displayed_url)]
    if connection.scalar(sa.text("SELECT pg_is_in_recovery()")):
        return [
            failed(
                "database",
                f"PostgreSQL {version.split()[0]}",
                detail=f"{displayed_url} is a standby: it can only be read",
                cure="name the primary server in the URL",
            )
        ]
    found.append(doctor_jobs.check_clock(connection.scalar(sa.text("SELECT clock_timestamp()"))))
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
    schema = _check_schema(revision, tables)
    if schema.status != "ok" or "jobs" not in tables:
        return [*found, schema]
    try:
        return [*found, schema, *_check_jobs(home, lambda query: connection.execute(sa.text(query)).all())]
    except SQLAlchemyError:  # no right to read; the finding about rights reports it
        return [*found, schema]


def _owned_by_others(connection: Connection) -> list[str]:
    """Return the names of Ratchet's tables that belong to a role whose rights the current user does not have."""
    query = (
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() "
        "AND NOT pg_has_role(tableowner, 'USAGE') ORDER BY tablename"
    )
    ours = set(Base.metadata.tables) | {"alembic_version"}
    return [name for (name,) in connection.execute(sa.text(query)) if name in ours]


def _scalar(connection: Connection, query: str) -> str | None:
    """Return the query's value as text; None if it has none or may not be read."""
    try:
        value: Any = connection.scalar(sa.text(query))
    except SQLAlchemyError:  # no right to read it; the finding about rights reports it
        return None
    return None if value is None else str(value)


def _check_jobs(home: HomePaths, run_query: Callable[[str], Sequence[Any]]) -> list[Finding]:
    """Compare the run directory and the running processes with the database, and return the findings. ``run_query``: returns the
    rows of an SQL query."""

    def attempts() -> dict[str, int]:
        """Return id -> number of the newest attempt of all jobs."""
        return {str(job_id): int(attempt) for job_id, attempt in run_query("SELECT id, attempt FROM jobs")}

    def alive() -> set[str]:
        """Return ``JOB/NNNN`` of all attempts that have not ended."""
        query = "SELECT job_id, number FROM attempts WHERE phase <> 'ENDED'"
        return {f"{job_id}/{number:04d}" for job_id, number in run_query(query)}

    known = attempts()
    begun = (job_id for job_id, attempt in known.items() if attempt > 0)
    return [
        doctor_jobs.check_run_directory(home, lambda ids: {i: known[i] for i in ids if i in known}, lambda: begun),
        doctor_jobs.check_orphans(home, alive),
    ]


# --- both ----------------------------------------------------------------------------------------------------------------


def _check_schema(revision: str | None, tables: set[str]) -> Finding:
    """Return the finding about the schema. ``revision``: that of the database, if any; ``tables``: names of the existing
    tables."""
    head, known = migrate.head_revision(), migrate.known_revisions()
    if revision == head:
        return ok("schema", revision, "this Ratchet's own")
    if revision in known:
        return ok("schema", str(revision), f"older: the next `ratchet serve` brings it to {head}")
    if revision is not None and isinstance(refused := migrate.refusal(revision), migrate.UnsupportedSchema):
        return failed("schema", revision, detail=refused.detail, cure=_EMPTY)
    if revision is not None:
        return failed(
            "schema",
            revision,
            detail=f"this Ratchet knows up to {head}: a newer Ratchet made the database",
            cure=_NEWER,
        )
    if "jobs" in tables:
        return failed(
            "schema",
            "unknown",
            detail="it has a table `jobs` that no migration of Ratchet made, or whose revision cannot be read",
            cure=f"set {env_vars.DATABASE_URL} to a separate database for Ratchet",
        )
    return ok("schema", "none yet", f"the next `ratchet serve` makes {head}")
