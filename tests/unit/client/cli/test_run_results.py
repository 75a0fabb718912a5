"""What ``ratchet run`` prints when its job has ended, and the files that it copies then."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from ratchet_client import RatchetClient
from ratchet_client.cli.run import _check_outputs, _print_results
from ratchet_client.cli.run.private_service import RunService
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_contract.api.views import JobView
from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from tests.support.scripted_server import JOB, Reply, ok, serving

pytestmark = pytest.mark.processes

ENDED = JobView.model_validate(JOB | {"phase": "SUCCEEDED", "last_checkpoint": "step-000000000001.a0001"})
LEFT_OUT = "2 left out: symbolic links"


def archive(handler: BaseHTTPRequestHandler, names: list[str]) -> Reply:
    """Answer with an archive of empty files, in which two links are left out."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as made:
        for name in names:
            made.addfile(tarfile.TarInfo(name))
    handler.send_response(200)
    headers = {"Ratchet-Notes": f'["{LEFT_OUT}"]', "Ratchet-Entries": str(len(names)), "Ratchet-Size": "0"}
    for key, value in (headers | {"Content-Length": str(len(out.getvalue()))}).items():
        handler.send_header(key, value)
    handler.end_headers()
    handler.wfile.write(out.getvalue())
    return 0, "", b""


def listed(names: list[str]) -> list[dict[str, object]]:
    times = {"modified_at": JOB["created_at"]}
    return [{"path": name, "kind": "file", "size": 0, **times} for name in names]


@pytest.fixture(params=[["result.txt"], []], ids=["a file", "only links"])
def wrote(request: pytest.FixtureRequest) -> list[str]:
    """The names of the job's regular files; it has also written two links."""
    names: list[str] = request.param
    return names


@pytest.fixture
def client(wrote: list[str]) -> Iterator[RatchetClient]:
    def script(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        path = handler.path.partition("?")[0]
        if path.endswith("/archive"):
            return archive(handler, wrote)
        return ok({"items": listed(wrote) if path.endswith("/files") else []})

    with serving(script) as server, RatchetClient(server.url) as made:
        yield made


def test_outputs_option_prints_which_files_were_left_out(
    client: RatchetClient, wrote: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = RunService(HomePaths(tmp_path / "home"), private=False)
    assert _print_results(client, service, ENDED, tmp_path / "out", "ratchet prove -", "") is Exit.OK
    said = capsys.readouterr().err.splitlines()
    assert f"note: {LEFT_OUT}" in said
    assert [line for line in said if line.startswith("copied: ")] == [f"copied: {tmp_path / 'out' / n}" for n in wrote]
    assert (f"nothing was copied to {tmp_path / 'out'}" in said) == (not wrote)


def test_result_lines_are_printed_even_if_outputs_cannot_be_copied(
    client: RatchetClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = RunService(HomePaths(tmp_path / "home"), private=False)
    with pytest.raises(Refused, match="No such file"):
        _print_results(client, service, ENDED, tmp_path / "gone" / "out", "ratchet prove -", "")
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith("details: ") and said[-1].endswith("killed? ratchet prove -")


def test_outputs_directory_that_cannot_be_filled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dangling").symlink_to("nowhere")
    Path("full").mkdir()
    Path("full", "kept").touch()
    for fine in ("full", "new", "full/new", str(tmp_path / "new"), ".", ".."):
        _check_outputs(Path(fine))
    for wrong, cause in (
        ("a/b", "/a does not exist: create it first"),
        ("file", "file is not a directory"),
        ("file/b", "/file is not a directory"),
        ("dangling", "dangling is not a directory"),
    ):
        with pytest.raises(Refused, match=cause):
            _check_outputs(Path(wrong))
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    for wrong in ("full", "full/new"):
        with pytest.raises(Refused, match="full cannot be written to"):
            _check_outputs(Path(wrong))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "full"]
