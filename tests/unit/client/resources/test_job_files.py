"""A job's files that arrive cut short, or would be written elsewhere, leave nothing behind; none replaces another unasked."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.resources.client import RatchetClient
from ratchet_client.resources.job_files import Fetched
from ratchet_contract.errors import RatchetError, Refused
from tests.support.scripted_server import Reply, serving

Member = tuple[str, bytes | None, str]
"""Name; bytes; for what is no file, the type of the tar's member."""


def tar(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as made:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.mtime, member.mode = 1_000_000_000, 0o755 if kind == "x" else 0o644
            if content is None:
                member.type, member.linkname = kind.encode(), "/etc/passwd"
                made.addfile(member)
            else:
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
    return out.getvalue()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fetch(
    target: Path,
    body: bytes,
    *,
    cut: int = 0,
    ended: bool = True,
    entries: int = 1,
    force: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> Fetched:
    def script(handler: BaseHTTPRequestHandler, number: int) -> Reply:
        meanwhile()
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Ratchet-Notes", '["2 left out: symbolic links"]')
        handler.send_header("Ratchet-Entries", str(entries))
        handler.send_header("Ratchet-Size", str(len(body)))
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(body) - cut, body[: len(body) - cut]))
        if ended and not cut:
            handler.wfile.write(b"0\r\n\r\n")
        return 0, "", b""

    with serving(script) as server, RatchetClient(server.url, retry_for=0.1) as client:
        return client.fetch_files("job-000000000000", target, force=force)


TREE = tar(
    ("runs", None, "5"), ("runs/best.pt", b"x" * 3_000_000, ""), ("runs/go.sh", b"#!", "x"), ("empty", None, "5")
)


def test_job_files_download_writes_files_modes_and_directories(tmp_path: Path) -> None:
    target = tmp_path / "out"
    found = fetch(target, TREE, entries=6)
    assert found.files == [target / "runs" / "best.pt", target / "runs" / "go.sh"]
    assert found.notes == ["2 left out: symbolic links", "2 left out: gone before being copied"]
    assert (target / "runs" / "best.pt").read_bytes() == b"x" * 3_000_000
    assert os.access(target / "runs" / "go.sh", os.X_OK) and not os.access(target / "runs" / "best.pt", os.X_OK)
    assert (target / "runs" / "go.sh").stat().st_mtime == 1_000_000_000
    assert names(target) == ["empty", "runs"] and (target / "empty").is_dir()


def test_job_files_download_replaces_files_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "go.sh").write_text("mine")
    with pytest.raises(Refused, match=r"already exists.*go.sh'.*--force") as error:
        fetch(tmp_path, TREE)
    assert error.value.code == "output-exists"
    assert names(tmp_path) == ["runs"] and names(tmp_path / "runs") == ["go.sh"]
    fetch(tmp_path, TREE, force=True)
    assert (tmp_path / "runs" / "go.sh").read_text() == "#!"
    (tmp_path / "runs" / "go.sh").unlink()
    (tmp_path / "runs" / "go.sh").mkdir()
    with pytest.raises(Refused, match="remove them first"):
        fetch(tmp_path, TREE, force=True)
    (tmp_path / "link").symlink_to(tmp_path / "other")  # a link here is one of the names that are taken
    (tmp_path / "other").write_text("mine")
    with pytest.raises(Refused, match="already exists"):
        fetch(tmp_path, tar(("link", b"x", "")))
    fetch(tmp_path, tar(("link", b"x", "")), force=True)
    assert (tmp_path / "other").read_text() == "mine" and not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("folder", [("runs", None, "5"), None], ids=["named in the archive", "not named there"])
def test_job_files_download_does_not_follow_symlinked_directory(
    tmp_path: Path, force: bool, folder: Member | None
) -> None:
    other, target = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    (other / "log.txt").write_text("mine")
    target.mkdir()
    (target / "runs").symlink_to(other)
    for name in ("log.txt", "new.txt"):
        with pytest.raises(Refused, match="runs'") as error:
            fetch(target, tar(*([folder] if folder else []), (f"runs/{name}", b"theirs", "")), force=force)
        assert error.value.code == "output-exists"
    assert names(other) == ["log.txt"] and (other / "log.txt").read_text() == "mine" and names(target) == ["runs"]
    (tmp_path / "linked").symlink_to(target)  # the directory that is named itself may be one
    fetch(tmp_path / "linked", tar(("a", b"x", "")), force=force)
    assert names(target) == ["a", "runs"]


def test_job_files_download_keeps_file_created_during_fetch(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(Refused, match="already exists"):
        fetch(target, tar(("a", b"theirs", "")), meanwhile=lambda: (target / "a").write_text("mine"))
    assert (target / "a").read_text() == "mine" and names(target) == ["a"]


def test_job_files_download_keeps_file_created_after_final_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(target: Path, directory: bool, force: bool) -> bool:
        target.write_text("mine")
        return True

    monkeypatch.setattr("ratchet_client.resources.job_files._is_replaceable", free)
    with pytest.raises(Refused, match="was not written") as error:
        fetch(tmp_path / "out", tar(("a", b"theirs", "")))
    assert error.value.code == "output-not-written" and (tmp_path / "out" / "a").read_text() == "mine"


@pytest.mark.parametrize(
    "body",
    [
        tar(("/etc/cron.d/x", b"x", "")),
        tar(("../x", b"x", "")),
        tar(("runs/../../x", b"x", "")),
        tar(("..", None, "5")),
        tar(("link", None, "2")),
        tar(("hard", None, "1")),
        tar(("pipe", None, "6")),
        tar(("device", None, "3")),
        tar(("a", b"x", ""), ("a", b"y", "")),
        tar(("a", b"x", ""), ("a/b", b"y", "")),
        tar(("a", b"x" * 2000, ""))[:1000],
        b"this is no archive at all" * 100,
    ],
)
def test_job_files_archive_invalid_or_escaping_target_leaves_nothing(tmp_path: Path, body: bytes) -> None:
    target = tmp_path / "out"
    with pytest.raises(ServiceFault, match="nothing was kept"):
        fetch(target, body)
    assert names(tmp_path) == []


def test_job_files_truncated_response_leaves_nothing_and_can_be_retried(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnreachable, match="starts over"):
        fetch(tmp_path / "out", TREE, cut=600)
    assert names(tmp_path) == []
    with pytest.raises(ServiceUnreachable):  # all members are there; that it ended is not
        fetch(tmp_path / "out", TREE.ljust(3 << 20, b"\0"), ended=False)
    assert names(tmp_path) == []
    assert len(fetch(tmp_path / "out", TREE).files) == 2


def test_job_files_download_to_unwritable_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target, words in (
        (tmp_path / "no" / "out", "make its directory first"),
        (tmp_path / "file", "was not written"),
    ):
        with pytest.raises(RatchetError, match=words) as error:
            fetch(target, TREE)
        assert error.value.code == "output-not-written"
