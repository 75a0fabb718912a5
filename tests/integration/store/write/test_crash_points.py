"""Power lost, or the process killed, at every single system call of a save, of marks, of a deletion and of a quarantine.

Each test prints how many states of a disk it has looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import Conflict
from ratchet_contract.paths import PINNED_NAME, VERIFIED_NAME, HomePaths, checkpoint_dir_name
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_service.db.models import Checkpoint
from ratchet_service.usecases.checkpoints import _mark_verified as mark_verified
from ratchet_service.usecases.checkpoints import set_pin
from ratchet_store.format.manifest_file import checkpoint_dirs, mark_finished
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.read.find_base import Quarantine, find_base
from ratchet_store.retention.attempt_retention import Keeper
from ratchet_store.retention.delete import delete_unless_pinned, sweep
from tests.support.checkpoints import JOB, list_names, make_chain, make_checkpoint
from tests.support.power_loss import Recorder, disk_states
from tests.support.retention import run_retention

LINEAGE = [Segment(attempt=1, after_step=0)]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    (tmp_path / "disk").mkdir()
    return Recorder(tmp_path / "disk")


def outcomes(recorder: Recorder, tmp_path: Path, seeds: int = 3, first: int = 0) -> Iterator[tuple[int, str, Path]]:
    """Every outcome of a power loss after every operation from the ``first`` on, laid out on a real disk."""
    target, states = tmp_path / "after", 0
    for count in range(first, len(recorder.ops) + 1):
        for name in disk_states(recorder.ops, count, target, seeds):
            states += 1
            yield count, name, target
            shutil.rmtree(target)
    print(f"{states} states of a disk after a loss of power at every one of {len(recorder.ops) - first} system calls")


def base(root: Path) -> tuple[Manifest | None, list[Quarantine]]:
    return find_base(root / "checkpoints", root / "quarantine", LINEAGE)


def test_every_crash_point_of_saves_leaves_the_old_or_the_new_checkpoint(recorder: Recorder, tmp_path: Path) -> None:
    checkpoints = recorder.root / "checkpoints"
    saved: list[Manifest] = []
    with recorder.recording():
        for step in (10, 20, 30):
            saved.append(make_checkpoint(checkpoints, step, parent=saved[-1].base if saved else None))
            recorder.mark(len(saved))
    seen: dict[int, set[int]] = {}
    for count, name, root in outcomes(recorder, tmp_path):
        acknowledged = max((n for at, n in recorder.marks if at <= count), default=0)
        manifest, moved = base(root)
        index = saved.index(manifest) + 1 if manifest else 0
        assert index in (acknowledged, acknowledged + 1), name
        assert moved == [], f"{name}: a half-written checkpoint counted"
        seen.setdefault(acknowledged, set()).add(index)
        assert (
            sum(verify(d).ok for _, _, d in checkpoint_dirs(root / "checkpoints") if (d / "MANIFEST.json").exists())
            == index
        )
    assert len(recorder.ops) > 50 and seen == {0: {0, 1}, 1: {1, 2}, 2: {2, 3}, 3: {3}}


def test_crash_points_of_a_deletion_keep_the_retained_checkpoints(recorder: Recorder, tmp_path: Path) -> None:
    checkpoints = recorder.root / "checkpoints"
    with recorder.recording():
        chain = make_chain(checkpoints, 10, 20, 30, 40)
        start = len(recorder.ops)
        assert run_retention(checkpoints, keep_last=2, lineage=LINEAGE) == [(10, 1), (20, 1)]
    kept = [manifest.id for manifest in chain[2:]]
    for _, name, root in outcomes(recorder, tmp_path, first=start):
        left = {directory.name: directory for _, _, directory in checkpoint_dirs(root / "checkpoints")}
        for directory in left.values():
            if (directory / "MANIFEST.json").exists():
                assert verify(directory).ok, f"{name}: {directory.name} looks committed and is not whole"
        assert base(root) == (chain[3], []), name
        swept = sweep(root / "checkpoints", dead_attempts={1})
        whole = {d for d in left if d not in swept}
        assert set(kept) <= whole and set(list_names(root / "checkpoints")) == whole, name
    assert list_names(checkpoints) == kept


def test_crash_points_of_the_saving_thread_keep_acknowledged_checkpoints(recorder: Recorder, tmp_path: Path) -> None:
    """Commit, acknowledge, delete, commit the next: with a pin, a multiple and the base of the attempt among what stays."""
    checkpoints = recorder.root / "checkpoints"
    spec = CheckpointSpec(keep_last=2, keep_every=15)
    saved: list[Manifest] = []
    deleted: list[tuple[int, str]] = []  # (number of operations before, name)
    with recorder.recording():
        first = make_checkpoint(checkpoints, 5)
        saved.append(first)
        recorder.mark(1)
        keeper = Keeper(checkpoints, spec, 1, [(5, 1)])
        for step in (10, 15, 20, 25, 30):
            saved.append(make_checkpoint(checkpoints, step, parent=saved[-1].base))
            recorder.mark(len(saved))
            if step == 10:
                mark = os.open(checkpoints / saved[-1].id / PINNED_NAME, os.O_CREAT | os.O_WRONLY)
                os.fsync(mark)
                os.close(mark)
                fsync_path(checkpoints / saved[-1].id)
                pinned_at = len(recorder.ops)
            before = len(recorder.ops)
            deleted += [(before, checkpoint_dir_name(*one)) for one in keeper.on_committed(saved[-1]).deleted]
    assert [name for _, name in deleted] == [checkpoint_dir_name(20, 1)]
    for count, name, root in outcomes(recorder, tmp_path, seeds=1):
        acknowledged = max((n for at, n in recorder.marks if at <= count), default=0)
        manifest, moved = base(root)
        assert moved == [], name
        assert (saved.index(manifest) + 1 if manifest else 0) in (acknowledged, acknowledged + 1), name
        kept = {m.id for m in saved[:acknowledged]} - {old for at, old in deleted if at < count}
        there = {d.name for _, _, d in checkpoint_dirs(root / "checkpoints") if (d / "MANIFEST.json").exists()}
        assert kept <= there, name
        if count >= deleted[0][0]:
            assert all(verify(root / "checkpoints" / one).ok for one in there), name
        assert count < pinned_at or (root / "checkpoints" / saved[1].id / PINNED_NAME).exists(), name


def set_pinned(homes: HomePaths, step: int, pinned: bool = True) -> bool:
    """As the API does it: was it answered?"""
    try:
        set_pin(None, Checkpoint(job_id=JOB, step=step, attempt=1, pinned=not pinned), pinned, homes)  # type: ignore[arg-type]
    except Conflict:
        return False
    return True


def test_crash_points_of_pin_and_verified_marks_keep_acknowledged_marks(recorder: Recorder, tmp_path: Path) -> None:
    """Pins, one of them taken back and made again, the marks of what was verified, and the one that a job has ended."""
    homes = HomePaths(recorder.root)
    job = homes.job(JOB)
    with recorder.recording():
        chain = make_chain(job.checkpoints, 10, 20, 30, 40, 50)
        start = len(recorder.ops)
        for step, pinned in ((10, True), (20, True), (10, False), (10, True), (20, False)):
            recorder.mark((-step, True))
            mark_verified(job.checkpoint(step, 1), pinned)
            recorder.mark((-step, pinned))  # False: it was found damaged
            recorder.mark((step, False))  # from its being asked for on, nobody relies on the one before
            assert set_pinned(homes, step, pinned)
            recorder.mark((step, pinned))
        mark_finished(job.checkpoint(50, 1))
        recorder.mark((50, True))
        assert run_retention(job.checkpoints, keep_last=2, lineage=LINEAGE) == [(20, 1), (30, 1)]
    for count, name, root in outcomes(recorder, tmp_path, seeds=2, first=start):
        found = HomePaths(root).job(JOB)
        answered = dict(mark for at, mark in recorder.marks if at <= count)
        manifest, moved = find_base(found.checkpoints, found.quarantine, LINEAGE)
        assert manifest is not None and (manifest.digest, moved) == (chain[4].digest, []), name
        assert manifest.finished or not answered.get(50), name
        for step in (10, 20):  # a verdict that was taken back does not come again: retention would rely on it
            assert answered.get(-step, True) or not (found.checkpoint(step, 1) / VERIFIED_NAME).exists(), name
        for _ in range(2):  # as it was left, and when the next attempt has cleared up
            for step in (10, 20):
                marked = (found.checkpoint(step, 1) / PINNED_NAME).exists()
                assert marked or not answered.get(step), name
                assert not answered.get(step) or verify(found.checkpoint(step, 1)).ok, name
            sweep(found.checkpoints, dead_attempts={1})
            run_retention(found.checkpoints, keep_last=2, lineage=LINEAGE)
        assert all(verify(directory).ok for _, _, directory in checkpoint_dirs(found.checkpoints)), name


@contextmanager
def before_call(number: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """``act`` right before the ``number``-th system call that looks at or changes a directory; their names are gathered."""
    calls: list[str] = []

    def wrapped(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **keywords: object) -> object:
            calls.append(name)
            if len(calls) == number:
                act()
            return real(*arguments, **keywords)

        return call

    names = ("open", "fsync", "rename", "unlink", "rmdir", "listdir", "lstat")
    with mock.patch.multiple(os, **{name: wrapped(name, getattr(os, name)) for name in names}):
        yield calls


@pytest.mark.parametrize("outer", ["deletion", "pin"])
def test_crash_points_of_a_deletion_racing_a_pin_keep_an_acknowledged_pin(tmp_path: Path, outer: str) -> None:
    """The one comes before each system call of the other in turn. What is answered no loss of power takes, nor a byte of it."""
    number, kept, refused = 0, 0, 0
    while True:
        number += 1
        recorder = Recorder(tmp_path / "disk")
        recorder.root.mkdir()
        directory = HomePaths(recorder.root).job(JOB).checkpoint(10, 1)
        answers, deletions = list[bool](), list[bool]()

        def pin(recorder: Recorder = recorder, answers: list[bool] = answers) -> None:
            answers.append(set_pinned(HomePaths(recorder.root), 10))
            recorder.mark("answered")

        def delete(directory: Path = directory, deletions: list[bool] = deletions) -> None:
            deletions.append(delete_unless_pinned(directory))

        with recorder.recording():
            newest = make_chain(directory.parent, 10, 20)[1]
            start = len(recorder.ops)
            act, other = (delete, pin) if outer == "deletion" else (pin, delete)
            with before_call(number, other):
                act()
        if not answers or not deletions:
            break
        assert deletions != answers
        kept, refused = kept + answers[0], refused + (not answers[0])
        for count, name, root in outcomes(recorder, tmp_path, seeds=1, first=start):
            found = HomePaths(root).job(JOB)
            assert find_base(found.checkpoints, found.quarantine, LINEAGE) == (newest, []), name
            sweep(found.checkpoints, dead_attempts={1})
            there = found.checkpoint(10, 1)
            assert not there.exists() or verify(there).ok, name
            if answers[0] and count >= recorder.marks[0][0]:
                assert (there / PINNED_NAME).exists(), f"call {number} of the {outer}: {name}"
        shutil.rmtree(recorder.root)
    print(
        f"before each of {kept + refused} system calls of the {outer}: {kept} pins answered and kept, {refused} refused"
    )
    assert kept and refused


@pytest.mark.parametrize("pinned", [False, True])
def test_crash_points_of_a_quarantine_leave_the_older_checkpoint_as_base(
    recorder: Recorder, tmp_path: Path, pinned: bool
) -> None:
    """Of two damaged ones, whose bytes are kept to be looked at; a pin goes with what it is of."""
    homes = HomePaths(recorder.root)
    job = homes.job(JOB)
    with recorder.recording():
        chain = make_chain(job.checkpoints, 10, 20, 30)
        if pinned:
            assert set_pinned(homes, 20)
        for manifest in chain[1:]:
            fd = os.open(job.checkpoints / manifest.id / manifest.files[0].name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(fd, b"damage")
            os.fsync(fd)
            os.close(fd)
        start = len(recorder.ops)
        base, moved = find_base(job.checkpoints, job.quarantine, LINEAGE)
        assert base == chain[0] and [one.step for one in moved] == [30, 20]
    for _, name, root in outcomes(recorder, tmp_path, first=start):
        found = HomePaths(root).job(JOB)
        assert find_base(found.checkpoints, found.quarantine, LINEAGE)[0] == chain[0], name
        assert list_names(found.quarantine) == [manifest.id for manifest in chain[1:]], name
        for manifest in chain[1:]:
            assert (found.quarantine / manifest.id / manifest.files[0].name).read_bytes() == b"damage", name
        assert (found.quarantine / chain[1].id / PINNED_NAME).exists() == pinned, name


def _kill_at(k: int, act: Callable[[], object]) -> bool:
    """Fork; the child ends without any clean-up just before its k-th system call that changes a file. False: it finished."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            left = [k]
            for call in ("open", "write", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir"):
                setattr(os, call, _counted(getattr(os, call), left))
            act()
        finally:
            os._exit(0 if left[0] > 0 else 7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def _counted(real: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def wrapper(*arguments: object, **keywords: object) -> object:
        left[0] -= 1
        if left[0] <= 0:
            os._exit(7)
        return real(*arguments, **keywords)

    return wrapper


def test_process_killed_at_any_system_call_leaves_old_or_new_checkpoint(tmp_path: Path) -> None:
    killed, found = 0, set()
    for k in range(1, 200):
        root = tmp_path / str(k)
        chain = make_chain(root / "checkpoints", 10, 20, 30)

        def save_and_delete(root: Path = root, parent: Manifest = chain[2]) -> None:
            make_checkpoint(root / "checkpoints", 40, parent=parent.base)
            run_retention(root / "checkpoints", keep_last=2, lineage=LINEAGE)

        died = _kill_at(k, save_and_delete)
        killed += died
        manifest, moved = base(root)
        assert manifest is not None and moved == []
        found.add(manifest.step)
        sweep(root / "checkpoints", dead_attempts={1})
        left = list_names(root / "checkpoints")
        assert {checkpoint_dir_name(s, 1) for s in ((20, 30) if manifest.step == 30 else (30, 40))} <= set(left)
        assert all(verify(root / "checkpoints" / name).ok for name in left)
        shutil.rmtree(root)
        if not died:
            break
    assert killed > 30 and found == {30, 40}
