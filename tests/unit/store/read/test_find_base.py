"""An attempt starts from the newest good checkpoint of its own lineage, and from nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import FORMAT, UNREADABLE, refresh
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read import find_base as lineage
from ratchet_store.read.find_base import find_adoptable, find_base
from tests.support.checkpoints import JOB, list_names, make_chain, make_checkpoint, write_ranks

FIRST = [Segment(attempt=1, after_step=0)]


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


def test_base_without_checkpoints_is_none(job: JobPaths) -> None:
    assert base_id(job, FIRST) is None
    assert base_id(job, []) is None


def test_base_is_newest_committed_checkpoint_of_lineage(job: JobPaths) -> None:
    make_chain(job.checkpoints, 10, 20)
    write_ranks(job.checkpoints / checkpoint_dir_name(30, 1))
    (job.checkpoints / "notes").mkdir()
    assert base_id(job, FIRST) == checkpoint_dir_name(20, 1)
    assert base_id(job, []) is None


def test_damaged_checkpoint_is_quarantined_and_previous_one_used(job: JobPaths) -> None:
    chain = make_chain(job.checkpoints, 10, 20, 30)
    damage(job, chain[2])
    (job.checkpoints / chain[1].id / MANIFEST_NAME).write_text("{")
    kept = {path.name: path.read_bytes() for path in (job.checkpoints / chain[2].id).iterdir()}
    manifest, moved = find_base(job.checkpoints, job.quarantine, FIRST)
    assert manifest == chain[0]
    assert [(q.step, q.attempt) for q in moved] == [(30, 1), (20, 1)]
    assert "do not match their XXH3-128" in moved[0].error and "not valid JSON" in moved[1].error
    assert {path.name: path.read_bytes() for path in (job.quarantine / chain[2].id).iterdir()} == kept
    assert list_names(job.checkpoints) == [chain[0].id]


def test_quarantine_never_overwrites(job: JobPaths) -> None:
    for _ in range(3):
        damage(job, make_checkpoint(job.checkpoints, 10))
        assert find_base(job.checkpoints, job.quarantine, FIRST)[0] is None
    name = checkpoint_dir_name(10, 1)
    assert list_names(job.quarantine) == [name, f"{name}.1", f"{name}.2"]


def test_base_ignores_superseded_attempts_and_abandoned_branches(job: JobPaths) -> None:
    chain = make_chain(job.checkpoints, 10, 20, 30)  # attempt 1; 30 was written after attempt 2 had started from 20
    second = make_chain(job.checkpoints, 25, attempt=2, parent=chain[1].base)
    lineage = [Segment(attempt=2, after_step=20), Segment(attempt=1, after_step=0, until_step=20)]
    assert base_id(job, lineage) == second[0].id
    # resume from_step=10: attempt 3 starts from 10.a1 although 20, 25 and 30 are there
    assert base_id(job, [Segment(attempt=1, after_step=9, until_step=10)]) == chain[0].id
    third = make_chain(job.checkpoints, 15, attempt=3, parent=chain[0].base)
    lineage = [Segment(attempt=3, after_step=10), Segment(attempt=1, after_step=0, until_step=10)]
    assert base_id(job, lineage) == third[0].id
    assert {path.name for path in job.checkpoints.iterdir()} == {m.id for m in [*chain, *second, *third]}


def test_base_is_chosen_by_lineage_not_by_attempt_number(job: JobPaths) -> None:
    newest = make_checkpoint(job.checkpoints, 20, 1, parent=Base())
    make_checkpoint(job.checkpoints, 10, 2, parent=Base())
    assert base_id(job, [Segment(attempt=2, after_step=0)]) == checkpoint_dir_name(10, 2)
    assert base_id(job, FIRST) == newest.id


@pytest.mark.parametrize(
    "parent",
    [
        Base(step=10, attempt=1, digest="0" * 64),
        Base(step=15, attempt=1, digest="0" * 64),
        Base(),
        Base(step=30, attempt=9),
    ],
    ids=["other digest", "other step", "scratch", "later"],
)
def test_manifest_with_foreign_parent_is_quarantined(job: JobPaths, parent: Base) -> None:
    first = make_checkpoint(job.checkpoints, 10)
    make_checkpoint(job.checkpoints, 20, 2, parent=parent)
    lineage = [Segment(attempt=2, after_step=10), Segment(attempt=1, after_step=0, until_step=10)]
    manifest, moved = find_base(job.checkpoints, job.quarantine, lineage)
    assert manifest == first and [(q.step, q.attempt) for q in moved] == [(20, 2)]
    assert "descends from" in moved[0].error


def test_base_with_parent_deleted_by_retention_is_accepted(job: JobPaths) -> None:
    gone = Base(step=10, attempt=1, digest="a" * 64)
    second = make_checkpoint(job.checkpoints, 20, 2, parent=gone)
    lineage = [Segment(attempt=2, after_step=10), Segment(attempt=1, after_step=0, until_step=10)]
    assert base_id(job, lineage) == second.id


def test_base_of_forked_job_descends_from_fork_source(job: JobPaths) -> None:
    source = Base(step=500, attempt=4, digest="f" * 64)  # of another job
    fork = make_checkpoint(job.checkpoints, 510, 1, parent=source)
    lineage = [Segment(attempt=1, after_step=500)]
    assert base_id(job, lineage) == base_id(job, lineage, root=source) == fork.id
    manifest, moved = find_base(
        job.checkpoints, job.quarantine, lineage, root=Base(step=500, attempt=4, digest="e" * 64)
    )
    assert manifest is None and "descends from step 500" in moved[0].error


def test_checkpoint_of_another_job_is_quarantined(job: JobPaths) -> None:
    make_checkpoint(job.checkpoints, 10, job_id="job-2")
    manifest, moved = find_base(job.checkpoints, job.quarantine, FIRST, expected_job_id=JOB)
    assert manifest is None and "belongs to job job-2" in moved[0].error


@pytest.mark.parametrize("version", [1, 99])
def test_other_format_version_raises_instead_of_falling_back(job: JobPaths, version: int) -> None:
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
    with pytest.raises(CheckpointError, match="No older checkpoint was used") as caught:
        find_base(job.checkpoints, job.quarantine, FIRST)
    monkeypatch.undo()
    assert caught.value.code == UNREADABLE
    assert not job.quarantine.exists() and len(list_names(job.checkpoints)) == 2


def test_base_search_refreshes_stale_nfs_lookups(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_valid_unreported_checkpoints_are_adoptable_oldest_first(job: JobPaths) -> None:
    chain = make_chain(job.checkpoints, 10, 20, 30, 40)
    zombie = make_checkpoint(job.checkpoints, 50, 7)
    damage(job, chain[2])
    found = find_adoptable(job.checkpoints, FIRST, {(10, 1)}, expected_job_id=JOB)
    assert found == [chain[1], chain[3]] and zombie not in found
    assert len(list_names(job.checkpoints)) == 5


def test_adopted_checkpoint_is_synced_before_adoption(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank 0 may have been killed between the rename and the sync. No disk here forgets what was not synced; that the call
    is made stands for it, and the power-loss model for what the call does."""
    synced: list[Path] = []
    monkeypatch.setattr(lineage, "fsync_path", synced.append)
    found = make_chain(job.checkpoints, 10, 20)
    assert find_adoptable(job.checkpoints, FIRST, {(10, 1)}, expected_job_id=JOB) == [found[1]]
    assert synced == [job.checkpoints / found[1].id, job.checkpoints]

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lineage, "fsync_path", fail)
    with pytest.raises(CheckpointError) as caught:
        find_adoptable(job.checkpoints, FIRST, {(10, 1)}, expected_job_id=JOB)
    assert caught.value.code == UNREADABLE
