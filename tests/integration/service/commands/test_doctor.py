"""What the doctor says of jobs, clocks and bounds on processes."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from ratchet_client.cli.doctor import machine, network
from ratchet_contract.doctor.findings import Finding
from ratchet_contract.phases import AttemptPhase
from ratchet_service.commands import doctor_jobs
from ratchet_service.commands.doctor import probe
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, Job
from tests.support.server import wait_for

JOB = "job-00000000{:04d}"


def add(database: Database, number: int, phase: AttemptPhase | None = None) -> str:
    job_id = JOB.format(number)
    with database.write() as session:
        now = utc_now()
        session.add(
            Job(
                id=job_id, name="j", spec={}, resolved={}, spec_digest="0", attempt=1 if phase else 0, created_at=now,
                updated_at=now,
            )
        )  # fmt: skip
        session.flush()
        if phase is not None:
            session.add(Attempt(job_id=job_id, number=1, phase=phase, report_token_hash="0", created_at=now))
    return job_id


def found(home: Path, database: Database) -> dict[str, Finding]:
    url = database.url.render_as_string(hide_password=False)
    return {one.name: one for one in probe(Settings(home, database_url=url))}


def test_doctor_warns_about_jobs_only_on_disk_or_only_in_the_database(tmp_path: Path, database: Database) -> None:
    known = add(database, 1, AttemptPhase.ENDED)
    (tmp_path / "jobs" / known / "attempts" / "0001").mkdir(parents=True)
    rows = found(tmp_path, database)
    assert (rows["jobs on disk"].status, rows["orphans"].status) == ("ok", "ok")
    (tmp_path / "jobs" / known / "attempts" / "0002").mkdir()
    (tmp_path / "jobs" / JOB.format(2) / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "jobs" / JOB.format(3) / "checkpoints").mkdir(parents=True)  # kept at its deletion
    gone, kept = add(database, 4, AttemptPhase.ENDED), add(database, 5, AttemptPhase.ENDED)
    (tmp_path / "jobs" / kept / "work").mkdir(parents=True)  # deleted behind a backup, but for its outputs
    (tmp_path / "jobs" / kept / "KEPT").write_text("{}")
    told = found(tmp_path, database)["jobs on disk"]
    assert (told.status, told.value) == ("warning", "4 differ")
    assert told.detail is not None and told.cure is not None
    for words in (
        f"not in the database: {JOB.format(2)}.",
        f"does not know: {known}.",
        f"not on the disk: {gone}, {kept}",
    ):
        assert words in told.detail, told.detail
    assert JOB.format(3) not in told.detail


def test_doctor_warns_about_orphan_processes_of_ended_attempts(tmp_path: Path, database: Database) -> None:
    alive, ended = add(database, 1, AttemptPhase.RUNNING), add(database, 2, AttemptPhase.ENDED)
    started = []
    try:
        for job_id in (alive, ended):
            folder = tmp_path / "jobs" / job_id / "attempts" / "0001"
            folder.mkdir(parents=True)
            env = {"RATCHET_ATTEMPT_DIR": str(folder)}
            started.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], env=env, stdin=subprocess.PIPE))
        told = found(tmp_path, database)["orphans"]
        assert (told.status, told.value) == ("warning", "1 attempt")
        assert told.detail is not None and f"{ended}/0001" in told.detail and alive not in told.detail
    finally:
        for process in started:
            process.communicate(b"\n", timeout=20)
    assert wait_for(lambda: found(tmp_path, database)["orphans"].status == "ok", "them to be gone", 20)


def test_doctor_checks_the_clock_of_the_database(database: Database, tmp_path: Path) -> None:
    rows = found(tmp_path, database)
    assert ("database clock" in rows) == (not database.is_sqlite)
    assert all(one.status == "ok" for name, one in rows.items() if name == "database clock")
    assert ("database log" in rows) == database.is_sqlite
    told = doctor_jobs.check_clock(datetime.now(UTC) - timedelta(seconds=9))
    assert (told.status, told.value[:2]) == ("warning", "-9")


def test_doctor_warns_about_a_low_cgroup_pids_limit(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    (tmp_path / "fs/a/b").mkdir(parents=True)
    (tmp_path / "fs/a/b/pids.max").write_text("max\n")
    assert machine.most_processes(tmp_path / "cgroup", tmp_path / "fs").status == "ok"
    (tmp_path / "fs/a/pids.max").write_text("100\n")
    told = machine.most_processes(tmp_path / "cgroup", tmp_path / "fs")
    assert (told.status, told.value) == ("warning", "100")


@pytest.mark.parametrize(
    ("url", "here", "status", "body", "verdict", "words"),
    [
        ("http://127.0.0.1:1", True, 200, {}, "ok", "this machine"),
        ("http://far:1", False, 200, {}, "warning", "plain HTTP"),
        ("https://far:1", False, 200, {}, "ok", "another machine"),
        (
            "https://far:1",
            False,
            503,
            {"code": "schema-newer", "detail": "revision 9"},
            "failed",
            "schema-newer: revision 9",
        ),
        ("https://far:1", False, 502, None, "failed", "status 502"),
    ],
)
def test_doctor_explains_the_readiness_state_of_the_service(
    url: str, here: bool, status: int, body: dict[str, str] | None, verdict: str, words: str
) -> None:
    answer = httpx.Response(status, json=body) if body is not None else httpx.Response(status, text="bad gateway")
    told = network._check_ready(url, answer, here)
    assert told.status == verdict and words in str(told.detail)


def test_doctor_does_not_compare_jobs_with_a_newer_database(tmp_path: Path, database: Database) -> None:
    import sqlalchemy as sa

    try:
        with database.write() as session:
            session.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        rows = found(tmp_path, database)
        assert rows["schema"].status == "failed" and "jobs on disk" not in rows
    finally:
        with database.write() as session:
            session.execute(
                sa.text("UPDATE alembic_version SET version_num = :head"), {"head": migrate.head_revision()}
            )
