"""A disk that fails beneath a real training: full, read-only, with a limit, too slow, gone. The training goes on or ends with the
cause, what was saved before is as it was, and what could not be saved is told at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_CHECKPOINT_ERROR
from ratchet_contract.phases import Cause
from ratchet_store.compare import compare, render
from tests.support.launch import Attempt
from tests.support.server import wait_for
from tests.support.warm import Warm, WarmJob

STEPS, EVERY = 28, 4  # the disk fails between 8 and 12, and is repaired between 16 and 20
CODE = Path(__file__).parents[1] / "support" / "fault_job"

pytestmark = pytest.mark.slow


class Place:
    """``disk``: mounted where the jobs that are made lie, with their checkpoints alone."""

    def __init__(self, root: Path) -> None:
        self.root, self.disk, self.slow = root, root / "disk", root / "slow"
        self.disk.mkdir()
        self.warm = Warm(self.disk, "48m", self.slow)

    def job(self, job_id: str, held: list[int], **checkpoint: Any) -> Watched:
        gate = self.root / f"gate-{job_id}"
        gate.mkdir()
        spec = {
            "task": {"entrypoint": "fault_task:Faulty", "args": {"steps": STEPS, "gate": str(gate), "held": held}},
            "code": {"path": str(CODE)},
            "checkpoint": {"every_steps": EVERY, "keep_last": 20, **checkpoint},
        }
        job = WarmJob(self.warm, self.root / "home", spec, CODE, job_id=job_id)
        job.paths.root.mkdir(parents=True)
        self.warm.seen(self.disk / job_id).mkdir()
        job.paths.checkpoints.symlink_to(self.disk / job_id)
        return Watched(job, gate, self.warm.seen(self.disk / job_id))


class Watched:
    """A job and its checkpoints as its processes see them."""

    def __init__(self, job: WarmJob, gate: Path, checkpoints: Path) -> None:
        self.job, self.gate, self.checkpoints = job, gate, checkpoints

    def wait_at(self, attempt: Attempt, step: int) -> None:
        there = [self.gate / f"at.{step}.{rank}" for rank in range(2)]
        wait_for(lambda: all(p.exists() for p in there) or attempt.agent.poll() is not None, f"step {step}", 60, 0.01)
        assert attempt.agent.poll() is None, attempt.logs()

    def go(self, step: int) -> None:
        (self.gate / f"go.{step}").touch()

    def told(self, attempt: Attempt, kind: str, *steps: int) -> None:
        """Wait until rank 0 has told this, in this order, and nothing before it."""
        wait_for(lambda: len(self._steps(attempt, kind)) >= len(steps), f"{kind} {steps}\n{attempt.logs()}", 60, 0.01)
        assert self._steps(attempt, kind)[: len(steps)] == list(steps)

    @staticmethod
    def _steps(attempt: Attempt, kind: str) -> list[int]:
        return [m.step for m in attempt.messages(kind=kind)]

    def committed(self) -> list[int]:
        return sorted(int(p.parent.name[5:17]) for p in self.checkpoints.glob("*/MANIFEST.json"))

    def content(self) -> dict[str, bytes]:
        """Every byte of what is committed."""
        folders = [p.parent for p in self.checkpoints.glob("*/MANIFEST.json")]
        return {f"{f.name}/{p.name}": p.read_bytes() for f in folders for p in f.iterdir()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("disks"))
    with made.warm:
        yield made


@pytest.fixture(scope="module")
def whole(place: Place) -> Path:
    """The last checkpoint of an undisturbed run."""
    watched = place.job("whole", [])
    attempt = watched.job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert watched.committed() == list(range(EVERY, STEPS + 1, EVERY))
    return watched.checkpoints / f"step-{STEPS:012d}.a0001"


def full(place: Place, attempt: Attempt) -> Callable[[], None]:
    filler = place.warm.seen(place.disk / "filler")
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler.unlink


def read_only(place: Place, attempt: Attempt) -> Callable[[], None]:
    place.warm.mount("mount", "-o", "remount,ro", str(place.disk))
    return lambda: place.warm.mount("mount", "-o", "remount,rw", str(place.disk))


def limited(place: Place, attempt: Attempt) -> Callable[[], None]:
    """What a quota does, by a limit that every kernel has: no file grows beyond so many bytes."""
    pids = attempt.agent.ranks().values()  # type: ignore[attr-defined]

    def limit(to: int) -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (to, resource.RLIM_INFINITY))

    limit(100_000)
    return lambda: limit(resource.RLIM_INFINITY)


FAULTS = {"full": (full, "No space left on device; the disk is full"), "read-only": (read_only, "mounted read-only"),
          "limited": (limited, "the process limit")}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_disk_that_fails_for_two_saves_costs_these_two_and_nothing_else(place: Place, whole: Path, name: str) -> None:
    fail, says = FAULTS[name]
    watched = place.job(name, [10, 18])
    attempt = watched.job.launch()
    watched.wait_at(attempt, 10)
    watched.told(attempt, "checkpoint", 4, 8)
    before = watched.content()
    repair = fail(place, attempt)
    try:
        watched.go(10)
        watched.wait_at(attempt, 18)
        watched.told(attempt, "checkpoint_failed", 12, 16)
        assert watched.content() == before
    finally:
        repair()
    watched.go(18)
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    failed = attempt.messages(kind="checkpoint_failed")
    assert [m.step for m in failed] == [12, 16] and all(says in m.error for m in failed), failed
    assert watched.committed() == [4, 8, 20, 24, 28] and {**watched.content(), **before} == watched.content()
    assert not list(watched.checkpoints.glob("*/*.tmp"))
    comparison = compare(whole, watched.checkpoints / whole.name)
    assert comparison.identical, render(comparison)


def test_a_disk_that_stays_read_only_ends_the_attempt_and_the_next_one_goes_on(place: Place, whole: Path) -> None:
    watched = place.job("stays", [10])
    attempt = watched.job.launch()
    watched.wait_at(attempt, 10)
    watched.told(attempt, "checkpoint", 4, 8)
    before = watched.content()
    repair = read_only(place, attempt)
    try:
        watched.go(10)
        result = attempt.wait()
        assert (result.cause, result.exit_code) == (Cause.CHECKPOINT_ERROR, EXIT_CHECKPOINT_ERROR), attempt.logs()
        assert "mounted read-only" in (result.message or ""), result
        assert {rank.last_step for rank in result.ranks} == {result.last_step}
        watched.told(attempt, "checkpoint_failed", 12, 16, 20)
        assert watched.content() == before
    finally:
        repair()
    assert watched.job.launch().wait().cause is Cause.COMPLETED, watched.job.attempts[-1].logs()
    assert watched.job.attempts[-1].report().base.step == 8
    comparison = compare(whole, watched.checkpoints / f"step-{STEPS:012d}.a0002")
    assert comparison.identical, render(comparison)


def test_a_disk_that_does_not_answer_holds_up_no_step(place: Place, whole: Path) -> None:
    """``when_busy: skip``: what falls due meanwhile is left out, which is told."""
    watched = place.job("slow", [10, 22], when_busy="skip")
    attempt = watched.job.launch()
    watched.wait_at(attempt, 10)
    watched.told(attempt, "checkpoint", 4, 8)
    place.slow.touch()
    try:
        watched.go(10)
        watched.wait_at(attempt, 22)  # twelve steps later, and 12 is not on the disk yet
        assert watched.committed() == [4, 8]
    finally:
        place.slow.unlink()
    watched.told(attempt, "checkpoint", 4, 8, 12)
    watched.go(22)
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert watched.committed() == [4, 8, 12, 24, 28] and not attempt.messages(kind="checkpoint_failed")
    (note,) = [m for m in attempt.messages(kind="note") if m.type == "checkpoint-skipped"]
    assert note.data["skipped"] == 2, note
    comparison = compare(whole, watched.checkpoints / whole.name)
    assert comparison.identical, render(comparison)


def test_a_mount_that_vanishes_leaves_what_was_acknowledged_since(place: Place) -> None:
    """The names lead into the empty directory below it from then on. Last: the disk does not come back."""
    watched = place.job("vanished", [10])
    attempt = watched.job.launch()
    watched.wait_at(attempt, 10)
    watched.told(attempt, "checkpoint", 4, 8)
    kept = os.open(watched.checkpoints, os.O_RDONLY)  # what was mounted, whatever its names
    try:
        before = watched.content()
        place.warm.mount("umount", "-l", str(place.disk))
        watched.go(10)
        result = attempt.wait()
        old = Path(f"/proc/self/fd/{kept}")
        assert {f"{p.parent.name}/{p.name}": p.read_bytes() for p in old.glob("*/*")} == before
        assert result.cause is Cause.CHECKPOINT_ERROR and "was unmounted" in (result.message or ""), attempt.logs()
        assert not [m.step for m in attempt.messages(kind="checkpoint") if m.step > 8] and watched.committed() == []
    finally:
        os.close(kept)
