"""The database's URL as people write it: what is no URL is refused without a word of it, since any part may be the password's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from ratchet_service.db.engine import Database, normalise_url, passwords, redacted_url

pytestmark = pytest.mark.processes

PARTS = ("alpha", "bravo", "charlie")
MALFORMED = [
    "postgresql://ratchet:alpha@bravo/charlie@database/ratchet",
    "postgresql+psycopg://ratchet:alpha@bravo:charlie@database/ratchet",
    "postgresql://ratchet:alpha@bravo?charlie@database/ratchet",
    "postgresql://ratchet:alpha@bravo#charlie@database/ratchet",
    "postgresql://ratchet:alpha",
    "postgresql:/ratchet:alpha-bravo@database",
    "postgresql://ratchet:x@database:alpha/ratchet",
    "alpha-bravo-charlie",
]


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed_database_url_is_refused_without_echo(url: str) -> None:
    with pytest.raises(ValueError, match="PGPASSWORD") as refused:
        Database(url)
    assert not any(part in str(refused.value) for part in PARTS) and "%40" in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [["ratchet_service", "reconcile"], ["ratchet_service", "token", "list"], ["ratchet_service.doctor"]],
    ids="-".join,
)
def test_commands_do_not_print_password_of_malformed_database_url(command: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "RATCHET_DATABASE_URL": MALFORMED[0]}
    argv = [sys.executable, "-m", *command, "--home", str(tmp_path / "home")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert not any(part in said for part in PARTS), said
    assert "PGPASSWORD" in said and "Traceback" not in said


def test_percent_encoded_database_password_is_accepted_and_hidden() -> None:
    password = "p@ss/w:rd#1?%&="
    url = make_url("postgresql://ratchet@database/ratchet").set(password=password)
    parsed = normalise_url(url.render_as_string(hide_password=False))
    assert parsed.password == password and parsed.host == "database"
    assert redacted_url(parsed) == "postgresql+psycopg://ratchet:***@database/ratchet"
    assert (
        redacted_url(normalise_url("postgresql://database/ratchet?password=alpha"))
        == "postgresql+psycopg://database/ratchet"
    )
    assert normalise_url("sqlite:////home/ann@work/b@se/ratchet.db").database == "/home/ann@work/b@se/ratchet.db"


def test_log_redaction_covers_url_password_and_pgpassword() -> None:
    environ = {"PGPASSWORD": "charlie"}
    assert passwords("postgresql://ratchet:alpha@database/ratchet?password=bravo", environ) == [
        "charlie",
        "alpha",
        "bravo",
    ]
    assert passwords(None, environ) == passwords("no url", environ) == ["charlie"] and passwords(None, {}) == []


def test_database_ping_of_silent_server_fails_within_health_timeout() -> None:
    """One that is gone without a word: for the pool's connections that takes libpq's ten seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = Database(f"postgresql://ratchet@127.0.0.1:{silent.getsockname()[1]}/ratchet")
        failed: list[BaseException] = []

        def ping() -> None:
            try:
                database.ping()
            except OperationalError as error:
                failed.append(error)

        thread = threading.Thread(target=ping, daemon=True)
        thread.start()
        thread.join(8)  # what docker-compose.yml gives /readyz
        assert failed
        database.dispose()
