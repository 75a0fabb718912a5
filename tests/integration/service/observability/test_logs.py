"""Logs as JSON: what they are about, and what they never hold."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.api.roles import Role
from ratchet_service.db import queries
from ratchet_service.db.engine import Database, passwords
from ratchet_service.observability import logging as log_format
from tests.support.api import Api
from tests.support.control_plane import Plane
from tests.support.server import wait_for
from tests.support.tokens import make_token

SECRET = "hunter2secret"


class Log:
    def __init__(self) -> None:
        self.stream = io.StringIO()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def of(self, **fields: Any) -> list[dict[str, Any]]:
        return [line for line in self.lines() if fields.items() <= line.items()]


@pytest.fixture
def log() -> Iterator[Log]:
    """What the service writes while it runs with ``--log-format json``."""
    made, root = Log(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    log_format.configure("info", "json", [SECRET], made.stream)
    yield made
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_failing_request_is_logged_as_one_object_with_job_and_incident(
    api: Api, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(f"over\ntwo lines, postgresql://me:{SECRET}@db/x and Bearer abc.def")

    monkeypatch.setattr(queries, "find_job", fail)
    monkeypatch.setattr("ratchet_service.usecases.job_history.find_attempt", fail)
    job_id = "job-000000000abc"
    answer = api.client.get(f"/v1/jobs/{job_id}/attempts/7", headers={"X-Request-ID": "my-request.1"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "my-request.1"
    (line,) = log.of(level="error")
    assert (line["job_id"], line["attempt"], line["request_id"]) == (job_id, 7, "my-request.1")
    assert line["incident"] in answer.json()["detail"]
    assert "RuntimeError: over" in line["exception"] and SECRET not in log.stream.getvalue()
    assert "Bearer ***" in line["exception"]
    assert line["time"].endswith("Z") and line["logger"] == "ratchet.service"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "naïve\n"])
def test_request_without_a_valid_x_request_id_gets_a_generated_one(api: Api, given: str) -> None:
    headers = {"X-Request-ID": given.encode("latin-1").replace(b"\n", b"")} if given else {}
    told = api.client.get("/healthz", headers=headers).headers["x-request-id"]
    assert len(told) == 16 and told != given
    assert api.client.get("/healthz", headers=headers).headers["x-request-id"] != told


def test_reconciler_log_lines_carry_job_id_and_attempt(tmp_path: Path, database: Database, log: Log) -> None:
    plane = Plane(tmp_path, database)
    try:
        plane.serve_api()
        plane.start_reconciler()
        job_id = plane.submit({"steps": 5})
        wait_for(lambda: log.of(job_id=job_id, attempt=1, logger="ratchet_service.reconciler.loop"), "its lines", 30)
        wait_for(
            lambda: any("ended with completed" in line["message"] for line in log.of(job_id=job_id)), "its end", 30
        )
    finally:
        plane.close()
    assert all(isinstance(line["attempt"], int) for line in log.of(job_id=job_id))


def test_log_lines_mask_tokens_and_passwords(database: Database, log: Log) -> None:
    token = make_token(database, "local", Role.ADMIN)
    for url in (f"postgresql://u:{SECRET}@h/d", f"postgresql://h/d?password={SECRET}"):
        assert passwords(url, {}) == [SECRET]
    logger = logging.getLogger("somebody.elses")
    logger.info("token %s, Authorization: Bearer %s", token, token)
    logger.warning("could not connect to postgresql://someone:other-password@host/d with %s", SECRET)
    text = log.stream.getvalue()
    assert token not in text and token.rpartition("_")[2] not in text
    assert SECRET not in text and "other-password" not in text
    assert "someone:***@host" in text
    plain = log_format.Text([SECRET])
    record = logging.LogRecord("a", logging.INFO, "f", 1, f"{token} {SECRET}", None, None)
    assert token not in plain.format(record) and SECRET not in plain.format(record)


def test_database_errors_show_no_row_values(database: Database) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError

    with pytest.raises(DBAPIError) as caught, database.write() as session:
        session.execute(text("INSERT INTO nothing (x) VALUES (:x)"), {"x": SECRET})
    assert SECRET not in str(caught.value)


def test_log_format_json_covers_warnings_of_libraries(tmp_path: Path) -> None:
    """What uvicorn, Alembic and ``warnings`` say, too; the port is one that nobody may have."""
    command = [sys.executable, "-m", "ratchet_service", "reconcile", "--home", str(tmp_path), "--log-format", "json"]
    script = "import sys, warnings; from ratchet_service import __main__ as m; from ratchet_service.commands import serve as s\n"
    script += "s.reconcile = lambda *a: warnings.warn('odd')\nsys.exit(m.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, *command[3:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["py.warnings"] and "odd" in lines[0]["message"]
