"""Which server a client talks to and which token it shows there; and the rules of the configuration file."""

from __future__ import annotations

import json
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet_client.http.config_file import ConfigFile, config_path, normalise_url, read_config, write_config
from ratchet_client.http.discovery import find_target
from ratchet_client.http.errors import ServiceUnreachable
from ratchet_client.http.transport import TokenInClearWarning, Transport
from ratchet_client.resources.client import RatchetClient
from ratchet_contract.errors import Refused
from ratchet_contract.processes import service_pointers
from tests.support.scripted_server import HOOK, Server, ok, serving

PAGE = {"items": [HOOK]}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own, with nothing set; the configuration file's path."""
    for name in ("RATCHET_SERVER", "RATCHET_TOKEN", "RATCHET_HOME"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "conf" / "config.json"
    monkeypatch.setenv("RATCHET_CONFIG", str(path))
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(lambda *_: ok(PAGE)) as server:
        yield server


def sent(server: Server) -> str | None:
    """The Authorization header of the last request."""
    headers = {k.lower(): v for k, v in server.requests[-1][2].items()}
    return headers.get("authorization")


def announce(home: Path, url: str) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "service.json").write_text(json.dumps({"url": url, "pid": 1, "started_at": "2026-01-01T00:00:00Z"}))


def test_server_precedence_is_option_variable_file_run_directory(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path / ".ratchet", "http://127.0.0.1:1")
    announce(tmp_path / "other", "http://127.0.0.1:2")
    assert find_target().url() == "http://127.0.0.1:1"
    write_config(config, ConfigFile(server="http://file"))
    assert find_target().server is not None and find_target().url() == "http://file"
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path / "other"))
    assert find_target().url() == "http://127.0.0.1:2", "a variable comes before the file, a run directory's too"
    monkeypatch.setenv("RATCHET_SERVER", "http://variable")
    assert find_target().url() == "http://variable"
    assert find_target(home=tmp_path / ".ratchet").url() == "http://127.0.0.1:1"
    assert find_target(server="http://Option:80/").url() == "http://option"


def test_stored_token_is_sent_only_to_matching_server(
    config: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(config, ConfigFile(server=server.url, token="stored-secret", token_server=normalise_url(server.url)))
    with RatchetClient() as client:
        client.hooks()
    assert sent(server) == "Bearer stored-secret"
    with serving(lambda *_: ok(PAGE)) as other:
        announce(tmp_path / "home", other.url)
        for elsewhere in (RatchetClient(other.url), RatchetClient(home=tmp_path / "home")):
            with elsewhere:
                elsewhere.hooks()
            assert sent(other) is None
        monkeypatch.setenv("RATCHET_TOKEN", "from-variable")
        with RatchetClient(other.url) as client:
            client.hooks()
        assert sent(other) == "Bearer from-variable"
    with RatchetClient(token="given") as client:
        client.hooks()
    assert sent(server) == "Bearer given"


def test_token_is_not_sent_to_remote_server_from_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write into the current directory could name a server there."""
    monkeypatch.setenv("RATCHET_TOKEN", "secret")
    announce(tmp_path / ".ratchet", "https://elsewhere.example")
    target = find_target()
    assert target.token_for(target.url()) is None
    assert target.token_for("http://127.0.0.1:8000") == "secret"
    assert find_target(server="https://elsewhere.example").token_for("https://elsewhere.example") == "secret"


def test_token_over_plain_http_to_remote_host_warns_once() -> None:
    transport = Transport("http://192.0.2.1:8000", None, timeout=0.01, retry_for=0.0, token="secret")
    with pytest.warns(TokenInClearWarning, match="https") as told:
        warnings.simplefilter("default")
        for _ in range(3):
            transport._authorization("http://192.0.2.1:8000")
    assert len(told) == 1 and "secret" not in str(told[0].message)
    transport.close()
    local = Transport("http://127.0.0.1:9", None, timeout=0.01, retry_for=0.0, token="secret")
    assert local._authorization("http://127.0.0.1:9") == {"Authorization": "Bearer secret"}


def test_config_file_is_replaced_atomically_with_mode_0600(config: Path) -> None:
    write_config(config, ConfigFile(server="http://a"))
    config.chmod(0o644)
    write_config(config, ConfigFile(server="http://a", token="t", token_server="http://a"))
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert read_config(config) == ConfigFile("http://a", "t", "http://a")
    assert list(config.parent.iterdir()) == [config], "no half-written file is left"


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("{", 0o600, "not JSON"),
        ("[]", 0o600, "not a JSON object"),
        ('{"sever": "http://a"}', 0o600, "unknown key 'sever'"),
        ('{"server": 3}', 0o600, "no string under 'server'"),
        ('{"token": "t"}', 0o600, "together"),
        ('{"token": "t", "token_server": "http://a"}', 0o640, "chmod 600"),
        ('{"token": "t", "token_server": "http://a"}', 0o604, "chmod 600"),
    ],
)
def test_invalid_or_unsafe_config_file_is_refused_with_cure(config: Path, text: str, mode: int, says: str) -> None:
    config.parent.mkdir()
    config.write_text(text)
    config.chmod(mode)
    with pytest.raises(Refused, match=says) as refused:
        find_target()
    assert str(config) in refused.value.detail


def test_unreadable_config_file_is_refused(config: Path) -> None:
    config.mkdir(parents=True)  # a directory: nobody can read it as a file, not even root
    with pytest.raises(Refused, match="cannot be read"):
        find_target()


def test_config_path_follows_xdg_config_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RATCHET_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert config_path() == tmp_path / ".config" / "ratchet" / "config.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    assert config_path() == tmp_path / "x" / "ratchet" / "config.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_path() == tmp_path / ".config" / "ratchet" / "config.json"


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://Host/", "http://host"),
        ("https://host:443/ratchet/", "https://host/ratchet"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_server_url_is_normalised(url: str, same: str) -> None:
    assert normalise_url(url) == same


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://u:p@host", "http://host:port", "http://h?x"]
)
def test_invalid_server_url_is_refused(url: str) -> None:
    with pytest.raises(Refused):
        normalise_url(url)


def test_no_running_service_error_names_killed_service_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ratchet serve` alone would make a second, empty one in the directory where the command was typed."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = tmp_path / "my project" / ".ratchet"
    announce(home, "http://127.0.0.1:1")
    pointer = service_pointers.create_pointer(home)
    pointer.write_text(pointer.read_text().replace('"start_time":', '"start_time":1'))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ServiceUnreachable, match="was killed") as told:
        find_target().url()
    assert f"`ratchet serve --home '{home}'` starts it again" in told.value.detail
    (home / "service.json").unlink()
    with pytest.raises(ServiceUnreachable, match="start it with `ratchet serve`, or"):
        find_target().url()
