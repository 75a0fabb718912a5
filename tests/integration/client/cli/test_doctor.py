"""``ratchet doctor`` on machines that lack something: the complaint names it and its cure, and nothing changes."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import torch

from ratchet_client.cli.doctor import probes
from ratchet_client.cli.doctor.network import service
from ratchet_client.cli.shared.options import Settings as ClientSettings
from ratchet_contract import env_vars
from ratchet_contract.doctor.findings import Finding
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import ServiceFile
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.commands.doctor import probe
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.migrate import upgrade
from tests.support.cli import EXECUTABLE
from tests.support.doctor import (
    BROKEN_TORCH,
    MISSING_TORCH,
    NO_PYTHON,
    NOTHING_TESTED,
    OLD_TORCH,
    Doctor,
    fake_service,
    file_digests,
)  # fmt: skip
from tests.support.server import Server, token_required_server
from tests.support.small_disk import on_small_disk

__all__ = ["token_required_server"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "place" / "home"


@pytest.fixture
def doctor(home: Path) -> Doctor:
    return Doctor(home, home.parent)


def migrated(home: Path) -> Path:
    """The database of a run directory whose service has ended."""
    home.mkdir(parents=True, exist_ok=True)
    path = HomePaths(home).database
    database = Database(sqlite_url(path))
    upgrade(database)
    database.dispose()
    return path


# --- the interpreter that trains -----------------------------------------------------------------------------------------


def shim(tmp_path: Path, text: str, module: str = "torch") -> str:
    """A directory in which ``import torch`` finds this text."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / f"{module}.py").write_text(text)
    return str(tmp_path / "shim")


def test_doctor_without_torch_fails_torch_row_and_proves_no_exactness(doctor: Doctor, tmp_path: Path) -> None:
    """No service is started for that."""
    doctor.environment["PYTHONPATH"] = shim(tmp_path, MISSING_TORCH)
    rows = doctor.rows("--exactness", "--hook", "powerSGD", python=None)
    assert (rows["torch"]["status"], rows["torch"]["value"]) == ("failed", "missing")
    assert "pip install 'ratchet-train[worker]'" in rows["torch"]["cure"]
    assert rows["extra worker"]["status"] == "ok" and "gloo" not in rows
    assert (
        rows["exactness powerSGD cpu"]["value"] == "not proved" and "torch" in rows["exactness powerSGD cpu"]["detail"]
    )


@pytest.mark.parametrize(
    ("torch", "value", "said", "cure"),
    [
        (OLD_TORCH, "2.8.1+cpu", "needs torch 2.9 or newer", "pip install 'torch>=2.9'"),
        (BROKEN_TORCH, "broken", "libtorch_cpu.so", "--force-reinstall"),
    ],
    ids=["old", "broken"],
)
def test_doctor_fails_torch_row_for_old_or_broken_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, value: str, said: str, cure: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", shim(tmp_path, torch))
    row = {f.name: f for f in trains(sys.executable)}["torch"]
    assert (row.status, row.value) == ("failed", value)
    assert said in str(row.detail) and cure in str(row.cure)


def test_doctor_warns_about_an_untested_torch_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", shim(tmp_path, NOTHING_TESTED, "sitecustomize"))
    rows = {f.name: f for f in trains(sys.executable)}
    row = rows["torch"]
    assert (row.status, row.value) == ("warning", torch.__version__)
    assert "not tested with this Ratchet" in str(row.detail) and "--exactness" in str(row.cure)
    assert rows["back ends"].status == "ok"


def trains(python: str) -> list[Finding]:
    with probes.worker(python) as answer:
        return answer().findings


def test_doctor_fails_for_an_interpreter_without_ratchet_or_missing(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (row,) = trains(str(bare))
    assert (row.status, row.value) == ("failed", "without Ratchet") and f"{bare} -m pip install" in str(row.cure)
    (row,) = trains(str(tmp_path / "nothing"))
    assert (row.status, row.value) == ("failed", "not found") and "--python" in str(row.cure)


# --- disk ----------------------------------------------------------------------------------------------------------------


def test_doctor_fails_run_directory_that_cannot_be_written(doctor: Doctor) -> None:
    row = doctor.rows("--home", "/proc/ratchet")["run directory"]
    assert row["status"] == "failed" and "/proc" in row["detail"] and "--home DIR" in row["cure"]


def test_doctor_warns_about_a_full_disk_and_leaves_no_file(tmp_path: Path) -> None:
    command = f"{EXECUTABLE} doctor --json --python {NO_PYTHON} --home {tmp_path}/home; ls -A {tmp_path} >&2"
    done = on_small_disk(tmp_path, "1m", command, timeout=60)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["file system"]["value"] == "tmpfs" and rows["disk space"]["status"] == "warning"
    assert rows["disk speed"]["value"] == "no space" and "free space" in rows["disk speed"]["cure"]
    assert rows["file locks"]["status"] == rows["rename"]["status"] == "ok"
    assert "ratchet" not in done.stderr, "something was left behind"


# --- database ------------------------------------------------------------------------------------------------------------


def test_doctor_fails_schema_of_a_newer_ratchet_and_accepts_the_current_one(doctor: Doctor, home: Path) -> None:
    path = migrated(home)
    before = file_digests(home)
    found = {f.name: f for f in probe(Settings(home))}
    schema = found["schema"]
    assert {f.status for f in found.values()} == {"ok"} and "own" in str(schema.detail)
    assert file_digests(home) == before
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    before = file_digests(home)
    row = doctor.rows()["schema"]
    assert (row["status"], row["value"]) == ("failed", "9999") and "pip install --upgrade" in row["cure"]
    assert file_digests(home) == before


def test_doctor_fails_a_damaged_database_and_leaves_the_file_unchanged(home: Path) -> None:
    path = migrated(home)
    data = bytearray(path.read_bytes())
    data[4096:12288] = os.urandom(8192)
    path.write_bytes(data)
    (row,) = probe(Settings(home))
    assert (row.status, row.value) == ("failed", "damaged") and "keep a copy" in str(row.cure)
    assert path.read_bytes() == data


def test_doctor_checks_postgresql_schema_rights_and_connection(doctor: Doctor, home: Path, postgres_url: str) -> None:
    """Empty, with the schema, through a role that may not change it; and a server that is not there."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("CREATE DATABASE doctor")
        admin.execute("CREATE ROLE weak LOGIN")
    try:
        url = postgres_url.replace("/postgres?", "/doctor?")
        found = {f.name: f for f in probe(Settings(home, url))}
        assert found["database"].value.startswith("PostgreSQL ") and found["schema"].value == "none yet"
        database = Database(url)
        upgrade(database)
        database.dispose()
        found = {f.name: f for f in probe(Settings(home, url))}
        assert found["database rights"].status == "ok" and "own" in str(found["schema"].detail)
        weak = {f.name: f for f in probe(Settings(home, url.replace("postgres@", "weak@")))}
        assert weak["database rights"].status == "failed" and "GRANT CREATE" in str(weak["database rights"].cure)
        doctor.environment["RATCHET_DATABASE_URL"] = "postgresql://u:secret@127.0.0.1:1/x"
        row = doctor.rows()["database"]
        assert (row["status"], row["value"]) == ("failed", "no connection") and "secret" not in json.dumps(row)
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute("DROP DATABASE doctor WITH (FORCE)")
            admin.execute("DROP ROLE weak")


# --- service -------------------------------------------------------------------------------------------------------------


def test_doctor_warns_about_clock_skew_and_other_version_of_the_service(doctor: Doctor) -> None:
    with fake_service(ahead=3600.0, version="9.9.9", ready=503) as url:
        rows = by_server(doctor, url)
    assert rows["service clock"]["status"] == "warning" and rows["service clock"]["value"].startswith("+3")
    assert "set-ntp" in rows["service clock"]["cure"]
    assert (rows["service version"]["status"], rows["service version"]["value"]) == ("warning", "9.9.9")
    assert rows["service"]["value"] == "not ready"


def by_server(doctor: Doctor, url: str) -> dict[str, dict[str, str]]:
    done = doctor.cli("--server", url, "doctor", "--json", "--python", NO_PYTHON, expect=8)
    return {row["name"]: row for row in done.data}


def test_doctor_fails_other_protocol_and_notes_a_killed_service(home: Path) -> None:
    home.mkdir(parents=True)
    with fake_service() as url:
        described = ServiceFile(protocol=99, url=url, pid=os.getpid(), started_at="2026-01-01T00:00:00Z")
        HomePaths(home).service_file.write_text(described.model_dump_json())
        (row,) = service(ClientSettings(None, home))
        assert (row.name, row.status) == ("service version", "failed")
        assert "protocol 99" in str(row.detail) and "ratchet serve" in str(row.cure)
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead = described.model_copy(update={"pid": gone.pid, "protocol": PROTOCOL_VERSION})
    HomePaths(home).service_file.write_text(dead.model_dump_json())
    (row,) = service(ClientSettings(None, home))
    assert (row.status, row.value) == ("ok", "not running") and "was killed" in str(row.detail)


@pytest.mark.parametrize(
    ("standby", "status", "value", "said", "cure"),
    [
        ("off", "ok", "off", "`--standby on`", None),
        ("processes=3,seconds=60,memory=1Mi", "ok", "on, none parked", "at most 3 of 1 MiB, each for 60 s", None),
        (
            "memory=500Ti",
            "warning",
            "on, none parked",
            "less than twice the memory",
            "lower `memory` of --standby",
        ),
    ],
)
def test_doctor_shows_bounds_of_parked_agents_and_why_none_can_be_parked(
    doctor: Doctor, home: Path, standby: str, status: str, value: str, said: str, cure: str | None
) -> None:
    server = Server(home, variables={env_vars.STANDBY: standby})
    try:
        server.start()
        row = doctor.rows()["parked agents"]
    finally:
        server.stop()
    assert (row["status"], row["value"]) == (status, value) and said in row["detail"]
    assert cure is None or cure in row["cure"]


def test_doctor_names_the_token_that_it_lacks_to_see_parked_agents(
    doctor: Doctor, token_required_server: Server
) -> None:
    chosen = ("--home", str(token_required_server.home))
    row = doctor.rows(*chosen)["parked agents"]
    assert (row["status"], row["value"]) == ("not-checked", "unknown") and "RATCHET_TOKEN" in row["cure"]
    token_required_server.use_admin_token()
    doctor.environment["RATCHET_TOKEN"] = str(token_required_server.token)
    row = doctor.rows(*chosen)["parked agents"]
    assert (row["status"], row["value"]) == ("ok", "none") and "starts no agents" in row["detail"]


def test_doctor_fails_variables_with_which_no_service_starts(doctor: Doctor) -> None:
    wrong = {"RATCHET_STANDBY": "seconds=5min", "RATCHET_BOUNDS": "seconds=5", "RATCHET_RUN_AS_LIMITS": "file_size=1"}
    doctor.environment |= wrong
    rows = doctor.rows()
    for name, value in wrong.items():
        row = rows[name]
        assert row["status"] == "failed" and value in row["detail"] and f"correct {name}" in row["cure"]
    doctor.environment |= {"RATCHET_STANDBY": "seconds=5m", "RATCHET_BOUNDS": "", "RATCHET_RUN_AS_LIMITS": ""}
    assert not wrong.keys() & doctor.rows().keys()


# --- how it is shown -----------------------------------------------------------------------------------------------------


def test_doctor_on_a_terminal_prints_coloured_table_with_cures_below(doctor: Doctor) -> None:
    controller, terminal = pty.openpty()
    environ = doctor.environment | {"TERM": "xterm-256color", "http_proxy": "http://127.0.0.1:9"}
    process = subprocess.Popen(
        [str(EXECUTABLE), "doctor", "--python", NO_PYTHON], cwd=doctor.cli.cwd, env=environ, stdin=terminal, stdout=terminal,
        stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:  # how Linux says that the last writer has gone
        pass
    finally:
        os.close(controller)
    assert process.wait(30) == 8
    text = shown.decode()
    assert "\x1b[31mfailed" in text and "\x1b[32mok" in text
    assert "does not apply to Ratchet's own requests" in text
    table, _, cures = text.partition("worker python: ")
    assert table and "pip install" in cures and "1 failed" in cures
