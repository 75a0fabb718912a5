"""What the client makes of answers that an API server, or a proxy before it, cuts short or that are not what was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.config import incluster_config

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.kubernetes import client
from ratchet_service.launchers.kubernetes.client import Api, Refusal
from tests.support.kube_jobs import site
from tests.support.scripted_server import Reply, Script, serving

PATH = "/api/v1/namespaces/default/secrets"
CALLS: dict[str, Callable[[Api], object]] = {
    "get": lambda api: api.get(PATH),
    "log": lambda api: api.get_text(PATH),
    "create": lambda api: api.create(PATH, {}),
    "patch": lambda api: api.patch(PATH, {}),
    "delete": lambda api: api.delete(PATH),
    "stream": lambda api: api.stream(PATH, 0.0).__enter__(),
}


@contextmanager
def connected(script: Script, folder: Path, **user: str) -> Iterator[Api]:
    """The client of a server that answers by the script; ``user``: of the kubeconfig."""
    with serving(script) as server:
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server.url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": user or {"token": "t"}}],
        }  # fmt: skip
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(content))
        yield Api(site(kubeconfig=str(file)).settings)


def answering(status: int, body: bytes) -> Script:
    return lambda handler, number: (status, "application/json", body)


def cut(status: int, then: Callable[[], object] = lambda: None) -> Script:
    """Headers and a part of the body; ``then``: what happens before the connection is closed."""

    def answer(handler: BaseHTTPRequestHandler, number: int) -> Reply:
        handler.send_response(status)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        handler.wfile.write(b'{"kind": ')
        handler.wfile.flush()
        then()
        return 0, "", b""

    return answer


@pytest.mark.parametrize("call", CALLS)
def test_answer_cut_after_its_headers_raises_engine_unreachable(call: str, tmp_path: Path) -> None:
    script = cut(403 if call == "stream" else 200)
    with connected(script, tmp_path) as api, pytest.raises(EngineUnreachable, match="cut its response short"):
        CALLS[call](api)


@pytest.mark.parametrize("call", ["create", "stream"])
def test_answer_that_stops_after_its_headers_raises_engine_unreachable(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_READ_TIMEOUT", 0.3)
    over = threading.Event()
    with connected(cut(403 if call == "stream" else 200, lambda: over.wait(30)), tmp_path) as api:
        with pytest.raises(EngineUnreachable, match="cut its response short"):
            CALLS[call](api)
        over.set()


@pytest.mark.parametrize("body", [b'"x"', b"[]", b"null", b"7", b"<html>denied</html>", b"\xff", b'{"message": ["a"]}'])
def test_error_answer_that_is_no_status_object_is_a_refusal_with_its_text(body: bytes, tmp_path: Path) -> None:
    with connected(answering(403, body), tmp_path) as api, pytest.raises(Refusal) as refused:
        api.create(PATH, {})
    assert (refused.value.code, refused.value.reason) == (403, "")
    assert refused.value.message in (body.decode(errors="replace"), "['a']")


@pytest.mark.parametrize("body", [b"", b"<html>log in</html>", b"\xff", b'"x"', b"[]", b"null"])
@pytest.mark.parametrize("call", ["get", "create", "patch"])
def test_success_answer_that_is_no_object_raises_engine_unreachable(call: str, body: bytes, tmp_path: Path) -> None:
    with connected(answering(200, body), tmp_path) as api, pytest.raises(EngineUnreachable, match="not a JSON object"):
        CALLS[call](api)


@pytest.mark.parametrize("fault", ["empty", "missing"])
def test_token_file_that_cannot_be_read_raises_engine_unreachable_until_it_can(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a node replaces the service account's token, which is read again every minute."""
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("t")
    authority.write_text("not used over HTTP")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    load = incluster_config.InClusterConfigLoader._read_token_file

    def load_for_one_request(loader: Any) -> None:
        load(loader)
        loader.token_expires_at = datetime.min

    monkeypatch.setattr(incluster_config.InClusterConfigLoader, "_read_token_file", load_for_one_request)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "9")
    api = Api(site().settings)

    def said() -> str:
        with pytest.raises(EngineUnreachable) as error:
            api.get(PATH)
        return error.value.detail

    assert "does not answer at https://127.0.0.1:9" in said()
    token.unlink() if fault == "missing" else token.write_text("")
    assert "credentials" in said() and ("empty" if fault == "empty" else str(token)) in said()
    token.write_text("t")
    assert "does not answer at https://127.0.0.1:9" in said()
