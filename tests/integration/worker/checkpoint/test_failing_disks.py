"""A disk that fails beneath a real training: full, read-only, with a limit, too slow, gone. The training goes on or ends with the
cause, what was saved before is as it was, and what could not be saved is told at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet_contract.exit_codes import EXIT_CHECKPOINT_ERROR
from ratchet_contract.phases import Cause
from ratchet_store.read.compare import compare, render
from tests.support.faulty_disks import EVERY, STEPS, Place, Watched
from tests.support.launch import Attempt
from tests.support.server import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("disks"))
    with made.warm:
        yield made
        made.close()


@pytest.fixture(scope="module")
def whole(place: Place) -> Path:
    """The last checkpoint of an undisturbed run."""
    watched = place.job("whole", [])
    attempt = watched.job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert watched.committed() == list(range(EVERY, STEPS + 1, EVERY))
    return watched.checkpoints / f"step-{STEPS:012d}.a0001"


def full(place: Place, attempt: Attempt) -> Callable[[], None]:
    filler = place.warm.visible_path(place.disk / "filler")
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        for _ in range(100 << 20 >> 12):  # more than the disk holds
            file.write(bytes(4096))
    return filler.unlink


def read_only(place: Place, attempt: Attempt) -> Callable[[], None]:
    def remount(how: str) -> None:
        place.warm.run_in_mount_namespace("mount", "-o", f"remount,{how}", str(place.disk))

    remount("ro")
    return lambda: remount("rw")


def quota(place: Place, attempt: Attempt) -> Callable[[], None]:
    """A little more than one rank's file may be written, of two."""
    disk = place.loop_device("btrfs")
    disk.quota(6 << 20, 300_000)

    def make_room() -> None:
        (disk.visible_path / "filler").unlink()
        disk.sync_deletions()

    return make_room


def limited(place: Place, attempt: Attempt) -> Callable[[], None]:
    """No file grows beyond so many bytes."""
    pids = attempt.agent.ranks().values()  # type: ignore[attr-defined]

    def limit(to: int) -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (to, resource.RLIM_INFINITY))

    limit(100_000)
    return lambda: limit(resource.RLIM_INFINITY)


QUOTA = "Disk quota exceeded; the disk quota is used up: free space, lower checkpoint.keep_last, or raise the quota"
FAULTS = {"full": (full, "No space left on device; the disk is full"), "read-only": (read_only, "mounted read-only"),
          "quota": (quota, QUOTA), "limited": (limited, "the process limit")}  # fmt: skip


def job_on(place: Place, fault: str, job_id: str, held: list[int]) -> Watched:
    return place.job(job_id, held, place.loop_device("btrfs").at if fault == "quota" else None)


@pytest.mark.parametrize("name", list(FAULTS))
def test_disk_failing_for_two_saves_loses_only_these_two_saves(place: Place, whole: Path, name: str) -> None:
    fail, says = FAULTS[name]
    watched = job_on(place, name, name, [10, 18])
    attempt = watched.job.launch()
    watched.wait_held_at(attempt, 10)
    watched.wait_reported(attempt, "checkpoint", 4, 8)
    before = watched.file_contents()
    repair = fail(place, attempt)
    try:
        watched.release_step(10)
        watched.wait_held_at(attempt, 18)
        watched.wait_reported(attempt, "checkpoint_failed", 12, 16)
        assert watched.file_contents() == before
    finally:
        repair()
    watched.release_step(18)
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    failed = attempt.messages(kind="checkpoint_failed")
    assert [m.step for m in failed] == [12, 16] and all(says in m.error for m in failed), failed
    assert (
        watched.committed() == [4, 8, 20, 24, 28] and {**watched.file_contents(), **before} == watched.file_contents()
    )
    assert not list(watched.checkpoints.glob("*/*.tmp"))
    comparison = compare(whole, watched.checkpoints / whole.name)
    assert comparison.identical, render(comparison)


@pytest.mark.parametrize("name", ["read-only", "quota"])
def test_disk_that_keeps_failing_ends_attempt_and_next_one_resumes(place: Place, whole: Path, name: str) -> None:
    fail, says = FAULTS[name]
    watched = job_on(place, name, f"{name}-stays", [10])
    attempt = watched.job.launch()
    watched.wait_held_at(attempt, 10)
    watched.wait_reported(attempt, "checkpoint", 4, 8)
    before = watched.file_contents()
    repair = fail(place, attempt)
    try:
        watched.release_step(10)
        ended_by_its_saves(watched, attempt, says)
        assert watched.file_contents() == before
    finally:
        repair()
    goes_on_from_8(watched, whole)


def ended_by_its_saves(watched: Watched, attempt: Attempt, says: str) -> None:
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.CHECKPOINT_ERROR, EXIT_CHECKPOINT_ERROR), attempt.logs()
    assert says in (result.message or ""), result
    assert {rank.last_step for rank in result.ranks} == {result.last_step}
    watched.wait_reported(attempt, "checkpoint_failed", 12, 16, 20)


def goes_on_from_8(watched: Watched, whole: Path) -> None:
    assert watched.job.launch().wait().cause is Cause.COMPLETED, watched.job.attempts[-1].logs()
    assert watched.job.attempts[-1].report().base.step == 8
    comparison = compare(whole, watched.checkpoints / f"step-{STEPS:012d}.a0002")
    assert comparison.identical, render(comparison)


def test_repaired_device_has_every_acknowledged_checkpoint(place: Place, whole: Path) -> None:
    """Behind its first MiB it reads and writes nothing any more, from the middle of the training on."""
    disk = place.loop_device(
        "ext4", "device"
    )  # of its own: on one with files ext4 says "Cannot allocate memory" of what it cannot read
    watched = place.job("device", [10], disk.at)
    attempt = watched.job.launch()
    watched.wait_held_at(attempt, 10)
    watched.wait_reported(attempt, "checkpoint", 4, 8)
    before = watched.file_contents()
    disk.limit_device_size(1 << 20)
    watched.release_step(10)
    ended_by_its_saves(watched, attempt, "check the kernel log")  # ext4 may have mounted it read-only by then
    first = attempt.messages(kind="checkpoint_failed")[0].error
    assert "Input/output error; the disk reported an input/output error: check the kernel log" in first
    disk.umount()
    disk.mount()  # on the whole device again: ext4 plays back its journal
    assert watched.file_contents() == before
    goes_on_from_8(watched, whole)


def test_slow_disk_with_when_busy_skip_delays_no_step(place: Place, whole: Path) -> None:
    disk = place.loop_device("ext4")
    with disk.throttled() as throttle:
        watched = place.job("skips", [6, 10, 22], disk.at, when_busy="skip")
        attempt = watched.job.launch()
        skips_none_until_10(watched, attempt)
        throttle.set_rate(4096)
        watched.release_step(10)
        watched.wait_held_at(attempt, 22)  # twelve steps later, and 12 is not on the disk yet
        assert watched.committed() == [4, 8]
        throttle.set_rate(0)
        watched.wait_reported(attempt, "checkpoint", 4, 8, 12)
        watched.release_step(22)
        left_out_two(watched, attempt, whole)


def test_slow_disk_is_waited_for_and_no_save_is_lost(place: Place, whole: Path) -> None:
    disk = place.loop_device("ext4")
    with disk.throttled() as throttle:
        watched = place.job("waits", [10, 18], disk.at)
        attempt = watched.job.launch()
        watched.wait_held_at(attempt, 10)
        throttle.set_rate(150_000)  # three seconds for what both ranks save
        watched.release_step(10)
        watched.wait_held_at(attempt, 18)
        throttle.set_rate(0)
        watched.release_step(18)
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert watched.committed() == list(range(EVERY, STEPS + 1, EVERY))
    assert not attempt.messages(kind="checkpoint_failed")
    notes = [m for m in attempt.messages(kind="note") if m.type == "checkpoint-waited"]
    # a machine that others use may be slow enough for the save before, too
    assert any(note.data["step"] == 16 and "for the previous checkpoint" in note.message for note in notes), notes
    comparison = compare(whole, watched.checkpoints / whole.name)
    assert comparison.identical, render(comparison)


def test_slow_save_that_makes_progress_is_not_aborted(place: Place, whole: Path) -> None:
    """The files have their sizes at once, in memory; the disk takes six seconds for what rank 1 has there."""
    disk = place.loop_device("ext4")
    with disk.throttled() as throttle:
        watched = place.job("deadline", [10], disk.at, width=6000, policy={"step_deadline": 4})
        attempt = watched.job.launch()
        watched.wait_held_at(attempt, 10)
        throttle.throttle_only(attempt.agent.ranks()[1])
        throttle.set_rate(800_000)  # less than four for a request of 2 MiB, which is done in one
        watched.release_step(10)
        wait_for(lambda: 12 in watched.committed() or attempt.messages(kind="checkpoint_failed"), attempt.logs(), 60)
        throttle.set_rate(0)
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert not attempt.messages(kind="checkpoint_failed")
    assert watched.committed() == list(range(EVERY, STEPS + 1, EVERY))


def left_out_two(watched: Watched, attempt: Attempt, whole: Path) -> None:
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert watched.committed() == [4, 8, 12, 24, 28] and not attempt.messages(kind="checkpoint_failed")
    (note,) = [m for m in attempt.messages(kind="note") if m.type == "checkpoint-skipped"]
    assert note.data["skipped"] == 2, note
    comparison = compare(whole, watched.checkpoints / whole.name)
    assert comparison.identical, render(comparison)


def skips_none_until_10(watched: Watched, attempt: Attempt) -> None:
    for step, saved in ((6, [4]), (10, [4, 8])):
        watched.wait_held_at(attempt, step)
        watched.wait_reported(attempt, "checkpoint", *saved)
        if step < 10:
            watched.release_step(step)


def test_hung_disk_with_when_busy_skip_delays_no_step(place: Place, whole: Path) -> None:
    """``when_busy: skip``: what falls due meanwhile is left out, which is told."""
    watched = place.job("slow", [6, 10, 22], when_busy="skip")
    attempt = watched.job.launch()
    skips_none_until_10(watched, attempt)
    place.slow.touch()
    try:
        watched.release_step(10)
        watched.wait_held_at(attempt, 22)  # twelve steps later, and 12 is not on the disk yet
        assert watched.committed() == [4, 8]
    finally:
        place.slow.unlink()
    watched.wait_reported(attempt, "checkpoint", 4, 8, 12)
    watched.release_step(22)
    left_out_two(watched, attempt, whole)


def test_lazily_unmounted_disk_ends_attempt_and_keeps_acknowledged_saves(place: Place) -> None:
    """The names lead into the empty directory below it from then on. The disk is its own: it does not come back."""
    disk = place.loop_device("ext4", "vanished")
    watched = place.job("vanished", [10], disk.at)
    attempt = watched.job.launch()
    watched.wait_held_at(attempt, 10)
    watched.wait_reported(attempt, "checkpoint", 4, 8)
    kept = os.open(watched.checkpoints, os.O_RDONLY)  # what was mounted, whatever its names
    try:
        before = watched.file_contents()
        place.warm.run_in_mount_namespace("umount", "-l", str(disk.at))
        watched.release_step(10)
        result = attempt.wait()
        old = Path(f"/proc/self/fd/{kept}")
        assert {f"{p.parent.name}/{p.name}": p.read_bytes() for p in old.glob("*/*")} == before
        assert result.cause is Cause.CHECKPOINT_ERROR and "was unmounted" in (result.message or ""), attempt.logs()
        assert not [m.step for m in attempt.messages(kind="checkpoint") if m.step > 8] and watched.committed() == []
    finally:
        os.close(kept)
