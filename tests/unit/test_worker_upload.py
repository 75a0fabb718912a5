"""What node 0's agent tells of copies: with a store in memory, and no attempt around it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from obstore.store import MemoryStore

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import Manifest
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import HomePaths
from ratchet_contract.resume import Segment
from ratchet_contract.spec_parse import parse_spec
from ratchet_store import fetch
from ratchet_store.mirror import Mirror, Step, Uploaded
from ratchet_store.objects import ObjectStore, Patience, open_store
from ratchet_store.remote import RemoteCheckpoints
from ratchet_store.retain import delete
from ratchet_worker import remote_base
from ratchet_worker.results import NotStarted
from ratchet_worker.upload import Uploader
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

    def uploaded(self, done: Uploaded) -> None:
        self.rows[done.manifest.step] = "copied"

    def deleted(self, step: int, epoch: int) -> None:
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
        job_id=JOB, epoch=1, world_size=1, ranks=[0], spec=parse_spec(spec), resolved=RESOLVED,
        job_root=str(home.job(JOB).root), attempt_dir=str(home.job(JOB).attempt(1).root),
        workdir=str(home.job(JOB).work), report_token="none", service_file=str(home.service_file), **more,
    )  # fmt: skip


def soon(done: Callable[[], T | None], deadline: float) -> T | None:
    """As the supervisor's, without an end of the attempt."""
    while time.monotonic() < deadline:
        if (value := done()) is not None:
            return value
        time.sleep(0.005)
    return None


def test_a_copy_that_was_taken_away_is_not_told_once_more(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    chain = make_chain(checkpoints, 10, 20, 30)
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    mirror = Mirror(remote, checkpoints, tmp_path / "quarantine", [Segment(epoch=1, after_step=0)], 1)
    told = Told()
    uploader = Uploader(launch_in(tmp_path), told)  # type: ignore[arg-type]

    def run() -> None:
        step = Step()
        while not step.idle:
            step = mirror.step()
            uploader._tell(step)

    run()
    delete(checkpoints / chain[0].id)
    run()
    uploader._repeat(math.inf)  # what is told a few seconds after a copy
    assert told.rows == {10: "deleted", 20: "copied", 30: "copied"}


def test_what_went_before_the_store_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    chain = make_chain(checkpoints, 10, 20, 30)
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    mirror = Mirror(remote, checkpoints, tmp_path / "quarantine", [Segment(epoch=1, after_step=0)], 1)
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


def test_reading_the_local_checkpoint_is_no_silence_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_in(tmp_path, lineage=[Segment(epoch=1, after_step=0)])
    make_chain(HomePaths(tmp_path).job(JOB).checkpoints, 10)
    raw = MemoryStore()
    monkeypatch.setattr(remote_base, "open_job", lambda *_: RemoteCheckpoints(ObjectStore(raw, "memory://x"), JOB))
    real, parts, may_read = fetch.verify_files, list[int](), threading.Semaphore(0)

    def slow(directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None) -> int:
        """A disk that takes longer than ``startup_deadline`` for all of it, and not for a part."""

        def told(nbytes: int) -> None:
            assert may_read.acquire(timeout=20)
            progress(nbytes)
            parts.append(nbytes)

        return real(directory, manifest, progress=told)

    monkeypatch.setattr(fetch, "verify_files", slow)
    waits = 0

    def a_part_later(done: Callable[[], T | None], _: float) -> T | None:
        """Each wait lasts as long as the disk needs for one part."""
        nonlocal waits
        waits, before = waits + 1, len(parts)
        may_read.release()
        wait_for(lambda: len(parts) > before or done() is not None, "the next part", 20)
        return done()

    remote_base.provide(launch, HomePaths(tmp_path).job(JOB).attempt(1), a_part_later, Told())  # type: ignore[arg-type]
    assert waits >= len(parts) > 1


def test_whatever_ends_the_asking_no_attempt_starts_over_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As a client in Rust has it."""

    def panics(*_: object) -> RemoteCheckpoints:
        raise Panic("in a thread")

    monkeypatch.setattr(remote_base, "open_job", panics)
    launch = launch_in(tmp_path, lineage=[Segment(epoch=1, after_step=0)])
    with pytest.raises(NotStarted) as caught:
        remote_base.provide(launch, HomePaths(tmp_path).job(JOB).attempt(1), soon, Told())  # type: ignore[arg-type]
    assert caught.value.conclusion.cause == "checkpoint-error"
    assert "Panic: in a thread" in str(caught.value.conclusion.message)


@pytest.mark.parametrize("url", ["http://user:its-password@127.0.0.1:9", "http://user:its-password@127.0.0.1:9:no"])
def test_an_endpoint_tells_no_password_and_ends_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "some-credential")
    store = open_store("s3://bucket/x", patience=Patience(0.2, 0.2, 0.1))
    for ask in (store.list, lambda: store.put_if_absent("x", b"")):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert caught.value.code == "checkpoint-remote"
        assert "its-password" not in caught.value.detail
