"""A pin that was acknowledged is never lost to a deletion, however the two are interleaved."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import Conflict
from ratchet_contract.paths import (
    DELETED_MANIFEST_NAME,
    MANIFEST_NAME,
    PINNED_NAME,
    HomePaths,
    checkpoint_dir_name,
)
from ratchet_service.db.models import Checkpoint
from ratchet_service.usecases.checkpoints import set_pin
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.retention.delete import delete, delete_unless_pinned, sweep
from tests.support.checkpoints import JOB, make_checkpoint

pytestmark = pytest.mark.processes

ROUNDS = int(os.environ.get("RATCHET_TEST_PINS", "60"))
NAME = checkpoint_dir_name(10, 1)


class Crash(BaseException):
    """The deleter is killed."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    make_checkpoint(folder, 10)
    return folder / NAME


def fresh(homes: HomePaths, template: Path) -> Path:
    directory = homes.job(JOB).checkpoints / NAME
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(template, directory)
    return directory


def pin(homes: HomePaths) -> bool:
    """As the API does it: was it acknowledged?"""
    try:
        set_pin(None, Checkpoint(job_id=JOB, step=10, attempt=1, pinned=False), True, homes)  # type: ignore[arg-type]
    except Conflict as error:
        assert error.code == "checkpoint-gone"
        return False
    return True


def check(directory: Path, acknowledged: bool) -> None:
    if acknowledged:
        assert (directory / PINNED_NAME).exists() and verify(directory).ok
    else:  # it may have survived all the same, but then whole
        assert not (directory / PINNED_NAME).exists()
        assert not directory.exists() or verify(directory).ok


def at_call(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> Callable[[], int]:
    """``act`` right before the ``number``-th system call that changes or syncs a directory; the function tells how many came."""
    calls = 0

    def wrapped(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                act()
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
    return lambda: calls


def test_pin_between_any_two_deletion_steps_is_consistent(template: Path, tmp_path: Path) -> None:
    homes, answers = HomePaths(tmp_path), []
    for number in range(1, 100):
        directory = fresh(homes, template)
        with pytest.MonkeyPatch.context() as patch:
            calls = at_call(patch, number, lambda patch=patch: (patch.undo(), answers.append(pin(homes))))  # type: ignore[misc]
            deleted = delete_unless_pinned(directory)
            if calls() < number:
                break
        assert deleted is not answers[-1]
        check(directory, answers[-1])
    assert len(answers) >= 6 and answers == sorted(answers, reverse=True) and set(answers) == {True, False}


def test_deletion_between_any_two_pin_steps_is_consistent(template: Path, tmp_path: Path) -> None:
    homes, answers = HomePaths(tmp_path), []
    for number in (1, 2):
        directory = fresh(homes, template)
        with pytest.MonkeyPatch.context() as patch:
            if number == 1:
                at_call(
                    patch, 1, lambda patch=patch, directory=directory: (patch.undo(), delete_unless_pinned(directory))
                )  # type: ignore[misc]
            else:
                delete_unless_pinned(directory)
            answers.append(pin(homes))
        check(directory, answers[-1])
    assert answers == [True, False]


def test_a_deleter_that_is_killed_loses_no_pin(template: Path, tmp_path: Path) -> None:
    """The pin comes at one point of the deletion, the kill at a later one; then the service sweeps."""
    homes, ends = HomePaths(tmp_path), set()
    for pinned_at in range(1, 4):
        for killed_at in range(pinned_at + 1, pinned_at + 5):
            directory = fresh(homes, template)
            answers: list[bool] = []

            def die() -> None:
                raise Crash

            with pytest.MonkeyPatch.context() as patch:

                def come(
                    patch: pytest.MonkeyPatch = patch, more: int = killed_at - pinned_at, told: list[bool] = answers
                ) -> None:
                    patch.undo()
                    told.append(pin(homes))
                    at_call(patch, more, die)

                at_call(patch, pinned_at, come)
                try:
                    delete_unless_pinned(directory)
                    ends.add("ended")
                except Crash:
                    ends.add("killed")
            sweep(homes.job(JOB).checkpoints, dead_attempts={1})
            check(directory, answers[0])
    assert ends == {"ended", "killed"}


def test_pin_file_in_half_deleted_checkpoint_does_not_restore_checkpoint(template: Path, tmp_path: Path) -> None:
    directory = fresh(HomePaths(tmp_path), template)
    (directory / MANIFEST_NAME).rename(directory / DELETED_MANIFEST_NAME)
    next(directory.glob("rank-*")).unlink()
    (directory / PINNED_NAME).touch()
    assert sweep(directory.parent, dead_attempts=()) == [NAME]
    assert not directory.exists()


def test_job_deletion_ignores_pins(template: Path, tmp_path: Path) -> None:
    directory = fresh(HomePaths(tmp_path), template)
    (directory / PINNED_NAME).touch()
    delete(directory)
    assert not directory.exists()


def deleter(directory: str, barrier: Barrier, rounds: int) -> None:
    for number in range(rounds):
        barrier.wait(60)
        wait(number, first=number % 10 == 1)
        delete_unless_pinned(Path(directory))
        barrier.wait(60)


def wait(number: int, *, first: bool) -> None:
    """A little, another time each round."""
    until = time.perf_counter() + (0 if first else random.Random(number).random() * 4e-4)
    while time.perf_counter() < until:
        pass


def test_pin_racing_deletion_in_another_process_is_consistent(template: Path, tmp_path: Path) -> None:
    """RATCHET_TEST_PINS rounds; every tenth gives one of the two a start."""
    homes = HomePaths(tmp_path)
    directory = fresh(homes, template)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    child = context.Process(target=deleter, args=(str(directory), barrier, ROUNDS), daemon=True)
    child.start()
    acknowledged = []
    try:
        for number in range(ROUNDS):
            fresh(homes, template)
            early = number % 10 == 0 and pin(homes)
            barrier.wait(60)
            wait(number + ROUNDS, first=False)
            acknowledged.append(early or pin(homes))
            barrier.wait(60)
            check(directory, acknowledged[-1])
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert True in acknowledged
