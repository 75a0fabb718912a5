"""Fetching from a store that is in memory: what a disk, a store and a killed fetch may do to it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.errors import CheckpointError
from ratchet_store.format.manifest_file import mark_changed, read_changed_marker
from ratchet_store.object_store.client import ObjectStore
from ratchet_store.object_store.download import fetch, fetch_newest, newest_local
from ratchet_store.object_store.remote_checkpoints import RemoteCheckpoints
from ratchet_store.object_store.upload import Mirror
from ratchet_store.object_store.upload_marker import Record
from ratchet_store.retention.delete import delete
from tests.support.checkpoints import JOB, list_names, make_chain, make_checkpoint

ALL = [Segment(attempt=1, after_step=0)]
NEWEST = "step-000000000020.a0001"


@pytest.fixture
def remote(tmp_path: Path) -> RemoteCheckpoints:
    """Holds two checkpoints."""
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    make_chain(tmp_path / "there", 10, 20)
    run(Mirror(remote, tmp_path / "there", tmp_path / "there-aside", ALL, 1))
    return remote


def run(mirror: Mirror) -> None:
    while not mirror.step().idle:
        pass


def test_fetch_continues_short_writes(
    remote: RemoteCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at))
    fetch(remote, NEWEST, tmp_path / "here", tmp_path / "aside")
    assert newest_local(tmp_path / "here", ALL) == (20, 1)


def test_fetch_treats_oversized_range_response_as_damage(
    remote: RemoteCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = remote.objects.get_range

    def more(name: str, begin: int, end: int) -> Any:
        data = bytes(real(name, begin, end))
        return memoryview(data + b"more" if NEWEST in name and name.endswith("safetensors") else data)

    monkeypatch.setattr(remote.objects, "get_range", more)
    found = fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, None)
    assert found.fetched is not None and found.fetched.step == 10
    assert "set aside" in found.notes[0]


@pytest.mark.parametrize("change", ["empty", "short", "long"])
def test_fetch_treats_object_of_wrong_size_as_damage(remote: RemoteCheckpoints, tmp_path: Path, change: str) -> None:
    name = f"{NEWEST}/rank-00000-of-00002.safetensors"
    whole = remote.objects.get(name, 1 << 20)
    wrong = {"empty": b"", "short": whole[:-1], "long": whole + b"x"}[change]
    remote.objects.put(name, [wrong], len(wrong), "")
    with pytest.raises(CheckpointError, match=f"has {len(wrong)} bytes, the manifest says {len(whole)}") as caught:
        fetch(remote, NEWEST, tmp_path / "here", tmp_path / "aside")
    assert caught.value.code == "checkpoint-damaged"
    found = fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, None)
    assert found.fetched is not None and found.fetched.step == 10
    assert len(found.notes) == 1 and "set aside" in found.notes[0]
    run(Mirror(remote, tmp_path / "there", tmp_path / "there-aside", ALL, 2))
    again = fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, (10, 1))
    assert again.fetched is not None and again.fetched.step == 20


def test_fetch_skips_checkpoint_that_lacks_an_object(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    remote.objects.delete([f"{NEWEST}/rank-00000-of-00002.safetensors"])
    found = fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, None)
    assert found.fetched is not None and found.fetched.step == 10 and found.notes == []


def test_fetched_copy_keeps_changed_mark_of_checkpoint(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    """Whether it was marked before it was copied, or behind that."""
    there = tmp_path / "there"
    assert mark_changed(there / NEWEST, "scheduler changed") and not mark_changed(there / NEWEST, "again")
    make_chain(there, 30)
    assert mark_changed(there / "step-000000000030.a0001", "optimizer changed")
    run(Mirror(remote, there, tmp_path / "there-aside", ALL, 1))
    for step, text in ((10, None), (20, "scheduler changed"), (30, "optimizer changed")):
        name = f"step-{step:012d}.a0001"
        fetch(remote, name, tmp_path / "here", tmp_path / "aside")
        assert read_changed_marker(tmp_path / "here" / name) == read_changed_marker(there / name) == text


def test_fetch_removes_leftovers_of_killed_fetches(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    """A large one would fill the disk otherwise, one leftover per attempt. What another one still fills stays."""
    here = tmp_path / "here"
    dead, alive = here / f".fetching-{NEWEST}.1.1", here / f".fetching-{NEWEST}.1.2"
    for path in (dead, alive):
        path.mkdir(parents=True)
        (path / "rank-00000-of-00002.safetensors").write_bytes(b"half")
        (path / ".lock").touch()
        os.utime(path, (time.time() - 600,) * 2)
    fd = os.open(alive / ".lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        fetch(remote, NEWEST, here, tmp_path / "aside")
    finally:
        os.close(fd)
    assert list_names(here) == [alive.name, NEWEST]


def test_fetch_on_full_disk_leaves_no_files(
    remote: RemoteCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, None)
    assert caught.value.code == "checkpoint-not-written"
    assert list_names(tmp_path / "here") == []
    assert sorted(remote.list_checkpoints()) == [(10, 1), (20, 1)]
    assert "MANIFEST.json" in remote.list_checkpoints()[20, 1]


def test_quarantined_remote_copy_is_uploaded_again_completely(remote: RemoteCheckpoints, tmp_path: Path) -> None:
    """Its objects have the right sizes, and say that they have the right digests."""
    name = f"{NEWEST}/rank-00000-of-00002.safetensors"
    found = remote.objects.head(name)
    wrong = bytearray(remote.objects.get(name, 1 << 20))
    wrong[-3] ^= 1
    assert found.digest is not None
    remote.objects.put(name, [bytes(wrong)], found.size, found.digest)
    assert fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, (10, 1)).fetched is None
    run(Mirror(remote, tmp_path / "there", tmp_path / "there-aside", ALL, 2))
    found_now = fetch_newest(remote, tmp_path / "here", tmp_path / "aside", ALL, (10, 1))
    assert found_now.fetched is not None and found_now.fetched.step == 20
    assert "MANIFEST.json.quarantined" not in remote.list_checkpoints()[20, 1]


def test_mirror_keeps_newest_copy_of_lineage(tmp_path: Path) -> None:
    """What is newer here is damaged, so it has no copy; what is newer there was left behind by a resume, and pruned."""
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    here = tmp_path / "here"
    first = make_chain(here, 50, 100)
    run(Mirror(remote, here, tmp_path / "aside", ALL, 1))
    lineage = [Segment(attempt=2, after_step=50), Segment(attempt=1, after_step=0, until_step=50)]
    own = make_chain(here, 60, attempt=2, parent=first[0].base)
    mirror = Mirror(remote, here, tmp_path / "aside", lineage, 2)
    run(mirror)
    (damaged,) = make_chain(here, 70, attempt=2, parent=own[0].base)
    file = here / damaged.id / damaged.files[0].name
    file.write_bytes(file.read_bytes()[:-1])
    delete(here / first[1].id)
    delete(here / own[0].id)
    run(mirror)
    whole = sorted(one for one, held in remote.list_checkpoints().items() if "MANIFEST.json" in held)
    assert whole == [(50, 1), (60, 2)]


def test_local_checkpoint_that_no_rank_would_start_from_hides_no_good_copy(
    remote: RemoteCheckpoints, tmp_path: Path
) -> None:
    """The ranks quarantine a checkpoint of another job, and one whose parent is not in the lineage."""
    here = tmp_path / "here"
    make_checkpoint(here, step=30, job_id="job-other0000000")
    assert newest_local(here, ALL, expected_job_id=JOB) is None
    fetched = fetch_newest(remote, here, tmp_path / "aside", ALL, newest_local(here, ALL, expected_job_id=JOB)).fetched
    assert fetched is not None and fetched.step == 20
    assert newest_local(here, ALL, expected_job_id=JOB, root=Base()) == (20, 1)
    make_checkpoint(here, step=40, parent=Base(step=35, attempt=9, digest="0" * 64))
    assert newest_local(here, ALL, expected_job_id=JOB, root=Base()) == (20, 1)


def test_upload_whose_record_cannot_be_written_is_reported_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    make_chain(tmp_path / "there", 10)
    mirror = Mirror(remote, tmp_path / "there", tmp_path / "there-aside", ALL, 1)
    full = CheckpointError("no space left", code="checkpoint-not-written")

    def fail(*_: Any, **__: Any) -> None:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(Record, "add", fail)
        with pytest.raises(CheckpointError, match="no space left"):
            mirror.step()
    assert mirror.pending() == ["step-000000000010.a0001"]
    uploaded = mirror.step().uploaded
    assert uploaded is not None and uploaded.manifest.step == 10
    delete(tmp_path / "there" / "step-000000000010.a0001")
    make_chain(tmp_path / "there", 20)
    removed = [one for _ in range(4) for one in mirror.step().removed]
    assert removed == [(10, 1)], "a copy without a record would stay in the store"


def test_object_deleted_after_the_store_was_listed_is_sent_again(tmp_path: Path) -> None:
    remote = RemoteCheckpoints(ObjectStore(MemoryStore(), "memory://x"), JOB)
    make_chain(tmp_path / "there", 10)
    mirror = Mirror(remote, tmp_path / "there", tmp_path / "there-aside", ALL, 1)
    run(mirror)
    folder = "step-000000000010.a0001"
    remote.objects.delete([f"{folder}/MANIFEST.json"])
    mirror = Mirror(remote, tmp_path / "there", tmp_path / "there-aside", ALL, 1)
    mirror._list_remote()
    remote.objects.delete([f"{folder}/rank-00000-of-00002.safetensors"])
    step = mirror.step()
    assert step.failed is None and step.uploaded is not None
    assert fetch(remote, folder, tmp_path / "here", tmp_path / "aside").step == 10
