"""An attempt starts from the newest good checkpoint of its own lineage, and from nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import Manifest
from ratchet_contract.paths import MANIFEST_NAME, JobPaths, checkpoint_dir_name
from ratchet_contract.resume import Base, Segment
from ratchet_store import lineage
from ratchet_store.commit import read_manifest
from ratchet_store.files import FORMAT, UNREADABLE, refresh
from ratchet_store.lineage import adoptable, find_base
from tests.support.checkpoints import JOB, make_chain, make_checkpoint, names, write_ranks

FIRST = [Segment(epoch=1, after_step=0)]


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    return JobPaths(tmp_path / "jobs" / JOB)


def base_id(job: JobPaths, lineage: list[Segment], **options: Base) -> str | None:
    manifest, moved = find_base(job.checkpoints, job.quarantine, lineage, expected_job_id=JOB, **options)
    assert moved == []
    return manifest.id if manifest else None


def damage(job: JobPaths, manifest: Manifest) -> None:
    path = job.checkpoints / manifest.id / manifest.files[-1].name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_nothing_on_disk_is_a_start_from_scratch(job: JobPaths) -> None:
    assert base_id(job, FIRST) is None
    assert base_id(job, []) is None


def test_the_newest_of_the_lineage_wins_and_uncommitted_ones_do_not_count(job: JobPaths) -> None:
    make_chain(job.checkpoints, 10, 20)
    write_ranks(job.checkpoints / checkpoint_dir_name(30, 1))
    (job.checkpoints / "notes").mkdir()
    assert base_id(job, FIRST) == checkpoint_dir_name(20, 1)
    assert base_id(job, []) is None


def test_a_damaged_checkpoint_is_moved_away_whole_and_the_previous_one_taken(job: JobPaths) -> None:
    chain = make_chain(job.checkpoints, 10, 20, 30)
    damage(job, chain[2])
    (job.checkpoints / chain[1].id / MANIFEST_NAME).write_text("{")
    kept = {path.name: path.read_bytes() for path in (job.checkpoints / chain[2].id).iterdir()}
    manifest, moved = find_base(job.checkpoints, job.quarantine, FIRST)
    assert manifest == chain[0]
    assert [(q.step, q.epoch) for q in moved] == [(30, 1), (20, 1)]
    assert "do not match their XXH3-128" in moved[0].error and "not valid JSON" in moved[1].error
    assert {path.name: path.read_bytes() for path in (job.quarantine / chain[2].id).iterdir()} == kept
    assert names(job.checkpoints) == [chain[0].id]


def test_quarantine_never_overwrites(job: JobPaths) -> None:
    for _ in range(3):
        damage(job, make_checkpoint(job.checkpoints, 10))
        assert find_base(job.checkpoints, job.quarantine, FIRST)[0] is None
    name = checkpoint_dir_name(10, 1)
    assert names(job.quarantine) == [name, f"{name}.1", f"{name}.2"]


def test_a_zombie_and_an_abandoned_branch_do_not_count(job: JobPaths) -> None:
    chain = make_chain(job.checkpoints, 10, 20, 30)  # attempt 1; 30 was written after attempt 2 had started from 20
    second = make_chain(job.checkpoints, 25, epoch=2, parent=chain[1].base)
    lineage = [Segment(epoch=2, after_step=20), Segment(epoch=1, after_step=0, until_step=20)]
    assert base_id(job, lineage) == second[0].id
    # resume from_step=10: attempt 3 starts from 10.a1 although 20, 25 and 30 are there
    assert base_id(job, [Segment(epoch=1, after_step=9, until_step=10)]) == chain[0].id
    third = make_chain(job.checkpoints, 15, epoch=3, parent=chain[0].base)
    lineage = [Segment(epoch=3, after_step=10), Segment(epoch=1, after_step=0, until_step=10)]
    assert base_id(job, lineage) == third[0].id
    assert {path.name for path in job.checkpoints.iterdir()} == {m.id for m in [*chain, *second, *third]}


def test_the_epoch_decides_nothing_the_lineage_does(job: JobPaths) -> None:
    newest = make_checkpoint(job.checkpoints, 20, 1, parent=Base())
    make_checkpoint(job.checkpoints, 10, 2, parent=Base())
    assert base_id(job, [Segment(epoch=2, after_step=0)]) == checkpoint_dir_name(10, 2)
    assert base_id(job, FIRST) == newest.id


@pytest.mark.parametrize(
    "parent",
    [Base(step=10, epoch=1, digest="0" * 64), Base(step=15, epoch=1, digest="0" * 64), Base(), Base(step=30, epoch=9)],
    ids=["other digest", "other step", "scratch", "later"],
)
def test_a_manifest_that_descends_from_elsewhere_is_no_base(job: JobPaths, parent: Base) -> None:
    first = make_checkpoint(job.checkpoints, 10)
    make_checkpoint(job.checkpoints, 20, 2, parent=parent)
    lineage = [Segment(epoch=2, after_step=10), Segment(epoch=1, after_step=0, until_step=10)]
    manifest, moved = find_base(job.checkpoints, job.quarantine, lineage)
    assert manifest == first and [(q.step, q.epoch) for q in moved] == [(20, 2)]
    assert "descends from" in moved[0].error


def test_a_parent_that_retention_deleted_is_fine(job: JobPaths) -> None:
    gone = Base(step=10, epoch=1, digest="a" * 64)
    second = make_checkpoint(job.checkpoints, 20, 2, parent=gone)
    lineage = [Segment(epoch=2, after_step=10), Segment(epoch=1, after_step=0, until_step=10)]
    assert base_id(job, lineage) == second.id


def test_a_forked_job_descends_from_its_source(job: JobPaths) -> None:
    source = Base(step=500, epoch=4, digest="f" * 64)  # of another job
    fork = make_checkpoint(job.checkpoints, 510, 1, parent=source)
    lineage = [Segment(epoch=1, after_step=500)]
    assert base_id(job, lineage) == base_id(job, lineage, root=source) == fork.id
    manifest, moved = find_base(job.checkpoints, job.quarantine, lineage, root=Base(step=500, epoch=4, digest="e" * 64))
    assert manifest is None and "descends from step 500" in moved[0].error


def test_another_jobs_checkpoint_is_no_base(job: JobPaths) -> None:
    make_checkpoint(job.checkpoints, 10, job_id="job-2")
    manifest, moved = find_base(job.checkpoints, job.quarantine, FIRST, expected_job_id=JOB)
    assert manifest is None and "belongs to job job-2" in moved[0].error


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_stops_instead_of_falling_back(job: JobPaths, version: int) -> None:
    chain = make_chain(job.checkpoints, 10, 20)
    path = job.checkpoints / chain[1].id / MANIFEST_NAME
    data = json.loads(path.read_bytes()) | {"format_version": version}
    del data["digest"]
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(data | {"digest": digest}))
    with pytest.raises(CheckpointError, match="use the version that wrote it") as caught:
        find_base(job.checkpoints, job.quarantine, FIRST)
    assert caught.value.code == FORMAT
    assert not job.quarantine.exists()


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_an_unreadable_checkpoint_stops_instead_of_falling_back(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    make_chain(job.checkpoints, 10, 20)

    def fail(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError, match="Nothing older was chosen") as caught:
        find_base(job.checkpoints, job.quarantine, FIRST)
    monkeypatch.undo()
    assert caught.value.code == UNREADABLE
    assert not job.quarantine.exists() and len(names(job.checkpoints)) == 2


def test_what_a_client_still_believes_to_be_absent_is_asked_for(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an NFS client may, for a minute after another node's commit: the newest would be passed over without a word."""
    chain = make_chain(job.checkpoints, 10, 20)
    newest, asked = job.checkpoints / chain[1].id, set[Path]()
    real = os.open

    def stale(path: Path, *more: Any, **keywords: Any) -> int:
        if Path(path) == newest / MANIFEST_NAME and newest not in asked:
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, *more, **keywords)

    monkeypatch.setattr(os, "open", stale)
    with pytest.raises(CheckpointError):
        read_manifest(newest)
    monkeypatch.setattr(lineage, "refresh", lambda path: (refresh(path), asked.add(path)))
    assert base_id(job, FIRST) == chain[1].id
    refresh(job.root / "not there")


def test_a_quarantine_that_fails_stops_instead_of_falling_back(job: JobPaths) -> None:
    damage(job, make_chain(job.checkpoints, 10, 20)[1])
    job.quarantine.write_text("in the way")
    with pytest.raises(CheckpointError, match="move it away by hand"):
        find_base(job.checkpoints, job.quarantine, FIRST)


def test_valid_checkpoints_that_nobody_reported_are_adoptable_oldest_first(job: JobPaths) -> None:
    chain = make_chain(job.checkpoints, 10, 20, 30, 40)
    zombie = make_checkpoint(job.checkpoints, 50, 7)
    damage(job, chain[2])
    found = adoptable(job.checkpoints, FIRST, {(10, 1)}, expected_job_id=JOB)
    assert found == [chain[1], chain[3]] and zombie not in found
    assert len(names(job.checkpoints)) == 5


def test_what_is_adopted_is_durable_first(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank 0 may have been killed between the rename and the sync. No disk here forgets what was not synced; that the call
    is made stands for it, and the power-loss model for what the call does."""
    synced: list[Path] = []
    monkeypatch.setattr(lineage, "fsync_dir", synced.append)
    found = make_chain(job.checkpoints, 10, 20)
    assert adoptable(job.checkpoints, FIRST, {(10, 1)}, expected_job_id=JOB) == [found[1]]
    assert synced == [job.checkpoints / found[1].id, job.checkpoints]

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lineage, "fsync_dir", fail)
    with pytest.raises(CheckpointError) as caught:
        adoptable(job.checkpoints, FIRST, {(10, 1)}, expected_job_id=JOB)
    assert caught.value.code == UNREADABLE
