"""Where the service listens and who may come in: what it refuses at its start, what it says, and what gets through."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet_client.resources.client import RatchetClient
from ratchet_contract.api.roles import Role
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, Desired
from ratchet_contract.protocol.messages import AgentReport, LaunchFile
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.__main__ import main
from ratchet_service.config.network import Listening
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.db.models import ApiToken
from ratchet_service.errors import StartError
from ratchet_service.launchers.launch_file import build_launch_file as made_by_the_service
from ratchet_worker.agent.service_client import Fenced, ServiceLink, Unreachable
from tests.integration.service.commands.test_serve import Running, running
from tests.support.api import SPEC
from tests.support.team import problem_status_and_code
from tests.support.tokens import bearer

__all__ = ["running"]


def launch_file(home: Path, **changes: Any) -> LaunchFile:
    """Of an attempt that the service does not know."""
    resolved = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="/usr/bin/python3")
    arguments = (HomePaths(home), "job-000000000000", 1, parse_spec(SPEC), resolved, ())
    return made_by_the_service(*arguments, token="t", desired=Desired.RUN).model_copy(update=changes)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Of an authority of its own, for ``name`` and no other."""
    cert, key = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", "1", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}",
               "-keyout", str(key), "-out", str(cert)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--tls-cert and --tls-key, or --insecure-http"),
        (["--host", "::"], "--insecure-http"),
        (["--tls-cert", "a.crt"], "both --tls-cert and --tls-key"),
        (["--tls-cert", "a.crt", "--tls-key", "a.key"], "--url https://"),
        (["--tls-cert", "a.crt", "--tls-key", "a.key", "--url", "http://x:1"], "not to --url http://x:1"),
        (["--tls-cert", "a.crt", "--tls-key", "a.key", "--url", "https://x:1"], "cannot be used"),
        (["--tls-cert", "a.crt", "--tls-key", "a.key", "--insecure-http"], "set only one"),
        (["--url", "ratchet.example.com"], "must be like"),
        (["--url", "http://user:word@host"], "must be like"),
        (["--url", "http://[::1"], "must be like"),
        (["--ca-file", "/nowhere.pem"], "--ca-file /nowhere.pem cannot be used"),
        (["--ca-file", "/dev/null"], "--ca-file /dev/null cannot be used"),
    ],
)
def test_serve_with_insecure_or_invalid_options_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    home = tmp_path / "home"
    assert main(["serve", "--home", str(home), "--port", "0", *options]) == 2
    assert words in capsys.readouterr().err
    assert not home.exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RATCHET_AUTH", "tokens", "must be auto or token, not 'tokens' (--auth, RATCHET_AUTH)"),
        ("RATCHET_LOG_FORMAT", "jsn", "must be text or json, not 'jsn' (--log-format, RATCHET_LOG_FORMAT)"),
        ("RATCHET_BOUNDS", "points=x", "'points=x' is not a limit"),
        ("RATCHET_BOUNDS", "points=1", "points must be at least 2, not 1 (--bounds, RATCHET_BOUNDS)"),
        ("RATCHET_RUN_AS_LIMITS", "threads=1", "(--run-as-limits, RATCHET_RUN_AS_LIMITS)"),
    ],
)
def test_serve_with_an_invalid_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variable: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--home", str(tmp_path), "--port", "0"])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "embedded", "needed"),
    [
        (Listening(), True, False),
        (Listening(host="::1"), True, False),
        (Listening(url="http://localhost:1"), True, False),
        (Listening(), False, True),
        (Listening(auth="token"), True, True),
        (Listening(host="0.0.0.0", insecure_http=True), True, True),
        (Listening(url="https://ratchet.example.com"), True, True),
        (Listening(url="http://api:8000"), True, True),
    ],
)
def test_tokens_are_required_except_for_the_embedded_loopback_default(
    listen: Listening, embedded: bool, needed: bool
) -> None:
    listen.check()
    assert listen.requires_tokens(embedded) == needed


def test_service_without_tokens_refuses_foreign_origins_and_proxies(
    running: Running,
) -> None:
    process = running.start("serve", "--port", "0")
    url = running.url(process)
    port = url.rpartition(":")[2]
    with httpx.Client(base_url=url) as client:
        assert client.get("/v1/whoami").json()["role"] == "admin"
        strange: list[dict[str, str]] = [
            {"Host": "evil.example.com"},
            {"Host": f"127.0.0.1.evil.example.com:{port}"},
            {"Host": "192.168.0.7"},
            {"Origin": "https://evil.example.com"},
            {"Origin": "null"},
            {"Origin": "http://127.0.0.1:1"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"X-Forwarded-For": "10.0.0.7"},
            {"Forwarded": "for=10.0.0.7"},
        ]
        for headers in strange:
            for method, path in (
                ("GET", "/v1/jobs"),
                ("POST", "/v1/jobs/job-000000000000/cancel"),
                ("GET", "/openapi.json"),
            ):
                answer = client.request(method, path, headers=headers)
                assert problem_status_and_code(answer) == (403, "foreign-origin"), f"{headers} {path}"
                assert answer.headers["ratchet-protocol"]
        for headers in (
            {"Host": f"localhost:{port}"},
            {"Host": f"[::1]:{port}"},
            {"Origin": url},
            {"Sec-Fetch-Site": "none"},
        ):
            assert client.get("/v1/jobs", headers=headers).status_code == 200, headers
    process.terminate()
    assert process.wait(30) == 0
    assert "no token needed: any process on this machine that connects to" in process.communicate()[1]


def test_first_token_created_by_the_service_command_grants_access(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(running.home)]
    process = running.start("serve", "--port", "0", "--auth", "token")
    url = running.url(process)
    assert problem_status_and_code(httpx.get(f"{url}/v1/jobs")) == (401, "token-missing")
    assert main(["token", "create", *home, "--owner", "ann", "--role", "admin", "--expires", "2h"]) == 0
    text = capsys.readouterr().out.strip()
    with RatchetClient(url, token=text) as client:
        assert list(client.jobs()) == []
    headers = bearer(text) | {"Host": "ratchet.example.com", "X-Forwarded-For": "10.0.0.7"}
    assert httpx.get(f"{url}/v1/jobs", headers=headers).status_code == 200  # a token comes with nothing by itself
    assert main(["token", "list", *home]) == 0
    shown = capsys.readouterr().out
    assert "ann" in shown and "admin" in shown and text[12:] not in shown
    assert main(["token", "revoke", *home, shown.split()[0]]) == 0
    assert problem_status_and_code(httpx.get(f"{url}/v1/jobs", headers=bearer(text))) == (401, "token-revoked")
    assert main(["token", "revoke", *home, "nonsense"]) == 2
    process.terminate()
    assert process.wait(30) == 0
    log = process.communicate()[1]
    assert "tokens are needed" in log and "there is no token yet" in log and "no token needed" not in log
    assert text not in log


@pytest.mark.parametrize("wrong", [["--owner", "Ann B"], ["--owner", "ann", "--expires", "forever"],
                                   ["--owner", "ann", "--role", "root"], ["--owner", "ann", "--scope", "all"], []])  # fmt: skip
def test_token_create_command_refuses_invalid_arguments(tmp_path: Path, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["token", "create", "--home", str(tmp_path / "home"), *wrong])
    assert not (tmp_path / "home").exists()


def test_token_create_command_supports_no_expiry_and_reduced_scopes(tmp_path: Path) -> None:
    home = ["--home", str(tmp_path)]
    database = Database(sqlite_url(Settings(tmp_path).paths.database))
    migrate.upgrade(database)
    database.dispose()
    assert main(["token", "create", *home, "--owner", "ann", "--role", "viewer", "--scope", "jobs:write"]) == 2
    assert main(["token", "create", *home, "--owner", "ann", "--expires", "never", "--scope", "jobs:read"]) == 0
    database = Database(sqlite_url(Settings(tmp_path).paths.database))
    with database.read() as session:
        (row,) = session.query(ApiToken).all()
        assert (row.expires_at, row.scopes, row.role) == (None, ["jobs:read"], Role.SUBMITTER)
    database.dispose()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_tls_certificates_are_verified_by_clients_and_agents(
    running: Running, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path_factory.mktemp("tls"), "localhost")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"https://localhost:{port}"
    options = ("--port", str(port), "--tls-cert", str(cert), "--tls-key", str(key), "--url", url)
    process = running.start("serve", *options, "--ca-file", str(cert))
    assert running.url(process) == url
    found = json.loads((running.home / "service.json").read_text())
    assert found["url"] == url
    assert httpx.get(f"{url}/healthz", verify=ssl.create_default_context(cafile=str(cert))).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")
    with RatchetClient(home=running.home) as client:  # by what the service left beside its address
        assert client.ready()
    with RatchetClient(url, retry_for=0) as client:
        assert not client.ready()
    monkeypatch.setenv("RATCHET_CA_FILE", str(cert))
    with RatchetClient(url) as client:
        assert client.ready()

    assert asked(launch_file(running.home)) is Fenced  # an answer of the service: it knows no such attempt
    elsewhere: dict[str, Any] = {"service_file": str(running.home / "no" / "service.json"), "service_url": url}
    assert asked(launch_file(running.home, **elsewhere, service_ca=cert.read_text())) is Fenced
    assert asked(launch_file(running.home, **elsewhere, service_ca=None)) is Unreachable  # nobody vouches for it
    other = elsewhere | {"service_url": f"https://127.0.0.1:{port}", "service_ca": cert.read_text()}
    assert asked(launch_file(running.home, **other)) is Unreachable  # the certificate is for another name


def asked(launch: LaunchFile) -> type[Exception]:
    """What becomes of a report that is sent until its agent believes the answer."""
    link = ServiceLink(launch)
    report = AgentReport(job_id=launch.job_id, attempt=launch.attempt, phase=AttemptPhase.RUNNING)
    error: Exception = AssertionError()
    try:
        for _ in range(5):
            try:
                link.post(report, 5.0)
            except (Unreachable, Fenced) as caught:
                error = caught
            if isinstance(error, Fenced) or "certificate" in str(error).lower():
                break
            time.sleep(0.15)  # believed only when it insists, over a while
    finally:
        link._close()
    return type(error)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_client_with_tls_1_1_is_refused_for_its_version(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "localhost")
    server = Listening(tls_cert=cert, tls_key=key, url="https://localhost").tls_context()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.set_ciphers("DEFAULT:@SECLEVEL=0")  # else OpenSSL itself would not use this version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    hello = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        old.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    assert server is not None
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        server.wrap_bio(hello, ssl.MemoryBIO(), server_side=True).do_handshake()


def test_unusable_tls_files_are_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nonsense")
    listen = Listening(tls_cert=tmp_path / "bad.pem", tls_key=tmp_path / "bad.pem", url="https://x")
    with pytest.raises(StartError, match=r"bad\.pem"):
        listen.tls_context()
    with pytest.raises(StartError, match=r"bad\.pem"):
        Listening(ca_file=tmp_path / "bad.pem").check()
