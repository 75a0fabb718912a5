"""An export that arrives cut short, altered or with strange files in it leaves nothing behind."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.resources.client import RatchetClient
from ratchet_client.resources.export_download import ExportFormat
from ratchet_contract.errors import RatchetError, Refused
from tests.support.cli import EXECUTABLE
from tests.support.scripted_server import Reply, serving
from tests.support.server import wait_for

pytestmark = pytest.mark.processes


def _tar(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
    return out.getvalue()


def _fetch(
    target: Path,
    body: bytes,
    *,
    form: ExportFormat = "safetensors",
    told: bytes | None = None,
    cut: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[str]:
    digest = base64.b64encode(hashlib.sha256(body if told is None else told).digest()).decode()

    def script(handler: BaseHTTPRequestHandler, number: int) -> Reply:
        meanwhile()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Repr-Digest", f"sha-256=:{digest}:")
        handler.send_header("Ratchet-Notes", '["a note"]')
        handler.end_headers()
        handler.wfile.write(body[: len(body) - cut])
        return 0, "", b""

    with serving(script) as server, RatchetClient(server.url, retry_for=0.1) as client:
        return client.export("job-000000000000", "step-1", target, format=form)


def test_export_download_complete_is_moved_to_target(tmp_path: Path) -> None:
    assert _fetch(tmp_path / "m.safetensors", b"x" * 3_000_000) == ["a note"]
    assert (tmp_path / "m.safetensors").read_bytes() == b"x" * 3_000_000
    names = ["rank-00000-of-00002.pt", "rank-00001-of-00002.pt"]
    assert _fetch(tmp_path / "ranks", _tar(*names), form="torch") == ["a note"]
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == names
    with pytest.raises(Refused, match="already exists"):
        _fetch(tmp_path / "m.safetensors", b"other")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("body", "form", "told", "cut", "error"),
    [
        (b"x" * 100, "safetensors", b"y" * 100, 0, ServiceFault),
        (b"x" * 3_000_000, "safetensors", None, 10, ServiceUnreachable),
        (_tar("rank-00000-of-00001.pt"), "torch", b"", 0, ServiceFault),
        (_tar("rank-00000-of-00001.pt")[:700], "torch", None, 0, ServiceFault),
        (_tar("../escaped.pt"), "torch", None, 0, ServiceFault),
        (_tar("rank-00000-of-00001.pt/../../escaped"), "torch", None, 0, ServiceFault),
        (b"no tar", "torch", None, 0, ServiceFault),
        (_tar(".metadata", "rank-00000-of-00001.pt"), "dcp", None, 0, ServiceFault),
        (_tar("__0_0.distcp", ".metadata/../../x"), "dcp", None, 0, ServiceFault),
    ],
)
def test_export_download_incomplete_or_altered_leaves_no_file(
    tmp_path: Path, body: bytes, form: ExportFormat, told: bytes | None, cut: int, error: type[RatchetError]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(error, match=r"nothing was kept|no part of it is kept"):
        _fetch(folder / "out", body, form=form, told=told, cut=cut)
    assert list(folder.iterdir()) == [] and [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_export_download_to_unwritable_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="make its directory first") as caught:
        _fetch(tmp_path / "none" / "m.safetensors", b"x")
    assert caught.value.code == "output-not-written"
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(Refused, match="already exists"):
        _fetch(tmp_path / "full", b"x")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_export_download_does_not_overwrite_target_created_meanwhile(
    tmp_path: Path, form: ExportFormat, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)  # as on a file system that has none
    target = tmp_path / "out"
    body = _tar("rank-00000-of-00001.pt") if form == "torch" else b"new"
    with pytest.raises(Refused, match="already exists"):
        _fetch(target, body, form=form, meanwhile=lambda: target.write_bytes(b"another's"))
    assert target.read_bytes() == b"another's" and list(tmp_path.iterdir()) == [target]
    target.unlink()
    _fetch(target, body, form=form)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_export_command_ended_by_signal_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    """One that is killed leaves what the next export to the same name takes away."""
    go = threading.Event()

    def script(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        handler.send_response(200)
        handler.send_header("Content-Length", "3000000")
        handler.end_headers()
        handler.wfile.write(b"x" * 2_000_000)
        go.wait(60)
        return 0, "", b""

    with serving(script) as server:
        arguments = ["checkpoints", "export", "job-000000000000", "--checkpoint", "step-1", "-o", "model.safetensors"]
        command = subprocess.Popen([EXECUTABLE, "--server", server.url, *arguments], cwd=tmp_path)
        try:
            wait_for(
                lambda: [p for p in tmp_path.glob(".*/whole") if p.stat().st_size], "half of the file", period=0.02
            )
            command.send_signal(number)
            assert command.wait(30) == (-number if number is signal.SIGKILL else 130)
        finally:
            go.set()
            command.kill()
            command.wait()
    if number is signal.SIGKILL:
        target = tmp_path / "model.safetensors"
        assert [p.suffix for p in tmp_path.iterdir()] == [".tmp"]
        _fetch(tmp_path / "model", b"x")  # another name
        assert len(list(tmp_path.iterdir())) == 2
        with pytest.raises(Refused, match="already exists"):  # one that has begun meanwhile is alive, and is left alone
            _fetch(target, b"x", meanwhile=lambda: _fetch(target, b"other"))
        assert target.read_bytes() == b"other"
        target.unlink(), (tmp_path / "model").unlink()
    assert list(tmp_path.iterdir()) == []
