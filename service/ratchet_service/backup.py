"""``python -m ratchet_service backup FILE`` and ``restore FILE``: a SQLite database, put aside while the service writes, and put
back while none runs. PostgreSQL has ``pg_dump`` and ``pg_restore``; then ``restore --check`` compares.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.paths import HomePaths
from ratchet_service import migrate, unrecorded
from ratchet_service.database import Database, first_line, normalise_url, utc_now
from ratchet_service.listening import StartError
from ratchet_service.models import ApiToken
from ratchet_service.settings import Settings

_BUSY_SECONDS: Final = 20.0
_SIDE: Final = ("-wal", "-shm")
POSTGRES_BACKUP: Final = "pg_dump --format=custom --file=FILE DATABASE_URL"
POSTGRES_RESTORE: Final = (
    "pg_restore --clean --if-exists --single-transaction --exit-on-error --no-owner --dbname=DATABASE_URL FILE"
)


def add(commands: Any, database: argparse.ArgumentParser) -> None:
    """The parsers of both, below ``commands``; ``database`` has the options that say which database."""
    one = commands.add_parser("backup", parents=[database], help="copy a SQLite database while the service runs")
    one.add_argument("file", type=Path)
    one.add_argument("--replace", action="store_true", help="in the place of a file that is there")
    two = commands.add_parser("restore", parents=[database], help="put a SQLite database back while no service runs")
    two.add_argument("file", type=Path, nargs="?", help="what `backup` wrote")
    two.add_argument("--replace", action="store_true", help="set the database that is there aside, beside the new one")
    two.add_argument("--check", action="store_true", help="restore nothing: compare run directory and database alone")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """Raises ``StartError`` where it cannot be done; nothing is changed then."""
    if options.command == "backup":
        backup(settings, options.file.expanduser().absolute(), replace=options.replace)
        print(f"written: {options.file}")
        return 0
    if options.check == (options.file is not None):
        raise StartError("restore takes a FILE, or --check")
    if not options.check:
        aside = restore(settings, options.file.expanduser().absolute(), replace=options.replace)
        print(f"restored: {database_file(settings)}" + (f"; what was there is {aside} now" if aside else ""))
    for line in compared(settings):
        print(line)
    return 0


def backup(settings: Settings, file: Path, *, replace: bool = False) -> None:
    """Copy the database to ``file``, as of one moment, checked, synced, and readable by the owner alone. Writers are not held up.
    Raises ``StartError``."""
    source = database_file(settings)
    if not source.is_file():
        raise StartError(f"there is no database {source}")
    if file.exists() and not replace:
        raise StartError(f"{file} is there already: give another name, or --replace")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with _opened(source, "mode=rw") as found, _created(temporary) as copy:
            found.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, with nothing beside it
        _check(temporary)
        _sync(temporary)
        temporary.rename(file)
        _sync(file.parent)
    except (sqlite3.Error, OSError) as error:
        raise StartError(f"{source} was not copied to {file}: {error}") from error
    finally:
        for path in (temporary, *(temporary.with_name(temporary.name + end) for end in (*_SIDE, "-journal"))):
            path.unlink(missing_ok=True)


def restore(settings: Settings, file: Path, *, replace: bool = False) -> Path | None:
    """Put ``file`` in the place of the database, checked before; returns where the one that was there is now. Raises
    ``StartError``: where a service runs or anybody has the database open, where one is there and ``replace`` is not said, where
    the file is damaged or of a newer Ratchet."""
    target = database_file(settings)
    if not file.is_file():
        raise StartError(f"there is no file {file}")
    wal = file.with_name(file.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        raise StartError(
            f"{file} has a log beside it ({wal.name}): copied with cp, it is no backup, but part of a database"
        )
    _check(file)
    _insist_on_revision(file)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _no_service(settings.paths):
        if target.exists() and not replace:
            raise StartError(f"{target} is there already: --replace sets it aside")
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _opened(file, "immutable=1") as found, _created(temporary) as copy:
                found.backup(copy)
            _check(temporary)
            _sync(temporary)
            aside = _set_aside(target)
            temporary.rename(target)
            _sync(target.parent)
        except (sqlite3.Error, OSError) as error:
            raise StartError(f"{file} was not put in the place of {target}: {error}") from error
        finally:
            for path in (temporary, *(temporary.with_name(temporary.name + end) for end in (*_SIDE, "-journal"))):
                path.unlink(missing_ok=True)
    return aside


def compared(settings: Settings) -> Iterator[str]:
    """What a restored database means here, in sentences. Raises ``StartError``."""
    database = Database(settings.url)
    try:
        migrate.insist_on_known(database)
        yield from unrecorded.compare(settings.paths, database).sentences()
        with database.read() as session:
            if not sa.inspect(session.connection()).has_table(ApiToken.__tablename__):
                return
            valid = sa.select(sa.func.count()).select_from(ApiToken).where(ApiToken.revoked_at.is_(None))
            if count := session.scalar(valid):
                yield (
                    f"tokens in it that are not revoked, those included that were revoked later: {count}. See "
                    "`token list`, and revoke them before the service starts"
                )
    except SQLAlchemyError as error:
        raise StartError(f"the database cannot be read: {first_line(error)}") from error
    finally:
        database.dispose()


def database_file(settings: Settings) -> Path:
    """Raises ``StartError`` where it is no file."""
    try:
        url = normalise_url(settings.url)
    except ValueError as error:
        raise StartError(str(error)) from None
    if not url.drivername.startswith("sqlite"):
        raise StartError(f"this database is a server's: {POSTGRES_BACKUP}; back with {POSTGRES_RESTORE}")
    assert url.database is not None
    return Path(url.database)


@contextmanager
def _opened(path: Path, how: str) -> Iterator[sqlite3.Connection]:
    """A database that is there. One in use is opened to be written, for ``-shm`` is; nothing is."""
    uri = f"file:{quote(str(path))}?{how}"
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
        yield connection


@contextmanager
def _created(path: Path) -> Iterator[sqlite3.Connection]:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it holds values of `secret_env`
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def _check(path: Path) -> None:
    """Raises ``StartError`` for what is no database, or a damaged one."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)) as connection:
            (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            broken = connection.execute("PRAGMA foreign_key_check").fetchone()
    except sqlite3.Error as error:
        raise StartError(f"{path} is no SQLite database that can be read: {error}") from error
    if answer != "ok" or broken is not None:
        raise StartError(f"{path} is damaged: {answer if answer != 'ok' else f'row {broken[1]} of {broken[0]}'}")


def _insist_on_revision(path: Path) -> None:
    with closing(sqlite3.connect(f"file:{quote(str(path))}?immutable=1", uri=True)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError:
            row = None
    if row is None:
        raise StartError(f"{path} is no database of Ratchet: it has no revision")
    newer = migrate.newer(str(row[0]))
    if newer is not None:
        raise StartError(f"{path}: {newer}")


@contextmanager
def _no_service(paths: HomePaths) -> Iterator[None]:
    with (paths.home / "service.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"a service runs in {paths.home}: end it first") from None
        yield


def _set_aside(target: Path) -> Path | None:
    """The database that is there under another name; None where there is none. It keeps its own name besides, so that at no
    moment a service would find none and make an empty one. Raises ``StartError`` while somebody has it open."""
    aside = base = target.with_name(f"{target.name}.before-{utc_now():%Y%m%dT%H%M%SZ}")
    for number in itertools.count(1):
        if not aside.exists():
            break
        aside = base.with_name(f"{base.name}.{number}")
    if target.exists():
        _close(target)
        os.link(target, aside)
    for end in _SIDE:  # of one that is damaged, or gone: SQLite would put what is in it into the new one
        side = target.with_name(target.name + end)
        if side.exists():
            side.rename(aside.with_name(aside.name + end))
    return aside if target.exists() else None


def _close(target: Path) -> None:
    """Its log goes into the file. Raises ``StartError`` while another process has it open."""
    try:
        with closing(sqlite3.connect(target, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.DatabaseError as error:  # a damaged one is set aside as it is
        if "locked" in str(error):
            raise StartError(f"a process has {target} open: end service and reconcilers first") from None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
