"""Ends of attempts that take long: other jobs are looked after, nobody takes the job over, and a service can end meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import JobPhase
from ratchet_service import background, ending, health, watching
from ratchet_service.background import MOST
from ratchet_service.expiry import Expiry
from ratchet_service.health import Component, Health, Unready
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


class Hung:
    """Ends of those jobs that have an event here hang until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.until: dict[str, threading.Event] = {}
        self.begun: set[str] = set()
        self._real = ending.adoptable
        monkeypatch.setattr(ending, "adoptable", self._adoptable)

    def _adoptable(self, *args: Any, **kwargs: Any) -> Any:
        job_id = kwargs["expected_job_id"]
        if job_id in self.until:
            self.begun.add(job_id)
            assert self.until[job_id].wait(120)
        return self._real(*args, **kwargs)

    def submit(self, plane: Plane, jobs: int) -> list[str]:
        """Jobs whose ends hang."""
        made = [plane.submit({"steps": 20}) for _ in range(jobs)]
        self.until |= {job_id: threading.Event() for job_id in made}
        plane.wake()
        wait_for(lambda: self.begun >= set(made), "their ends to hang", 60)
        return made


@pytest.fixture
def hung(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    made = Hung(monkeypatch)
    yield made
    for event in made.until.values():
        event.set()


class CountsKills(LocalLauncher):
    kills: Counter[str]

    def kill(self, ref: Any) -> Any:
        self.kills[ref.job_id] += 1
        return super().kill(ref)


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


def test_ends_that_hang_are_told_and_the_others_wait_for_them_in_peace(
    plane: Plane, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (health, watching):
        monkeypatch.setattr(module, "ROUND_SECONDS", 2.0)
    plane.machine = dataclasses.replace(plane.machine, cpu_slots=MOST + 1)
    launcher = trainer_launcher(plane.paths, CountsKills)
    assert isinstance(launcher, CountsKills)
    launcher.kills = Counter()
    reconciler = plane.reconcile(launcher)

    def component() -> Component | str:
        try:
            return health.check(Health(beat=reconciler.beat), plane.database, plane.paths)["reconciler"]
        except Unready as error:
            assert error.code == "reconciler-stalled"
            return error.detail

    slow = hung.submit(plane, MOST)
    waits = plane.submit({"steps": 20})
    job = plane.wait_job(waits, lambda job: job.reason == "attempt-ending", "told that it waits for other ends")
    assert f"once one of {MOST} other ends is over" in (job.message or "")
    kills = launcher.kills[waits]
    for one in slow:
        job = plane.wait_job(one, lambda job: job.reason == "attempt-ending", "told that its end takes long")
        assert "has been read for more than 2 s" in (job.message or "")
    wait_for(lambda: "ends of attempts take longer" in str(component()), "/readyz to say that nothing can be ended", 30)
    assert launcher.kills[waits] == kills, "what is proved dead is killed again and again"

    hung.until[slow[0]].set()
    for one in (slow[0], waits):
        assert plane.wait(one, JobPhase.SUCCEEDED).reason != "attempt-ending"
    left = wait_for(lambda: found if isinstance(found := component(), Component) else None, "/readyz to be ready", 30)
    assert left.status == "warning" and f"ends of attempts take long: {MOST - 1}" in left.detail
    for one in slow:
        hung.until[one].set()
        plane.wait(one, JobPhase.SUCCEEDED)
    wait_for(lambda: isinstance(found := component(), Component) and found.status == "ok", "all to be well", 30)


def test_an_end_that_has_failed_is_not_called_healed_while_it_waits_for_another(
    plane: Plane, hung: Hung, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(background, "MOST", 1)
    real, fails, mended = watching.settle, set[str](), threading.Event()

    def settle(database: Any, paths: Any, lease: Any, *args: Any) -> Any:
        if lease.job_id in fails and not mended.is_set():
            raise OSError(30, "Read-only file system")
        return real(database, paths, lease, *args)

    monkeypatch.setattr(watching, "settle", settle)
    failing = plane.submit({"steps": 20})
    fails.add(failing)
    reconciler = plane.reconcile()
    plane.wait_job(failing, lambda job: job.reason == "reconcile-error", "told that it cannot be looked after")
    [slow] = hung.submit(plane, 1)
    plane.wait_job(failing, lambda job: job.reason == "attempt-ending", "told that it waits", 60)
    assert reconciler._watches[failing].failures >= 1 and "can be looked after again" not in caplog.text
    hung.until[slow].set()
    plane.wait_job(failing, lambda job: job.reason == "reconcile-error", "told again")
    mended.set()
    for one in (slow, failing):
        plane.wait(one, JobPhase.SUCCEEDED, deadline=60)
