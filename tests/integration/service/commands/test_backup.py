"""``python -m ratchet_service backup`` and ``restore``; ``pg_dump`` and ``pg_restore`` as the documentation has them."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from ratchet_contract.api.roles import Role
from ratchet_contract.api.webhooks import WebhookRequest
from ratchet_service import __main__
from ratchet_service.commands import backup
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, sqlite_url, utc_now
from ratchet_service.db.models import Event, Job
from ratchet_service.usecases import webhooks
from tests.support.tokens import make_token


def add_job(database: Database, name: str) -> str:
    job_id = f"job-{name:0>12}"
    with database.write() as session:
        session.add(
            Job(
                id=job_id, name=name, spec={}, resolved={}, spec_digest="0" * 64, attempt=1,
                created_at=utc_now(), updated_at=utc_now(),
            )
        )  # fmt: skip
        session.flush()
        session.add(Event(job_id=job_id, at=utc_now(), type="submit", message=name))
    return job_id


def jobs_in(path: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM jobs ORDER BY id")]


def command(home: Path, *words: str) -> int:
    return __main__.main([words[0], "--home", str(home), *words[1:]])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run directory with a database of one job, whose directory is there."""
    folder = tmp_path / "home"
    folder.mkdir()
    database = Database(sqlite_url(folder / "ratchet.db"))
    migrate.upgrade(database)
    job_id = add_job(database, "first")
    (folder / "jobs" / job_id / "attempts" / "0001").mkdir(parents=True)
    database.dispose()
    return folder


def test_backup_during_writes_is_a_consistent_snapshot(home: Path, tmp_path: Path) -> None:
    database, stop, written = Database(sqlite_url(home / "ratchet.db")), threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            written.append(add_job(database, f"w{len(written)}"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for i in range(3):
            before = len(written)
            assert command(home, "backup", str(tmp_path / f"{i}.db")) == 0
            found = jobs_in(tmp_path / f"{i}.db")
            assert len(found) > before
            with closing(sqlite3.connect(tmp_path / f"{i}.db")) as copy:
                assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                assert copy.execute("SELECT count(*) FROM events").fetchone() == (len(found),)
    finally:
        stop.set()
        writer.join()
        database.dispose()
    assert (tmp_path / "0.db").stat().st_mode & 0o077 == 0
    assert {p.name for p in tmp_path.iterdir()} == {"home", "0.db", "1.db", "2.db"}


def test_restore_replaces_the_database_and_reports_later_jobs_and_tokens(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "backup.db"
    assert command(home, "backup", str(file)) == 0
    assert command(home, "backup", str(file)) == 2
    assert "already exists" in capsys.readouterr().err
    database = Database(sqlite_url(home / "ratchet.db"))
    later = add_job(database, "later")
    make_token(database, "local", Role.ADMIN)
    with database.write() as session:
        webhooks.create(session, "local", WebhookRequest(url="https://hooks.example/"))
    database.dispose()
    (home / "jobs" / later / "attempts" / "0001").mkdir(parents=True)
    (home / "jobs" / "job-0000000first" / "attempts" / "0002").mkdir(parents=True)

    assert command(home, "restore", str(file)) == 2
    assert "--replace" in capsys.readouterr().err
    assert command(home, "restore", "--replace", str(file)) == 0
    said = capsys.readouterr().out
    assert f"1 job on the disk, but not in the database: {later}" in said
    assert "1 job with attempts that the database does not know: job-0000000first" in said
    assert "not revoked" not in said and "webhooks" not in said
    assert jobs_in(home / "ratchet.db") == ["first"]
    (aside,) = home.glob("ratchet.db.before-*")
    assert jobs_in(aside) == ["first", "later"]
    assert command(home, "restore", "--replace", str(aside)) == 0
    said = capsys.readouterr().out
    assert "tokens in it that are not revoked, including those revoked after the backup: 1." in said
    assert "webhooks in it that get events as soon as the service starts: 1;" in said


@pytest.mark.parametrize("name", ["ratchet.db", "../link.db", "../hard.db", "ratchet.db-wal", "service.lock", "new.db"])
def test_backup_to_the_database_or_next_to_it_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "link.db").symlink_to(home / "ratchet.db")
    (tmp_path / "hard.db").hardlink_to(home / "ratchet.db")
    service = Database(sqlite_url(home / "ratchet.db"))
    add_job(service, "second")
    before = {path.name: path.stat().st_ino for path in home.iterdir()}
    assert command(home, "backup", "--replace", str(home / name)) == 2
    assert "give another" in capsys.readouterr().err
    assert {path.name: path.stat().st_ino for path in home.iterdir()} == before
    add_job(service, "third")
    service.dispose()
    assert jobs_in(home / "ratchet.db") == ["first", "third", "second"]


def test_restore_refuses_running_services_and_unusable_backup_files(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "backup.db", home / "ratchet.db"
    assert command(home, "backup", str(file)) == 0
    before = target.read_bytes()

    def refused(words: str, of: Path = file) -> None:
        assert command(home, "restore", "--replace", str(of)) == 2
        said = capsys.readouterr().err
        assert words in said, said
        assert target.read_bytes()[:4096] == before[:4096]
        assert jobs_in(target) == ["first"]

    with (home / "service.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused("a service runs")
    other = Database(sqlite_url(target))
    with other.read() as session:
        session.execute(sa.select(Job.id)).all()
    refused("open: end service")  # its pool keeps the connection, as a reconciler's does
    other.dispose()
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(before[: len(before) // 2])
    refused("damaged.db", damaged)
    (tmp_path / "text.db").write_text("no database" * 1000)
    refused("not a readable SQLite database", tmp_path / "text.db")
    with closing(sqlite3.connect(tmp_path / "strange.db")) as strange:
        strange.execute("CREATE TABLE t (x)")
    refused("not a database of Ratchet", tmp_path / "strange.db")
    newer = tmp_path / "newer.db"
    shutil.copy(file, newer)
    with closing(sqlite3.connect(newer)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    refused(f"revision 9999, this one knows up to {migrate.head_revision()}", newer)
    (tmp_path / "copied.db").write_bytes(before)
    (tmp_path / "copied.db-wal").write_bytes(b"x")
    refused("copied with cp", tmp_path / "copied.db")
    (tmp_path / "copied.db-wal").unlink()
    refused("may be a copy made with cp", tmp_path / "copied.db")
    kept = tmp_path / "kept.db"
    with closing(sqlite3.connect(target)) as source, closing(sqlite3.connect(kept)) as copy:
        source.backup(copy)  # as the command ``.backup``
    refused("in WAL mode, so it may be a copy", kept)
    refused("If SQLite's .backup made it", kept)
    with closing(sqlite3.connect(kept)) as copy:
        copy.execute("PRAGMA journal_mode = DELETE")
    assert command(home, "restore", "--replace", str(kept)) == 0
    assert jobs_in(target) == ["first"]
    for path in home.glob("*.before-*"):
        path.unlink()
    assert not list(home.glob("*.before-*"))


def test_restore_check_with_unreadable_jobs_directory_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(home / "jobs")
    (home / "jobs").touch()  # root can read every directory
    assert command(home, "restore", "--check") == 2
    said = capsys.readouterr().err
    assert "cannot be read" in said and str(home / "jobs") in said


def test_restore_discards_the_wal_of_the_lost_database(home: Path, tmp_path: Path) -> None:
    file, target = tmp_path / "backup.db", home / "ratchet.db"
    database = Database(sqlite_url(target))
    assert command(home, "backup", str(file)) == 0
    add_job(database, "later")
    wal = target.with_name("ratchet.db-wal").read_bytes()
    assert wal
    database.dispose()
    target.unlink()
    target.with_name("ratchet.db-wal").write_bytes(wal)
    assert command(home, "restore", str(file)) == 0
    again = Database(sqlite_url(target))
    with again.read() as session:
        assert list(session.scalars(sa.select(Job.name))) == ["first"]
    again.dispose()


def test_commands_refuse_a_database_of_a_newer_version(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(home / "ratchet.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    for words in (("serve",), ("reconcile",), ("token", "list")):
        arguments = [*words, "--home", str(home)]
        assert __main__.main(arguments) == 2
        assert (
            f"the database was made by a newer version of Ratchet (revision 9999, this one knows up to {migrate.head_revision()})"
            in capsys.readouterr().err
        )


def test_documented_pg_dump_and_pg_restore_commands_work(postgres_url: str, tmp_path: Path) -> None:
    """Into a database that is empty, and over one that has gone on."""
    if shutil.which("pg_dump") is None:
        pytest.skip("needs pg_dump: PostgreSQL's client programs beside its server")
    page = Path("docs/backup.md").read_text()
    server = sa.create_engine(Database(postgres_url).url, isolation_level="AUTOCOMMIT")
    urls = []
    for name in ("dumped", "empty"):
        with server.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name}"))
        urls.append(postgres_url.replace("/postgres?", f"/{name}?"))
    file = tmp_path / "ratchet.dump"

    def shell(template: str, url: str) -> None:
        assert template in page
        words = [url if w == "DATABASE_URL" else w.replace("DATABASE_URL", url) for w in shlex.split(template)]
        done = subprocess.run([w.replace("FILE", str(file)) for w in words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    database = Database(urls[0])
    migrate.upgrade(database)
    add_job(database, "first")
    shell(backup.POSTGRES_BACKUP, urls[0])
    add_job(database, "later")
    for url in urls:
        shell(backup.POSTGRES_RESTORE, url)
        restored = Database(url)
        migrate.upgrade(restored)
        with restored.read() as session:
            assert list(session.scalars(sa.select(Job.name))) == ["first"]
        assert add_job(restored, "next")
        with pytest.raises(sa.exc.DBAPIError, match="only"), restored.write() as session:
            session.execute(sa.delete(Event))
        restored.dispose()
    database.dispose()
    server.dispose()
    with pytest.raises(backup.StartError, match="pg_dump"):
        backup.database_file(__main__.Settings(tmp_path, urls[0]))


def test_restore_check_without_a_database_says_so_and_creates_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "restore", "--check") == 2
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "ratchet.db").exists()
    assert command(tmp_path, "restore", "--check", "--database-url", "mysql://host/db") == 2
    assert "mysql" in capsys.readouterr().err
