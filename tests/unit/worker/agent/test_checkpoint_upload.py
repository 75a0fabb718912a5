"""What node 0's agent tells of copies: with a store in memory, and no attempt around it."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from obstore.store import MemoryStore

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.parse import parse_spec
from ratchet_store.object_store import download
from ratchet_store.object_store.client import REMOTE, ObjectStore, Patience, open_store
from ratchet_store.object_store.remote_checkpoints import RemoteCheckpoints
from ratchet_store.object_store.upload import Mirror, Step, Uploaded
from ratchet_store.retention.delete import delete
from ratchet_worker.agent import checkpoint_download, checkpoint_upload
from ratchet_worker.agent.checkpoint_upload import Uploader
from ratchet_worker.ipc.result_files import NotStarted
from tests.support.checkpoints import JOB, make_chain
from tests.support.launch import RESOLVED
from tests.support.server import wait_for

T = TypeVar("T")


class Told:
    """In the place of ``Telling``: what the service would hear, in order."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}

    def note(self, kind: str, message: str) -> None:
        self.rows[-1] = f"{kind}: {message}"

    def report_uploaded(self, done: Uploaded) -> None:
        self.rows[done.manifest.step] = "copied"

    def report_deleted(self, step: int, attempt: int) -> None:
        self.rows[step] = "deleted"


def launch_in(root: Path, **more: object) -> LaunchFile:
    home = HomePaths(root)
    spec = {
        "name": "copied",
        "task": {"entrypoint": "a.b:C"},
        "world": {"ranks_per_node": 1, "device": "cpu"},
        "checkpoint": {"uri": "s3://bucket/team"},
        "policy": {"startup_deadline": 20},
    }
    return LaunchFile(
        job_id=JOB, attempt=1, world_size=1, ranks=[0], spec=parse_spec(spec), resolved=RESOLVED,
        job_root=str(home.job(JOB).root), attempt_dir=str(home.job(JOB).attempt(1).root),
        workdir=str(home.job(JOB).work_dir), report_token="none", service_file=str(home.service_file), **more,
    )  # fmt: skip


def soon(done: Callable[[], T | None], deadline: float) -> T | None:
    """As the supervisor's, without an end of the attempt."""
    while time.monotonic() < deadline:
        if (value := done()) is not None:
            return value
        time.sleep(0.005)
    return None


def test_uploader_does_not_repeat_report_of_deleted_copy(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    chain = make_chain(checkpoints, 10, 20, 30)
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    mirror = Mirror(remote, checkpoints, tmp_path / "quarantine", [Segment(attempt=1, after_step=0)], 1)
    told = Told()
    uploader = Uploader(launch_in(tmp_path), told)  # type: ignore[arg-type]

    def run() -> None:
        step = Step()
        while not step.idle:
            step = mirror.step()
            uploader._report_step(step)

    run()
    delete(checkpoints / chain[0].id)
    run()
    uploader._repeat_reports(math.inf)  # what is told a few seconds after a copy
    assert told.rows == {10: "deleted", 20: "copied", 30: "copied"}


def test_unreadable_disk_at_the_end_is_reported_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chain(HomePaths(tmp_path).job(JOB).checkpoints, 10)
    memory = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    monkeypatch.setattr(checkpoint_upload, "open_job_checkpoints", lambda *_: memory)

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_file", stale)
    told = Told()
    uploader = Uploader(launch_in(tmp_path), told)  # type: ignore[arg-type]
    uploader.start()
    uploader.finish(5)
    assert "not in the object store when the attempt ended: any committed checkpoint" in told.rows[-1]


def test_mirror_reports_copies_removed_before_store_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    chain = make_chain(checkpoints, 10, 20, 30)
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    mirror = Mirror(remote, checkpoints, tmp_path / "quarantine", [Segment(attempt=1, after_step=0)], 1)
    while not mirror.step().idle:
        pass
    for manifest in chain[:2]:
        delete(checkpoints / manifest.id)
    remove, calls = remote.remove, 0

    def fails_second(folder: str, names: list[str] | None = None) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise CheckpointError("away", code="checkpoint-remote")
        remove(folder, names)

    monkeypatch.setattr(remote, "remove", fails_second)
    removed: list[tuple[int, int]] = []
    for _ in range(6):
        with suppress(CheckpointError):
            removed += mirror.step().removed
    assert sorted(removed) == [(10, 1), (20, 1)]


def test_download_does_not_time_out_during_slow_local_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_in(tmp_path, lineage=[Segment(attempt=1, after_step=0)])
    make_chain(HomePaths(tmp_path).job(JOB).checkpoints, 10)
    raw = MemoryStore()
    monkeypatch.setattr(
        checkpoint_download, "open_job_checkpoints", lambda *_: RemoteCheckpoints(ObjectStore(raw, "memory://x"), JOB)
    )
    real, parts, may_read = download.verify_files, list[int](), threading.Semaphore(0)

    def slow(directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> int:
        """A disk that takes longer than ``startup_deadline`` for all of it, and not for a part."""

        def told(nbytes: int) -> None:
            assert may_read.acquire(timeout=20)
            progress(nbytes)
            parts.append(nbytes)

        return real(directory, manifest, progress=told)

    monkeypatch.setattr(download, "verify_files", slow)
    waits = 0

    def a_part_later(done: Callable[[], T | None], _: float) -> T | None:
        """Each wait lasts as long as the disk needs for one part."""
        nonlocal waits
        waits, before = waits + 1, len(parts)
        may_read.release()
        wait_for(lambda: len(parts) > before or done() is not None, "the next part", 20)
        return done()

    checkpoint_download.download_checkpoint(launch, HomePaths(tmp_path).job(JOB).attempt(1), a_part_later, Told())  # type: ignore[arg-type]
    assert waits >= len(parts) > 1


def test_download_failure_of_any_kind_ends_with_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As a client in Rust has it."""

    def panics(*_: object) -> RemoteCheckpoints:
        raise Panic("in a thread")

    monkeypatch.setattr(checkpoint_download, "open_job_checkpoints", panics)
    launch = launch_in(tmp_path, lineage=[Segment(attempt=1, after_step=0)])
    with pytest.raises(NotStarted) as caught:
        checkpoint_download.download_checkpoint(launch, HomePaths(tmp_path).job(JOB).attempt(1), soon, Told())  # type: ignore[arg-type]
    assert caught.value.conclusion.cause == "checkpoint-error"
    assert "Panic: in a thread" in str(caught.value.conclusion.message)


@pytest.mark.parametrize("step", [None, 10])
def test_note_on_unreachable_store_says_only_what_the_service_has_recorded(
    step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> RemoteCheckpoints:
        raise CheckpointError("it does not answer", code=REMOTE)

    monkeypatch.setattr(checkpoint_download, "open_job_checkpoints", unreachable)
    bases = make_chain(HomePaths(tmp_path).job(JOB).checkpoints, 10, 20)
    recorded = next((one.base for one in bases if one.base.step == step), None)
    launch = launch_in(tmp_path, lineage=[Segment(attempt=1, after_step=0)], recorded=recorded)
    paths, told = HomePaths(tmp_path).job(JOB).attempt(1), Told()
    paths.root.mkdir(parents=True)
    checkpoint_download.download_checkpoint(launch, paths, soon, told)  # type: ignore[arg-type]
    assert "the service has recorded no checkpoint newer than step-000000000020.a0001 of this disk" in told.rows[-1]


@pytest.mark.parametrize("url", ["http://user:its-password@127.0.0.1:9", "http://user:its-password@127.0.0.1:9:no"])
def test_endpoint_error_does_not_reveal_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "some-credential")
    store = open_store("s3://bucket/x", patience=Patience(0.2, 0.2, 0.1))
    for ask in (store.list, lambda: store.put_if_absent("x", b"")):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert caught.value.code == "checkpoint-remote"
        assert "its-password" not in caught.value.detail
