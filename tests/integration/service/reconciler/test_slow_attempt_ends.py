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
from ratchet_service.job_files import delete_job
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.observability import health
from ratchet_service.observability.health import MAX_CONCURRENT_FINISHES, Component, Health, Unready
from ratchet_service.reconciler import background_work, finish_attempt, supervise
from ratchet_service.reconciler.ttl import Expiry
from tests.support.control_plane import Plane, trainer_launcher
from tests.support.server import wait_for

pytestmark = pytest.mark.parametrize("migrated_database", ["sqlite"], indirect=True)
LEASE = 3.0


class Verification:
    """Of what the job ``of`` has left: takes until ``ends``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: str | None = None
        self.begins, self.ends = threading.Event(), threading.Event()
        self.calls = 0
        self._real = finish_attempt.find_adoptable
        monkeypatch.setattr(finish_attempt, "find_adoptable", self._adoptable)

    def _adoptable(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs["expected_job_id"] == self.of:
            self.calls += 1
            self.begins.set()
            assert self.ends.wait(120)
        return self._real(*args, **kwargs)


@pytest.fixture
def verification(control_plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verification]:
    made = Verification(monkeypatch)
    yield made
    made.ends.set()


class Hung:
    """Ends of those jobs that have an event here hang until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.until: dict[str, threading.Event] = {}
        self.begun: set[str] = set()
        self._real = finish_attempt.find_adoptable
        monkeypatch.setattr(finish_attempt, "find_adoptable", self._adoptable)

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
def hung(control_plane: Plane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
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


def test_slow_attempt_end_blocks_no_other_job_and_is_finalised_once(
    control_plane: Plane, verification: Verification
) -> None:
    """With two reconcilers, also while the rounds of the one whose it is stand still."""
    launcher = trainer_launcher(control_plane.paths, Hangs)
    assert isinstance(launcher, Hangs)
    first = control_plane.start_reconciler(launcher, lease=LEASE)
    slow = begin_slow_end(control_plane, verification)
    owner = control_plane.job(slow).lease_owner
    control_plane.wait(control_plane.submit({"steps": 20}), JobPhase.SUCCEEDED)
    assert (
        health.check(Health(heartbeat=first.heartbeat), control_plane.database, control_plane.paths)[
            "reconciler"
        ].status
        == "ok"
    )

    control_plane.start_reconciler(lease=LEASE)
    launcher.hold.set()
    assert launcher.asked.wait(60)
    expires = control_plane.job(slow).lease_expires_at
    assert expires is not None

    def renewed() -> bool:
        now = control_plane.job(slow).lease_expires_at
        return now is not None and (now - expires).total_seconds() > 2 * LEASE

    wait_for(renewed, "the lease to be renewed beside the rounds", 60)
    control_plane.wait(control_plane.submit({"steps": 3}), JobPhase.SUCCEEDED)  # by the other one
    job = control_plane.job(slow)
    assert (job.lease_owner, job.phase.active, verification.calls) == (owner, True, 1)
    launcher.hold.clear()
    launcher.answers.set()
    verification.ends.set()
    control_plane.wait(slow, JobPhase.SUCCEEDED)
    assert verification.calls == 1
    assert [event.type for event in control_plane.events(slow)].count("attempt-ended") == 1


def test_reconciler_stops_during_a_slow_attempt_end_and_keeps_the_lease(
    control_plane: Plane, verification: Verification
) -> None:
    reconciler = control_plane.start_reconciler()
    slow = begin_slow_end(control_plane, verification)
    reconciler.stop()
    control_plane.reconcilers[0][1].join(60)
    assert not control_plane.reconcilers[0][1].is_alive()
    job = control_plane.job(slow)
    assert job.phase.active and job.lease_token is not None, "another would begin in the middle of it"
    verification.ends.set()
    control_plane.wait(slow, JobPhase.SUCCEEDED)


def test_failed_attempt_end_is_reported_as_reconcile_error_and_retried(
    control_plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, healed, calls = supervise.finalise_attempt, threading.Event(), []

    def settle(*args: Any) -> Any:
        calls.append(args)
        if not healed.is_set():
            raise OSError(30, "Read-only file system")
        return real(*args)

    monkeypatch.setattr(supervise, "finalise_attempt", settle)
    control_plane.start_reconciler()
    job_id = control_plane.submit({"steps": 20})
    job = control_plane.wait_job(
        job_id, lambda job: job.reason == "reconcile-error", "told that it cannot be looked after"
    )
    assert job.message is not None and "[Errno 30] Read-only file system" in job.message
    wait_for(lambda: len(calls) >= 3, "two more tries", 30)
    assert control_plane.job(job_id).reason == "reconcile-error"
    healed.set()
    control_plane.wait(job_id, JobPhase.SUCCEEDED)
    assert [event.type for event in control_plane.events(job_id)].count("reconcile-error") == 1


def test_slow_ttl_deletion_blocks_no_other_job(control_plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, ends, real = threading.Event(), threading.Event(), delete_job.remove_tree

    def slow(path: Path) -> None:
        begins.set()
        assert ends.wait(120)
        real(path)

    monkeypatch.setattr(delete_job, "remove_tree", slow)
    monkeypatch.setattr(Expiry, "interval", 0.2)
    reconciler = control_plane.start_reconciler()
    old = control_plane.submit({"steps": 3}, ttl="0.1s")
    try:
        assert begins.wait(60)
        control_plane.wait(control_plane.submit({"steps": 3}), JobPhase.SUCCEEDED)
        assert (
            health.check(Health(heartbeat=reconciler.heartbeat), control_plane.database, control_plane.paths)[
                "reconciler"
            ].status
            == "ok"
        )
    finally:
        ends.set()
    wait_for(lambda: not control_plane.paths.job(old).root.exists(), "the job to be deleted", 30)


def test_hanging_attempt_ends_are_reported_and_further_ends_wait(
    control_plane: Plane, hung: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (health, supervise):
        monkeypatch.setattr(module, "ROUND_SECONDS", 2.0)
    control_plane.machine = dataclasses.replace(control_plane.machine, cpu_slots=MAX_CONCURRENT_FINISHES + 1)
    launcher = trainer_launcher(control_plane.paths, CountsKills)
    assert isinstance(launcher, CountsKills)
    launcher.kills = Counter()
    reconciler = control_plane.start_reconciler(launcher)

    def component() -> Component | str:
        try:
            return health.check(Health(heartbeat=reconciler.heartbeat), control_plane.database, control_plane.paths)[
                "reconciler"
            ]
        except Unready as error:
            assert error.code == "reconciler-stalled"
            return error.detail

    slow = hung.submit(control_plane, MAX_CONCURRENT_FINISHES)
    waits = control_plane.submit({"steps": 20})
    job = control_plane.wait_job(waits, lambda job: job.reason == "attempt-ending", "told that it waits for other ends")
    assert f"until one of the {MAX_CONCURRENT_FINISHES} ends that are being processed is done" in (job.message or "")
    kills = launcher.kills[waits]
    for one in slow:
        job = control_plane.wait_job(one, lambda job: job.reason == "attempt-ending", "told that its end takes long")
        assert "have been read for more than 2 s" in (job.message or "")
    wait_for(lambda: "ends of attempts take longer" in str(component()), "/readyz to say that nothing can be ended", 30)
    assert launcher.kills[waits] == kills, "what is proved dead is killed again and again"

    hung.until[slow[0]].set()
    for one in (slow[0], waits):
        assert control_plane.wait(one, JobPhase.SUCCEEDED).reason != "attempt-ending"
    left = wait_for(lambda: found if isinstance(found := component(), Component) else None, "/readyz to be ready", 30)
    assert left.status == "warning" and f"ends of attempts take long: {MAX_CONCURRENT_FINISHES - 1}" in left.detail
    for one in slow:
        hung.until[one].set()
        control_plane.wait(one, JobPhase.SUCCEEDED)
    wait_for(lambda: isinstance(found := component(), Component) and found.status == "ok", "all to be well", 30)


def test_failed_attempt_end_waiting_for_another_is_not_logged_as_recovered(
    control_plane: Plane, hung: Hung, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(background_work, "MAX_CONCURRENT_FINISHES", 1)
    real, fails, mended = supervise.finalise_attempt, set[str](), threading.Event()

    def settle(database: Any, paths: Any, lease: Any, *args: Any) -> Any:
        if lease.job_id in fails and not mended.is_set():
            raise OSError(30, "Read-only file system")
        return real(database, paths, lease, *args)

    monkeypatch.setattr(supervise, "finalise_attempt", settle)
    failing = control_plane.submit({"steps": 20})
    fails.add(failing)
    reconciler = control_plane.start_reconciler()
    control_plane.wait_job(failing, lambda job: job.reason == "reconcile-error", "told that it cannot be looked after")
    [slow] = hung.submit(control_plane, 1)
    control_plane.wait_job(failing, lambda job: job.reason == "attempt-ending", "told that it waits", 60)
    assert reconciler._watches[failing].failures >= 1 and "is supervised again" not in caplog.text
    hung.until[slow].set()
    control_plane.wait_job(failing, lambda job: job.reason == "reconcile-error", "told again")
    mended.set()
    for one in (slow, failing):
        control_plane.wait(one, JobPhase.SUCCEEDED, deadline=60)
