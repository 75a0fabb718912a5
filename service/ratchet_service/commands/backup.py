"""``python -m ratchet_service backup FILE`` and ``restore FILE``: copy a SQLite database while the service runs, and restore it
while none runs. ``restore --check`` only compares database and run directory."""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.paths import HomePaths
from ratchet_service.checkpoints import run_directory_scan
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, first_line, normalise_url, utc_now
from ratchet_service.db.models import ApiToken, Webhook
from ratchet_service.errors import StartError

_BUSY_SECONDS: Final = 20.0
_SIDE_FILE_SUFFIXES: Final = ("-wal", "-shm")
POSTGRES_BACKUP: Final = "pg_dump --format=custom --file=FILE DATABASE_URL"
POSTGRES_RESTORE: Final = (
    "pg_restore --clean --if-exists --single-transaction --exit-on-error --no-owner --dbname=DATABASE_URL FILE"
)


def add_parsers(commands: Any, database_options: argparse.ArgumentParser) -> None:
    """Add the parsers of ``backup`` and ``restore`` to ``commands``; ``database_options`` has the options that select the
    database."""
    one = commands.add_parser(
        "backup", parents=[database_options], help="copy a SQLite database while the service runs"
    )
    one.add_argument("file", type=Path)
    one.add_argument("--replace", action="store_true", help="overwrite an existing file")
    two = commands.add_parser(
        "restore", parents=[database_options], help="put a SQLite database back while no service runs"
    )
    two.add_argument("file", type=Path, nargs="?", help="what `backup` wrote")
    two.add_argument(
        "--replace", action="store_true", help="rename the existing database and keep it next to the new one"
    )
    two.add_argument("--check", action="store_true", help="restore nothing: only compare run directory and database")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """Run ``backup`` or ``restore``, print the results and return 0. Raises ``StartError`` if the command fails; if only the
    comparison after a restore fails, the database stays restored."""
    if options.command == "backup":
        backup(settings, options.file.expanduser().absolute(), replace=options.replace)
        print(f"written: {options.file}")
        return 0
    if options.check == (options.file is not None):
        raise StartError("restore needs either FILE or --check")
    if not options.check:
        aside = restore(settings, options.file.expanduser().absolute(), replace=options.replace)
        print(f"restored: {database_file(settings)}" + (f"; the previous database is now {aside}" if aside else ""))
    for line in describe_differences(settings):
        print(line)
    return 0


def backup(settings: Settings, file: Path, *, replace: bool = False) -> None:
    """Copy the SQLite database to ``file``, as it is at one moment; writers are not blocked. Raises ``StartError``."""
    source = database_file(settings)
    if not source.is_file():
        raise StartError(f"there is no database {source}")
    own = [path for end in ("", *_SIDE_FILE_SUFFIXES) if (path := source.with_name(source.name + end)).exists()]
    if file.exists() and any(file.samefile(path) for path in own):
        raise StartError(f"{file} is the database itself: give another name")
    if file.parent.resolve().is_relative_to(settings.home.resolve()):
        raise StartError(f"{file} lies in the run directory, whose files the service uses: give another directory")
    if file.exists() and not replace:
        raise StartError(f"{file} already exists: give another name, or --replace")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with _open_existing(source, "mode=rw") as found, _create(temporary) as copy:
            found.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # a single file, without ``-wal`` and ``-shm``
        _check(temporary)
        fsync_path(temporary)
        temporary.rename(file)
        fsync_path(file.parent)
    except (sqlite3.Error, OSError) as error:
        raise StartError(f"{source} was not copied to {file}: {error}") from error
    finally:
        for path in (
            temporary,
            *(temporary.with_name(temporary.name + end) for end in (*_SIDE_FILE_SUFFIXES, "-journal")),
        ):
            path.unlink(missing_ok=True)


def restore(settings: Settings, file: Path, *, replace: bool = False) -> Path | None:
    """Put a copy of the backup ``file`` in the place of the database. Return where an existing database was moved, or None.
    Raises ``StartError``."""
    target = database_file(settings)
    if not file.is_file():
        raise StartError(f"there is no file {file}")
    wal = file.with_name(file.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        raise StartError(
            f"{file} has a write-ahead log next to it ({wal.name}): it is not a backup, but part of a database that was "
            "copied with cp"
        )
    _check(file)
    if _is_in_wal_mode(file):
        raise StartError(
            f"{file} is in WAL mode, so it may be a copy made with cp, which lacks what the write-ahead log had then. Use a "
            "file that `backup` wrote. If SQLite's .backup made it, or no process had the database open during the copy, it is "
            f"complete: `sqlite3 {shlex.quote(str(file))} 'PRAGMA journal_mode = DELETE'` makes it one that can be restored"
        )
    _check_revision(file)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _hold_service_lock(settings.paths):
        if target.exists() and not replace:
            raise StartError(f"{target} already exists: --replace renames it")
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _open_existing(file, "immutable=1") as found, _create(temporary) as copy:
                found.backup(copy)
            _check(temporary)
            fsync_path(temporary)
            aside = _set_aside(target)
            temporary.rename(target)
            fsync_path(target.parent)
        except (sqlite3.Error, OSError) as error:
            raise StartError(f"{target} was not replaced by {file}: {error}") from error
        finally:
            for path in (
                temporary,
                *(temporary.with_name(temporary.name + end) for end in (*_SIDE_FILE_SUFFIXES, "-journal")),
            ):
                path.unlink(missing_ok=True)
    return aside


def describe_differences(settings: Settings) -> Iterator[str]:
    """Yield sentences about differences between database and run directory, and about tokens that are not revoked. Raises
    ``StartError`` while iterating."""
    if database_url(settings).drivername.startswith("sqlite") and not database_file(settings).is_file():
        raise StartError(f"there is no database {database_file(settings)}")
    database = Database(settings.url)
    try:
        migrate.check_revision(database)
        yield from run_directory_scan.compare(settings.paths, database).sentences()
        with database.read() as session:
            tables = sa.inspect(session.connection())
            if tables.has_table(Webhook.__tablename__):
                enabled = sa.select(sa.func.count()).select_from(Webhook).where(Webhook.disabled_at.is_(None))
                if count := session.scalar(enabled):
                    yield f"webhooks in it that get events as soon as the service starts: {count}; see docs/backup.md"
            if not tables.has_table(ApiToken.__tablename__):
                return
            valid = sa.select(sa.func.count()).select_from(ApiToken).where(ApiToken.revoked_at.is_(None))
            if count := session.scalar(valid):
                yield (
                    f"tokens in it that are not revoked, including those revoked after the backup: {count}. See "
                    "`token list`, and revoke them before the service starts"
                )
    except (migrate.NewerSchema, migrate.UnsupportedSchema) as error:
        raise StartError(error.detail) from None
    except SQLAlchemyError as error:
        raise StartError(f"the database cannot be read: {first_line(error)}") from error
    except OSError as error:
        raise StartError(f"the run directory cannot be read: {error}") from error
    finally:
        database.dispose()


def database_url(settings: Settings) -> sa.URL:
    """Return the database's URL. Raises ``StartError`` if it is invalid."""
    try:
        return normalise_url(settings.url)
    except ValueError as error:
        raise StartError(str(error)) from None


def database_file(settings: Settings) -> Path:
    """Return the path of the SQLite database, which need not exist. Raises ``StartError`` for another kind of database."""
    url = database_url(settings)
    if not url.drivername.startswith("sqlite"):
        raise StartError(
            f"this database is on a server: back it up with {POSTGRES_BACKUP}; restore it with {POSTGRES_RESTORE}"
        )
    assert url.database is not None
    return Path(url.database)


@contextmanager
def _open_existing(path: Path, uri_query: str) -> Iterator[sqlite3.Connection]:
    """Open an existing SQLite file, and close it at the block's end. ``uri_query``: options of the SQLite URI."""
    uri = f"file:{quote(str(path))}?{uri_query}"
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
        yield connection


@contextmanager
def _create(path: Path) -> Iterator[sqlite3.Connection]:
    """Create an empty SQLite file that only its owner can read, and open it. Raises ``FileExistsError``."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it holds values of `secret_env`
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def _check(path: Path) -> None:
    """Raise ``StartError`` if the file is not a SQLite database, or is damaged."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)) as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            broken = connection.execute("PRAGMA foreign_key_check").fetchone()
    except sqlite3.Error as error:
        raise StartError(f"{path} is not a readable SQLite database: {error}") from error
    if answer != "ok" or broken is not None:
        raise StartError(f"{path} is damaged: {answer if answer != 'ok' else f'row {broken[1]} of {broken[0]}'}")


def _is_in_wal_mode(path: Path) -> bool:
    """True if the SQLite file's header says that a write-ahead log belongs to it (byte 19;
    https://www.sqlite.org/fileformat.html)."""
    with path.open("rb") as file:
        return file.read(20)[19:] == b"\x02"


def _check_revision(path: Path) -> None:
    """Raise ``StartError`` if the SQLite file, which ``_check`` has accepted, is not a database of Ratchet, or has a revision
    that this version cannot use."""
    with closing(sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:
            row = None
    if row is None:
        raise StartError(f"{path} is not a database of Ratchet: it has no revision")
    refused = migrate.refusal(str(row[0]))
    if refused is not None:
        raise StartError(f"{path}: {refused.detail}")


@contextmanager
def _hold_service_lock(paths: HomePaths) -> Iterator[None]:
    """Hold the run directory's lock during the block, so that no service on SQLite can run. Raises ``StartError`` if one runs."""
    with (paths.home / "service.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"a service runs in {paths.home}: end it first") from None
        yield


def _set_aside(target: Path) -> Path | None:
    """Give the existing database a second name, and return it; None if there is none. Raises ``StartError`` while a process has
    it open."""
    aside = base = target.with_name(f"{target.name}.before-{utc_now():%Y%m%dT%H%M%SZ}")
    for number in itertools.count(1):
        if not aside.exists():
            break
        aside = base.with_name(f"{base.name}.{number}")
    if target.exists():
        _merge_wal(target)
        # it keeps its old name until the new one replaces it: a service that found none would create an empty one
        os.link(target, aside)
    for end in _SIDE_FILE_SUFFIXES:  # left by a damaged or missing database: SQLite would apply them to the new one
        side = target.with_name(target.name + end)
        if side.exists():
            side.rename(aside.with_name(aside.name + end))
    return aside if target.exists() else None


def _merge_wal(target: Path) -> None:
    """Merge the write-ahead log into the database file. Raises ``StartError`` while another process has it open in WAL
    mode."""
    try:
        with closing(sqlite3.connect(target, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.DatabaseError as error:  # a damaged database is set aside as it is
        if "locked" in str(error):
            raise StartError(f"a process has {target} open: end service and reconcilers first") from None
