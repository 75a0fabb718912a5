"""A job of higher priority has others stopped for it, and nothing of theirs is lost: real agents, real checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause, Event, JobPhase
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_service.agent_reports.message_effects import UNMANAGED
from ratchet_service.db.engine import Database, utc_now
from ratchet_service.db.models import Attempt, Quota
from ratchet_service.db.transitions import apply
from ratchet_service.launchers.base import LaunchPlan
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.scheduling import queue_queries
from tests.support.control_plane import Plane
from tests.support.queue_harness import Queue

pytestmark = pytest.mark.takes_turns

LONG = {"steps": 60, "every": 25, "epochs": {"1": {"at": 30, "do": "wait"}}}
"""Its first attempt trains until it is stopped."""
ENDLESS = {"steps": 100_000, "every": 100_000, "pause": 0.02}
SHORT = {"steps": 3, "every": 3}


@pytest.fixture
def control_plane(tmp_path: Path, database: Database) -> Iterator[Plane]:
    made = Plane(tmp_path / "home", database)
    made.serve_api()
    yield made
    made.close()


def cores(number: int) -> dict[str, int]:
    return {"cpus_per_rank": number}


def training(plane: Plane, *jobs: str) -> None:
    for job_id in jobs:
        plane.wait_job(job_id, lambda job: job.phase is JobPhase.RUNNING and job.step > 0, "training")


def history(plane: Plane, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event.data for event in plane.events(job_id) if event.type == kind]


def test_higher_priority_job_preempts_a_lower_one_without_lost_steps(control_plane: Plane) -> None:
    low = control_plane.submit(LONG, resources=cores(3), name="low")
    other = control_plane.submit(ENDLESS, resources=cores(1), name="other", priority=7)
    control_plane.start_reconciler()
    training(control_plane, low, other)
    high = control_plane.submit(SHORT, resources=cores(2), name="high", priority=5)
    equal = control_plane.submit(
        SHORT, resources=cores(2), name="third", priority=0
    )  # waits behind: the room is not for it
    control_plane.wait(high, JobPhase.SUCCEEDED)
    ended = control_plane.wait(low, JobPhase.SUCCEEDED)
    control_plane.wait(equal, JobPhase.SUCCEEDED)

    first, second = control_plane.attempts(low)
    assert (first.cause, second.cause) == (Cause.HIGHER_PRIORITY, Cause.COMPLETED)
    assert (first.steps_lost, second.base_step) == (0, first.last_step), "it goes on where it stopped"
    assert (ended.step, ended.committed_step, ended.preemptions, ended.failures) == (60, 60, 1, 0)
    steps = [(a.base_step, a.last_step) for a in (first, second)]
    assert steps[0][0] == 0 and steps[0][1] == steps[1][0] and steps[1][1] == 60, "each step once"
    (asked,) = history(control_plane, low, "preempt")
    assert (asked["for"], asked["priority"], asked["reason"]) == (high, 5, "higher-priority")
    assert len(control_plane.attempts(high)) == len(control_plane.attempts(other)) == 1
    assert (
        first.ended_at is not None
        and control_plane.attempts(high)[0].created_at < control_plane.attempts(equal)[0].created_at
    )
    assert second.created_at >= control_plane.attempts(high)[0].created_at
    assert control_plane.job(high).preempting_since is None


@pytest.fixture
def queue(tmp_path: Path, database: Database) -> Queue:
    return Queue(tmp_path, database, scope="any", min_run_seconds=1000.0)


def test_preemption_stops_no_job_twice_or_in_vain(queue: Queue) -> None:
    low = [queue.submit() for _ in range(4)]
    assert queue.run_round() == low
    high = queue.submit(2, priority=5)
    assert queue.run_round() == []
    first = queue.stopping()
    assert first == set(low[2:]), "the newest"
    assert (
        queue.reason_and_message(high)[0] == "no-slot"
        and "slots are being freed for it" in queue.reason_and_message(high)[1]
    )
    third = queue.submit(owner="other", priority=5)  # of an owner that holds nothing
    assert queue.run_round() == [] and len(queue.stopping()) == 3, "for the third another one, and none twice"
    one, two = sorted(first)
    queue.requeue(one)
    assert queue.run_round() == [], "its slot is kept for the first, which needs two"
    queue.requeue(two)
    assert queue.run_round() == [high]
    assert queue.job(high).preempting_since is None and queue.job(third).preempting_since is not None
    (last,) = queue.stopping()
    queue.requeue(last)
    assert queue.run_round() == [third]
    queue.end(high)
    back = queue.run_round()
    assert len(back) == 2 and set(back) < {one, two, last}, "they go on"
    every = queue.submit(4, priority=9)
    assert queue.run_round() == [] and not queue.stopping(), (
        "room for it would need those that were stopped a moment ago"
    )
    assert "room" not in queue.reason_and_message(every)[1]
    little = Queue(queue.paths.home, queue.database, scope="any", min_run_seconds=0.0)
    for job_id in back:  # trains
        with queue.database.write() as session:
            session.get_one(Attempt, (job_id, 2)).training_at = utc_now()
    assert little.run_round() == [] and queue.stopping() >= set(back)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"policy": {"preemptible": False}}, {}),
        ({"policy": {"max_preemptions": 0}}, {}),  # the next one would end it
        ({"priority": 5}, {}),
        ({}, {"scope": "off"}),
    ],
)
def test_nonpreemptible_or_equal_priority_jobs_are_never_preempted(
    tmp_path: Path, database: Database, more: dict[str, Any], facts: dict[str, Any]
) -> None:
    queue = Queue(tmp_path, database, **facts)
    low = queue.submit(4, **more)
    assert queue.run_round() == [low]
    high = queue.submit(priority=5)
    assert queue.run_round() == [] and not queue.stopping()
    assert queue.job(high).preempting_since is None
    queue.end(low)
    assert queue.run_round() == [high]


@pytest.mark.parametrize(("scope", "stops"), [({}, False), ({"scope": "any"}, True), ({"scope": "off"}, False)])
def test_preemption_across_owners_needs_scope_any(
    tmp_path: Path, database: Database, scope: dict[str, Any], stops: bool
) -> None:
    """Everybody says how much their own jobs matter."""
    queue = Queue(tmp_path, database, **scope)
    low = queue.submit(4, "ann")
    assert queue.run_round() == [low]
    high = queue.submit(4, "bob", priority=1000)
    assert queue.run_round() == []
    assert queue.stopping() == ({low} if stops else set())
    assert ("slots are being freed" in queue.reason_and_message(high)[1]) == stops
    queue.submit(4, "ann", priority=5)
    queue.run_round()
    assert queue.stopping() == ({low} if stops else set()), "the room would be for who is ahead"
    with queue.database.write() as session:
        apply(session, high, Event.SUSPEND)
    queue.run_round()
    assert queue.stopping() == (set() if scope == {"scope": "off"} else {low}), "their own"


def test_unmanaged_script_is_never_preempted(queue: Queue) -> None:
    low = queue.submit(4)
    assert queue.run_round() == [low]
    with queue.database.write() as session:
        session.get_one(Attempt, (low, 1)).resume_report = {"verdict": UNMANAGED}
    queue.submit(priority=5)
    assert queue.run_round() == [] and not queue.stopping()


def test_preemption_stops_only_holders_of_missing_slots_and_never_for_quotas(
    tmp_path: Path, database: Database
) -> None:
    queue = Queue(tmp_path, database, cpus=8, gpus=2)
    cpu, gpu = queue.submit(2), queue.submit(1, device="cuda", ranks=2)
    assert set(queue.run_round()) == {cpu, gpu}
    with database.write() as session:
        session.add(Quota(owner="limited", gpus=0, updated_at=utc_now()))
    high = queue.submit(1, device="cuda", priority=1)
    queue.set_columns(high, owner="limited")
    assert queue.run_round() == [] and not queue.stopping() and queue.reason_and_message(high)[0] == "quota"
    queue.set_columns(high, owner="free")
    assert queue.run_round() == [] and not queue.stopping(), "of another owner"
    queue.set_columns(gpu, owner="free")
    assert queue.run_round() == [] and queue.stopping() == {gpu}


def test_preempting_job_that_is_suspended_releases_its_reservation(queue: Queue) -> None:
    low = queue.submit(4)
    assert queue.run_round() == [low]
    high = queue.submit(4, priority=5)
    queue.run_round()
    with queue.database.write() as session:
        apply(session, high, Event.SUSPEND)
    queue.requeue(low)
    assert queue.run_round() == [low] and queue.job(high).preempting_since is None


def test_wait_message_mentions_preemption_only_while_under_way(tmp_path: Path, database: Database) -> None:
    """Others may take the room, where they are ahead; then nobody is stopped for it any more."""
    queue = Queue(tmp_path, database)
    low = queue.submit(4)
    assert queue.run_round() == [low]
    high = queue.submit(4, priority=5)
    queue.run_round()
    assert queue.stopping() == {low} and "slots are being freed for it" in queue.reason_and_message(high)[1]
    queue.run_round()
    assert "slots are being freed for it" in queue.reason_and_message(high)[1], "still"
    urgent = queue.submit(4, priority=9)
    queue.requeue(low)
    assert queue.run_round() == [urgent]
    assert not queue.stopping()
    assert queue.run_round() == [] and "room" not in queue.reason_and_message(high)[1]


def test_large_job_is_not_starved_by_small_jobs(tmp_path: Path, database: Database) -> None:
    queue = Queue(tmp_path, database, scope="off")
    running = [queue.submit(2, "crowd") for _ in range(2)]
    assert queue.run_round() == running
    large = queue.submit(4, "large")
    crowd = [queue.submit(1, "crowd") for _ in range(4)]
    assert queue.run_round() == []
    queue.end(running[0])
    assert queue.run_round() == [], "two slots are free, and kept"
    queue.end(running[1])
    assert queue.run_round() == [large]
    queue.end(large)
    assert queue.run_round() == crowd


def test_queue_alternates_between_owners_despite_one_owners_many_jobs(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_queries, "EXAMINED_PER_OWNER", 3)
    queue = Queue(tmp_path, database, cpus=3)
    crowd = [queue.submit(owner="crowd", priority=i % 2) for i in range(9)]
    one = queue.submit(owner="one")
    urgent = queue.submit(owner="one", priority=-1)
    assert queue.run_round() == [crowd[1], crowd[3], crowd[5]], "by priority"
    for job_id in (crowd[1], crowd[3], crowd[5]):
        queue.end(job_id)
    assert queue.run_round() == [crowd[7], one, crowd[0]], "then in turns"
    assert queue.reason_and_message(urgent)[0] == "no-slot"


@pytest.mark.parametrize("stuck", ["gpus", "quota", "unmade"])
def test_unstartable_jobs_do_not_block_later_jobs_of_their_owner(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    monkeypatch.setattr(queue_queries, "EXAMINED_PER_OWNER", 2)
    queue = Queue(tmp_path, database, cpus=2)
    device = {"device": "cuda", "ranks": 2} if stuck == "gpus" else {"ranks": 2}
    head = [queue.submit(1, **device) for _ in range(7)]
    if stuck == "quota":
        with database.write() as session:
            session.add(Quota(owner="local", ranks=1, updated_at=utc_now()))
    if stuck == "unmade":
        plan = LocalLauncher.plan

        def refuse(launcher: LocalLauncher, launch: LaunchFile) -> LaunchPlan:
            if launch.job_id in head:
                raise ValueError("its profile is gone")
            return plan(launcher, launch)

        monkeypatch.setattr(LocalLauncher, "plan", refuse)
    first, second = queue.submit(2), queue.submit(2)
    started = [job_id for _ in range(5) for job_id in queue.run_round()]
    assert started == [first]
    words = {"gpus": "needs 2 GPUs, this machine has 0", "quota": "its owner's quota is 1", "unmade": "profile is gone"}
    assert all(words[stuck] in queue.reason_and_message(job_id)[1] for job_id in head), "each has been told"
    queue.end(first)
    assert queue.run_round() == [second]
    queue.end(second)
    if stuck == "quota":  # raised again
        with database.write() as session:
            session.get_one(Quota, "local").ranks = 2
        assert queue.run_round() == head[:1]


def test_job_that_cannot_be_launched_holds_no_slot_and_shows_the_reason(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = queue.submit(4, name="broken")
    plan = LocalLauncher.plan

    def refuse(launcher: LocalLauncher, launch: LaunchFile) -> LaunchPlan:
        if launch.job_id == broken:
            raise ValueError("its profile is gone")
        return plan(launcher, launch)

    monkeypatch.setattr(LocalLauncher, "plan", refuse)
    others = [queue.submit(2, name=f"other-{i}") for i in range(3)]
    assert queue.run_round() == others[:2], "all four slots, which the first job was given before"
    assert queue.reason_and_message(broken) == (
        "launcher-error",
        "the launcher cannot plan the attempt: its profile is gone",
    )
    assert queue.reason_and_message(others[2])[0] == "no-slot"
    queue.set_columns(broken, priority=5)
    assert queue.run_round() == [] and not queue.stopping(), "nobody is stopped for what cannot start"
    queue.end(others[0])
    assert queue.run_round() == others[2:], "nor waits behind it"
    for job_id in others[1:]:
        queue.end(job_id)
    monkeypatch.setattr(LocalLauncher, "plan", plan)
    assert queue.run_round() == [broken]
    assert queue.job(broken).reason is None


@pytest.mark.both_databases
def test_preemption_skips_a_victim_whose_row_is_locked(tmp_path: Path, database: Database) -> None:
    """It may wait for a row that the round holds, as another reconciler does that renews its leases."""
    if database.is_sqlite:
        pytest.skip("of PostgreSQL: SQLite has one writer at a time, whatever it writes")
    queue = Queue(tmp_path / "home", database, cpus=1)
    low = queue.submit(1, name="low")
    assert queue.run_round() == [low]
    high = queue.submit(1, name="high", priority=5)
    assert not queue.waits_for_row(low)
    assert not queue.stopping() and queue.reason_and_message(high)[0] == "no-slot"
    queue.run_round()
    assert queue.stopping() == {low}
