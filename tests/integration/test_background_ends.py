"""Ends of attempts that take long: other jobs are looked after, nobody takes the job over, and a service can end meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service import ending, health, watching
from ratchet_service.expiry import Expiry
from ratchet_service.health import Health
from ratchet_service.launchers.local import LocalLauncher
from ratchet_service.usecases import deletion
from tests.support.plane import Plane, trainer_launcher
from tests.support.server import wait_for

pytestmark = pytest.mark.parametrize("migrated", ["sqlite"], indirect=True)
LEASE = 3.0


class Verification:
    """Of what the job ``of`` has left: takes until ``ends``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: str | None = None
        self.begins, self.ends = threading.Event(), threading.Event()
        self.calls = 0
        self._real = ending.adoptable
        monkeypatch.setattr(ending, "adoptable", self._adoptable)

    def _adoptable(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["expected_job_id"] == self.of:
            self.calls += 1
            self.begins.set()
            assert self.ends.wait(120)
        return self._real(*args, **kwargs)


@pytest.fixture
def verification(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verification]:
    made = Verification(monkeypatch)
    yield made
    made.ends.set()


class Hangs(LocalLauncher):
    """Asked what runs that nobody knows, it does not answer while ``hold`` is set: the round stands still."""

    hold, asked, answers = threading.Event(), threading.Event(), threading.Event()

    def sweep(self, known: Any) -> Any:
        if self.hold.is_set():
            self.asked.set()
            assert self.answers.wait(120)
        return super().sweep(known)


def begin_slow_end(plane: Plane, verification: Verification) -> str:
    verification.of = plane.submit({"steps": 20})
    assert verification.begins.wait(60)
    return verification.of


def test_a_slow_end_holds_up_no_other_job_and_is_made_once(plane: Plane, verification: Verification) -> None:
    """With two reconcilers, also while the rounds of the one whose it is stand still."""
    launcher = trainer_launcher(plane.paths, Hangs)
    assert isinstance(launcher, Hangs)
    first = plane.reconcile(launcher, lease=LEASE)
    slow = begin_slow_end(plane, verification)
    owner = plane.job(slow).lease_owner
    plane.wait(plane.submit({"steps": 20}), JobPhase.SUCCEEDED)
    assert health.check(Health(beat=first.beat), plane.database, plane.paths)["reconciler"].status == "ok"

    plane.reconcile(lease=LEASE)
    launcher.hold.set()
    assert launcher.asked.wait(60)
    expires = plane.job(slow).lease_expires_at
    assert expires is not None

    def renewed() -> bool:
        now = plane.job(slow).lease_expires_at
        return now is not None and (now - expires).total_seconds() > 2 * LEASE

    wait_for(renewed, "the lease to be renewed beside the rounds", 60)
    plane.wait(plane.submit({"steps": 3}), JobPhase.SUCCEEDED)  # by the other one
    job = plane.job(slow)
    assert (job.lease_owner, job.phase.active, verification.calls) == (owner, True, 1)
    launcher.hold.clear()
    launcher.answers.set()
    verification.ends.set()
    plane.wait(slow, JobPhase.SUCCEEDED)
    assert verification.calls == 1
    assert [event.type for event in plane.events(slow)].count("attempt-ended") == 1


def test_a_reconciler_ends_beside_a_slow_end_and_keeps_its_lease(plane: Plane, verification: Verification) -> None:
    reconciler = plane.reconcile()
    slow = begin_slow_end(plane, verification)
    reconciler.stop()
    plane.reconcilers[0][1].join(60)
    assert not plane.reconcilers[0][1].is_alive()
    job = plane.job(slow)
    assert job.phase.active and job.lease_token is not None, "another would begin in the middle of it"
    verification.ends.set()
    plane.wait(slow, JobPhase.SUCCEEDED)


def test_an_end_that_fails_is_told_of_and_made_again(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    real, healed, calls = watching.settle, threading.Event(), []

    def settle(*args: Any) -> Any:
        calls.append(args)
        if not healed.is_set():
            raise OSError(30, "Read-only file system")
        return real(*args)

    monkeypatch.setattr(watching, "settle", settle)
    plane.reconcile()
    job_id = plane.submit({"steps": 20})
    job = plane.wait_job(job_id, lambda job: job.reason == "reconcile-error", "told that it cannot be looked after")
    assert job.message is not None and "[Errno 30] Read-only file system" in job.message
    wait_for(lambda: len(calls) >= 3, "two more tries", 30)
    assert plane.job(job_id).reason == "reconcile-error"
    healed.set()
    plane.wait(job_id, JobPhase.SUCCEEDED)
    assert [event.type for event in plane.events(job_id)].count("reconcile-error") == 1


def test_a_slow_deletion_at_a_ttl_holds_up_no_job(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, ends, real = threading.Event(), threading.Event(), deletion.remove_tree

    def slow(path: Path) -> None:
        begins.set()
        assert ends.wait(120)
        real(path)

    monkeypatch.setattr(deletion, "remove_tree", slow)
    monkeypatch.setattr(Expiry, "interval", 0.2)
    reconciler = plane.reconcile()
    old = plane.submit({"steps": 3}, ttl="0.1s")
    try:
        assert begins.wait(60)
        plane.wait(plane.submit({"steps": 3}), JobPhase.SUCCEEDED)
        assert health.check(Health(beat=reconciler.beat), plane.database, plane.paths)["reconciler"].status == "ok"
    finally:
        ends.set()
    wait_for(lambda: not plane.paths.job(old).root.exists(), "the job to be deleted", 30)
