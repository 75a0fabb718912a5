"""All ranks read what they start from together: what one of them finds wrong, all of them act on, before anything is built.

Ranks are threads over torch's own in-memory store; the checkpoints and the system calls are real. What only one rank is to meet,
its thread meets.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.protocol.messages import ForkSource, LaunchFile
from ratchet_store.filesystem import mount_policy
from ratchet_store.filesystem.durable_io import UNREADABLE
from ratchet_store.filesystem.mount_policy import Mount
from ratchet_store.write import rank_file
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.resume import choose_checkpoint
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.state.snapshot import byte_view
from tests.support.checkpoints import JOB, list_names, make_chain, make_checkpoint, shared_bytes

LINEAGE = [Segment(attempt=1, after_step=0)]
BLOCK = 4096


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    monkeypatch.setattr(rank_file, "BLOCK", BLOCK)
    return JobPaths(tmp_path / "jobs" / JOB)


class Told:
    """What rank 0 reports."""

    def __init__(self) -> None:
        self.quarantines: list[int] = []
        self.notes: list[str] = []

    def report_quarantined(self, step: int, attempt: int, error: str) -> None:
        self.quarantines.append(step)

    def note(self, type_: str, message: str, **data: Any) -> None:
        self.notes.append(f"{type_}: {message}")


def launch_file(job: JobPaths, *, lineage: Any = LINEAGE, fork: ForkSource | None = None, node: int = 0) -> LaunchFile:
    """Of the second attempt."""
    return LaunchFile.model_construct(
        job_id=JOB, job_root=str(job.root), attempt_dir=str(job.attempt(2).root), lineage=lineage, fork=fork, node=node
    )


def choose(
    job: JobPaths, ranks: int = 2, *, fork: ForkSource | None = None, nodes: Sequence[int] = (), lineage: Any = LINEAGE
) -> tuple[list[Chosen | RatchetError], Told]:
    """What every rank gets, or the error that ends it. ``nodes``: of each rank."""
    store, told = HashStore(), Told()

    def rank(number: int) -> Chosen | RatchetError:
        threading.current_thread().name = f"rank-{number}"
        launch = launch_file(job, lineage=lineage, fork=fork, node=nodes[number] if nodes else 0)
        try:
            return choose_checkpoint.choose(launch, Exchange(store, number, ranks, 20.0), told)
        except RatchetError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks))), told


def steps(found: Sequence[Chosen | RatchetError]) -> list[int]:
    assert all(isinstance(item, Chosen) for item in found), found
    return [item.base.step for item in found if isinstance(item, Chosen)]


def errors(found: Sequence[Chosen | RatchetError]) -> list[RatchetError]:
    assert all(isinstance(item, RatchetError) for item in found), found
    return [item for item in found if isinstance(item, RatchetError)]


def only(monkeypatch: pytest.MonkeyPatch, name: str, number: int, act: Callable[..., Any]) -> None:
    """``os.<name>`` is ``act(real, ...)`` for rank ``number``."""
    real = getattr(os, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread().name != f"rank-{number}":
            return real(*arguments, **keywords)
        return act(real, *arguments, **keywords)

    monkeypatch.setattr(os, name, call)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_ranks_read_checkpoint_in_one_pass_over_disk(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_checkpoint(job.checkpoints, 10, scale=24, seed=4)
    read: list[tuple[str, int]] = []
    real = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        read.append((threading.current_thread().name, real(fd, buffers, offset)))
        return read[-1][1]

    monkeypatch.setattr(os, "preadv", counted)
    found, told = choose(job)
    assert steps(found) == [10, 10] and told.notes == [] and told.quarantines == []
    for number, item in enumerate(found):
        assert isinstance(item, Chosen)
        snapshot = item.take()
        assert {f"shared/{n}": bytes(byte_view(t)) for n, t in snapshot.shared.items()} == shared_bytes(4, 24)
        assert set(snapshot.private) == {"rng/torch"} and snapshot.state == {"rank": number, "seed": 4}
        assert item.loaded == []
        mine = sum(count for name, count in read if name == f"rank-{number}")
        assert manifest.files[number].size <= mine <= manifest.size


def test_checkpoint_is_read_in_the_background_and_an_error_is_kept_for_the_caller(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(job.checkpoints, 10)
    real, goes_on, readers = os.preadv, threading.Event(), set[str]()

    def late(fd: int, buffers: Any, offset: int) -> int:
        readers.add(threading.current_thread().name)
        assert goes_on.wait(20.0)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", late)
    launch = launch_file(job)
    begun = choose_checkpoint.choose_in_background(launch, Exchange(HashStore(), 0, 1, 20.0), Told())
    assert not begun.done()  # and this thread goes on
    goes_on.set()
    assert begun.result(20.0).base.step == 10 and threading.current_thread().name not in readers

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    failed = choose_checkpoint.choose_in_background(launch, Exchange(HashStore(), 0, 1, 20.0), Told())
    with pytest.raises(CheckpointError, match=r"broken|Input/output") as caught:
        failed.result(20.0)
    assert caught.value.code == UNREADABLE


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_together_verify_every_byte_of_checkpoint(job: JobPaths, ranks: int) -> None:
    good = make_checkpoint(job.checkpoints, 10, world_size=3, private=2 * BLOCK)
    for number, file in enumerate(good.files):
        for block in range(len(file.blocks)):
            target = make_checkpoint(
                job.checkpoints, 20 + 10 * number + block, parent=good.base, world_size=3, private=2 * BLOCK
            )
            flip(job.checkpoints / target.id / file.name, min(block * BLOCK + 77, file.size - 1))
    damaged = len(list_names(job.checkpoints)) - 1
    assert damaged == 12  # of four blocks in each file one is private alone
    found, told = choose(job, ranks)
    assert steps(found) == [10] * ranks and len(told.quarantines) == damaged == len(list_names(job.quarantine))
    assert all(len(item.quarantined) == damaged for item in found if isinstance(item, Chosen))


def _failing(real: Any, *arguments: Any) -> Any:
    raise OSError(5, "Input/output error")


def _lying(real: Any, fd: int, buffers: Any, offset: int) -> Any:
    count = real(fd, buffers, offset)
    buffers[0][0] ^= 1
    return count


@pytest.mark.parametrize(
    ("act", "text"), [(_failing, "rank 1: .*Input/output error"), (_lying, "rank 1 reads other bytes than rank 0")]
)
def test_read_error_on_one_rank_ends_all_and_quarantines_nothing(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch, act: Callable[..., Any], text: str
) -> None:
    make_chain(job.checkpoints, 10, 20)
    only(monkeypatch, "preadv", 1, act)
    found, told = choose(job, 3)
    for error in errors(found):
        assert isinstance(error, CheckpointError) and error.code == UNREADABLE and re.search(text, error.detail)
    assert told.quarantines == [] and len(list_names(job.checkpoints)) == 2


def test_read_error_on_rank_0_ends_all_ranks(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chain(job.checkpoints, 10, 20)
    only(monkeypatch, "open", 0, lambda real, path, *more, **keywords: _failing(real)
         if str(path).endswith(MANIFEST_NAME) else real(path, *more, **keywords))  # fmt: skip
    found, _ = choose(job)
    assert {error.code for error in errors(found)} == {UNREADABLE} and len(list_names(job.checkpoints)) == 2


def test_damaged_checkpoint_that_rank_0_cannot_look_at_ends_all_ranks(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_checkpoint(job.checkpoints, 10)
    flip(job.checkpoints / manifest.id / manifest.files[1].name, manifest.files[1].size - 1)
    only(monkeypatch, "stat", 0, lambda real, path, *more, **keywords: _failing(real)
         if str(path).endswith(MANIFEST_NAME) else real(path, *more, **keywords))  # fmt: skip
    found, told = choose(job)
    for error in errors(found):
        assert error.code == UNREADABLE and "Input/output error" in error.detail
    assert told.quarantines == [] and list_names(job.checkpoints) == [manifest.id]


def test_other_node_gets_time_to_see_checkpoint_of_rank_0(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(job.checkpoints, 10)
    left = [3]

    def late(real: Any, path: Any, *more: Any, **keywords: Any) -> Any:
        if str(path).endswith(MANIFEST_NAME) and left[0] > 0:
            left[0] -= 1
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, *more, **keywords)

    only(monkeypatch, "open", 1, late)
    found, told = choose(job, nodes=[0, 1])
    assert steps(found) == [10, 10] and left == [0]
    monkeypatch.setattr(choose_checkpoint, "_VISIBILITY_TIMEOUT", 0.3)
    left[0] = 1000
    found, told = choose(job, nodes=[0, 1])
    for error in errors(found):
        assert error.code == UNREADABLE and "this node does not see" in error.detail
    assert told.quarantines == [] and len(list_names(job.checkpoints)) == 1


def test_damaged_fork_source_ends_job_and_is_not_moved(job: JobPaths, tmp_path: Path) -> None:
    other = JobPaths(tmp_path / "jobs" / "job-2")
    source: Manifest = make_checkpoint(other.checkpoints, 10, job_id="job-2")
    fork = ForkSource(job_root=str(other.root), step=10, attempt=1, digest=source.digest)
    found, _ = choose(job, fork=fork, lineage=[])
    assert steps(found) == [10, 10] and isinstance(found[1], Chosen) and found[1].notes == ["forked from job job-2"]
    flip(other.checkpoints / source.id / source.files[1].name, source.files[1].size - 1)
    found, told = choose(job, fork=fork, lineage=[])
    for error in errors(found):
        assert isinstance(error, UserError) and "fork from another checkpoint" in error.detail
    assert list_names(other.checkpoints) == [source.id] and told.quarantines == []


@pytest.mark.parametrize(
    ("adopted", "cure"), [(None, "fork from another checkpoint"), ("/run", "submit the job again, with --adopt")]
)
def test_fork_without_intact_checkpoint_starts_from_its_source_or_fails(
    job: JobPaths, tmp_path: Path, adopted: str | None, cure: str
) -> None:
    other = JobPaths(tmp_path / "jobs" / "job-2")
    source = make_checkpoint(other.checkpoints, 10, job_id="job-2")
    fork = ForkSource(job_root=str(other.root), step=10, attempt=1, digest=source.digest, adopted=adopted)
    lineage = [Segment(attempt=1, after_step=10)]
    (own,) = make_chain(job.checkpoints, 20, parent=source.base)
    found, _ = choose(job, fork=fork, lineage=lineage)
    assert steps(found) == [20, 20]
    flip(job.checkpoints / own.id / own.files[1].name, own.files[1].size - 1)
    found, told = choose(job, fork=fork, lineage=lineage)
    assert steps(found) == [10, 10] and told.quarantines == [20]
    (other.checkpoints / source.id).rename(tmp_path / "moved")
    for error in errors(choose(job, fork=fork, lineage=lineage)[0]):
        assert isinstance(error, UserError) and cure in error.detail


@pytest.mark.parametrize(
    ("lineage", "parent"),
    [
        pytest.param(
            [Segment(attempt=2, after_step=29, until_step=30)], Base(step=20, attempt=1, digest="d"), id="unrecorded"
        ),
        pytest.param([Segment(attempt=2, after_step=0)], Base(), id="scratch"),
    ],
)
def test_fork_uses_own_checkpoint_of_line_that_is_not_known_to_begin_at_source(
    job: JobPaths, tmp_path: Path, lineage: list[Segment], parent: Base
) -> None:
    make_checkpoint(job.checkpoints, 30, 2, parent=parent)
    fork = ForkSource(job_root=str(tmp_path / "jobs" / "job-2"), step=10, attempt=1, digest="other")
    found, told = choose(job, fork=fork, lineage=lineage)
    assert steps(found) == [30, 30] and told.quarantines == []


def test_unsafe_file_system_is_refused_before_first_step(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_policy, "mount_of", lambda _: Mount("/mnt", "fuse.s3fs"))
    for error in errors(choose(job, lineage=[])[0]):
        assert isinstance(error, UserError) and error.code == "file-system-refused"
        assert str(job.checkpoints) in error.detail and "fuse.s3fs" in error.detail and "checkpoint.uri" in error.detail
    monkeypatch.setattr(mount_policy, "mount_of", lambda _: Mount("/mnt", "tmpfs"))
    found, told = choose(job, lineage=[])
    assert steps(found) == [0, 0] and "lost after a reboot" in told.notes[0]


def test_file_system_that_cannot_be_examined_is_noted_and_the_checkpoint_is_read(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(job.checkpoints, 10)

    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(choose_checkpoint, "check_directory", refuse)
    found, told = choose(job)
    assert steps(found) == [10, 10]
    assert told.notes == [f"file-system-not-tried: {job.checkpoints}: Permission denied"]
