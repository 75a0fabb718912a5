"""What deleting keeps, and that nobody ever loads what is half deleted."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import (
    DELETED_MANIFEST_NAME,
    MANIFEST_NAME,
    PINNED_NAME,
    JobPaths,
    checkpoint_dir_name,
    parse_checkpoint_dir_name,
)
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.read.find_base import find_base
from ratchet_store.retention import delete as retain_module
from ratchet_store.retention.delete import delete, delete_all, delete_unless_pinned, sweep
from tests.support.checkpoints import copy_checkpoint, list_names, make_chain, make_checkpoint, write_ranks
from tests.support.retention import run_retention

LINEAGE = [Segment(attempt=2, after_step=20), Segment(attempt=1, after_step=0, until_step=20)]


def ids(checkpoints: Path) -> set[tuple[int, int]]:
    return {parsed for name in list_names(checkpoints) if (parsed := parse_checkpoint_dir_name(name))}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attempt 1: 10, 20 and 30 (a zombie's); attempt 2, from 20: 30 to 70."""
    checkpoints = tmp_path_factory.mktemp("disk")
    chain = make_chain(checkpoints, 10, 20, 30)
    make_chain(checkpoints, 30, 40, 50, 60, 70, attempt=2, parent=chain[1].base)
    return checkpoints


ALL = [(10, 1), (20, 1), (30, 1), (30, 2), (40, 2), (50, 2), (60, 2), (70, 2)]
OWN = [one for one in ALL if one != (30, 1)]


@settings(max_examples=40, deadline=None)
@given(
    keep_last=st.integers(-1, 9),
    pinned=st.sets(st.sampled_from(ALL)),
    protected=st.sets(st.sampled_from(ALL)),
    broken=st.sets(st.sampled_from(ALL), max_size=3),
)
def test_retain_keeps_last_pinned_and_protected_checkpoints(
    disk: Path,
    keep_last: int,
    pinned: set[tuple[int, int]],
    protected: set[tuple[int, int]],
    broken: set[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = copy_checkpoint(disk, Path(folder) / "checkpoints")
        for step, number in broken:
            next((checkpoints / checkpoint_dir_name(step, number)).glob("rank-00000*")).unlink()
        deleted = run_retention(checkpoints, keep_last=keep_last, lineage=LINEAGE, pinned=pinned, protected=protected)
        assert ids(checkpoints) == set(ALL) - set(deleted)
        assert not set(deleted) & (pinned | protected | broken | {(30, 1)})
        countable = [one for one in OWN if one not in pinned | broken]
        newest = countable[-max(keep_last, 2) :]
        assert not set(deleted) & set(newest)
        assert deleted == [one for one in countable if one not in newest and one not in protected]
        assert all((checkpoints / checkpoint_dir_name(*one) / MANIFEST_NAME).exists() for one in ids(checkpoints))


def test_retain_and_sweep_accept_missing_directory(tmp_path: Path) -> None:
    assert run_retention(tmp_path / "none", keep_last=2, lineage=LINEAGE) == []
    assert sweep(tmp_path / "none", dead_attempts={1}) == []


def test_base_checkpoint_survives_while_protected(tmp_path: Path) -> None:
    base = make_chain(tmp_path, 10, 20)[1]
    lineage = [Segment(attempt=2, after_step=20), Segment(attempt=1, after_step=0, until_step=20)]
    parent = base.base
    for step in (30, 40, 50):
        parent = make_checkpoint(tmp_path, step, 2, parent=parent).base
        run_retention(tmp_path, keep_last=2, lineage=lineage, protected=[(20, 1)])
        assert (20, 1) in ids(tmp_path)
    assert ids(tmp_path) == {(20, 1), (40, 2), (50, 2)}
    assert run_retention(tmp_path, keep_last=2, lineage=lineage) == [(20, 1)]


def test_pinned_marker_file_protects_checkpoint(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 10, 20, 30, 40)
    (tmp_path / chain[0].id / PINNED_NAME).touch()
    assert run_retention(tmp_path, keep_last=2, lineage=[Segment(attempt=1, after_step=0)]) == [(20, 1)]
    assert verify(tmp_path / chain[0].id).ok


def test_sweep_removes_only_uncommitted_or_half_deleted_checkpoints(tmp_path: Path) -> None:
    make_chain(tmp_path, 10, 20)
    half = tmp_path / checkpoint_dir_name(10, 1)
    (half / MANIFEST_NAME).rename(half / DELETED_MANIFEST_NAME)
    for attempt in (1, 2):
        directory = tmp_path / checkpoint_dir_name(30, attempt)
        write_ranks(directory)
        (directory / "rank-00001-of-00002.safetensors.tmp").write_bytes(b"torn")
    committed = tmp_path / checkpoint_dir_name(20, 1)
    (committed / "MANIFEST.json.tmp").write_bytes(b"{")
    (tmp_path / "notes.txt").write_text("mine")
    removed = sweep(tmp_path, dead_attempts={1})
    assert sorted(removed) == [half.name, f"{committed.name}/MANIFEST.json.tmp", checkpoint_dir_name(30, 1)]
    assert list_names(tmp_path) == ["notes.txt", committed.name, checkpoint_dir_name(30, 2)]
    found = find_base(tmp_path, tmp_path / "quarantine", [Segment(attempt=1, after_step=0)])
    assert found[0] is not None and found[0].step == 20 and found[1] == []


def test_delete_removes_symlinks_without_following(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints" / make_checkpoint(tmp_path / "checkpoints", 10).id
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (directory / "link").symlink_to(outside)
    (directory / "sub").mkdir()
    (directory / "sub" / "file").write_text("x")
    delete(directory)
    assert not directory.exists() and (outside / "precious").exists()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("how", ["delete", "delete_unless_pinned", "delete_all"])
def test_deletion_of_linked_checkpoint_removes_only_the_link(tmp_path: Path, how: str, pinned: bool) -> None:
    """``pinned``: by the job whose checkpoint it is."""
    theirs = tmp_path / "a" / "checkpoints" / make_checkpoint(tmp_path / "a" / "checkpoints", 20).id
    if pinned:
        (theirs / PINNED_NAME).touch()
    job = JobPaths(tmp_path / "b")
    job.checkpoints.mkdir(parents=True)
    link = job.checkpoints / theirs.name
    link.symlink_to(theirs)
    if how == "delete_all":
        assert delete_all(job) == [(20, 1)]
    elif how == "delete_unless_pinned":
        assert delete_unless_pinned(link)
    else:
        delete(link)
    assert not os.path.lexists(link)
    assert verify(theirs).ok and sweep(theirs.parent, dead_attempts={1}) == []


def test_retention_does_not_count_linked_checkpoints(tmp_path: Path) -> None:
    make_chain(tmp_path / "a", 10, 20, 30, 40)
    own = tmp_path / "b"
    make_chain(own, 10, 20)
    for step in (30, 40):
        (own / checkpoint_dir_name(step, 1)).symlink_to(tmp_path / "a" / checkpoint_dir_name(step, 1))
    assert run_retention(own, keep_last=2, lineage=[Segment(attempt=1, after_step=0)]) == []
    assert ids(own) == {(10, 1), (20, 1), (30, 1), (40, 1)}


@pytest.mark.parametrize("name", [f"{MANIFEST_NAME}.tmp", DELETED_MANIFEST_NAME])
def test_sweep_does_not_follow_links(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "a" / make_checkpoint(tmp_path / "a", 20).id
    (theirs / MANIFEST_NAME).rename(theirs / name)
    before = list_names(theirs)
    own = tmp_path / "b"
    own.mkdir()
    (own / theirs.name).symlink_to(theirs)
    assert sweep(own, dead_attempts={1}) == []
    assert list_names(theirs) == before and ids(own) == {(20, 1)}


def test_refused_deletion_is_reported_and_finished_by_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chain(tmp_path, 10, 20, 30)

    def fail(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(CheckpointError, match="was not deleted completely: Operation not permitted"):
        run_retention(tmp_path, keep_last=2, lineage=[Segment(attempt=1, after_step=0)])
    monkeypatch.undo()
    assert not (tmp_path / checkpoint_dir_name(10, 1) / MANIFEST_NAME).exists()
    assert sweep(tmp_path, dead_attempts=()) == [checkpoint_dir_name(10, 1)]
    assert ids(tmp_path) == {(20, 1), (30, 1)}


@pytest.mark.parametrize("first", [True, False])
def test_delete_succeeds_when_another_process_finishes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """``first``: it has taken the manifest away as well."""
    make_chain(tmp_path, 10, 20)
    directory = tmp_path / checkpoint_dir_name(10, 1)
    if first:
        (directory / MANIFEST_NAME).unlink()
    real = retain_module.fsync_path

    def sync(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        real(folder)

    monkeypatch.setattr(retain_module, "fsync_path", sync)
    delete(directory)
    assert ids(tmp_path) == {(20, 1)}


def test_delete_all_removes_checkpoints_and_quarantine_of_job(tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "job")
    make_chain(job.checkpoints, 10, 20, parent=Base())
    (job.quarantine / "x").mkdir(parents=True)
    job.attempt(1).root.mkdir(parents=True)
    assert delete_all(job) == [(10, 1), (20, 1)]
    assert list_names(job.root) == ["attempts"]
    assert delete_all(job) == []


def test_delete_all_removes_files_that_are_named_like_checkpoints(tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "job")
    make_chain(job.checkpoints, 10)
    (job.checkpoints / checkpoint_dir_name(20, 1)).write_text("no directory")
    assert delete_all(job) == [(10, 1), (20, 1)]
    assert list_names(job.root) == []
