"""Every point is sent once, from the attempt of the lineage, over kills of ranks and of the service."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ratchet_contract.phases import Event
from ratchet_service.db.engine import Database
from ratchet_service.db.models import TrackerRun
from ratchet_service.trackers import export, plan
from ratchet_service.trackers.export import Exporter
from ratchet_service.trackers.mlflow import GIT_COMMIT
from ratchet_service.trackers.sink import Batch, End, Run, State
from ratchet_service.trackers.tensorboard import TensorBoardSink
from tests.support.tracked_jobs import COMMIT, FACTS, Killed, MemorySink, TrackedJob
from tests.support.tracker_readers import read_tensorboard

pytestmark = pytest.mark.takes_turns
HISTORIES = int(os.environ.get("RATCHET_TEST_HISTORIES", "3"))
SEED = int(os.environ.get("RATCHET_TEST_SEED", "0"))


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


@pytest.fixture
def exporter(database: Database, sink: MemorySink) -> Exporter:
    return Exporter(database, [sink], FACTS)


def pairs(steps: range, offset: float = 0.0) -> list[tuple[int, float]]:
    return [(step, step + offset) for step in steps]


def test_killed_attempt_gives_the_steps_up_to_the_checkpoint_and_the_next_one_the_rest(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.log(range(1, 101), 0.1)
    exporter.run_round(sink)
    assert not sink.runs
    job.commit(100)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 101), 0.1)}
    job.log(range(101, 151), 0.1)
    job.end(last_step=150)
    exporter.run_round(sink)
    job.start((100, 1))
    job.log(range(101, 181), 0.2)
    job.end(Event.END_SUCCEEDED, last_step=180)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 101), 0.1) + pairs(range(101, 181), 0.2)}
    assert sink.texts(job.id) == ["attempt 1 ended: rank-killed", "attempt 2 ended: rank-killed"]
    last = sink.runs[job.id][-1]
    assert isinstance(last, End)
    assert (last.status, last.summary, last.at) == ("SUCCEEDED", {"goodput": 0.5}, job.row().ended_at)
    assert last.checkpoint is not None
    assert last.checkpoint.endswith("step-000000000100.a0001")
    assert job.outbox() == 0
    calls = sink.calls
    exporter.run_round(sink)
    assert sink.calls == calls


def test_run_has_the_spec_with_masked_secrets_and_the_environment(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.end(Event.END_FAILED)
    exporter.run_round(sink)
    run = sink.described[job.id]
    assert run.parameters["env.KEY"] == "********"
    assert run.parameters["world.ranks_per_node"] == "2"
    assert run.parameters["environment.torch"] == "2.13"
    assert run.parameters[GIT_COMMIT] == COMMIT
    assert (run.experiment, run.parent, run.number) == ("e", None, 1)


def test_nan_and_infinities_arrive(database: Database, sink: MemorySink, exporter: Exporter) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.metrics(1, a=math.nan, b=math.inf, c=-math.inf, d=0.1)
    job.end(Event.END_SUCCEEDED)
    exporter.run_round(sink)
    found = sink.series(job.id)
    assert math.isnan(found["a"][0][1])
    assert (found["b"], found["c"], found["d"]) == ([(1, math.inf)], [(1, -math.inf)], [(1, 0.1)])


def test_late_value_of_another_series_at_a_settled_step_is_sent_once(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.log(range(1, 11))
    job.commit(10)
    exporter.run_round(sink)
    job.metrics(8, rank=1, other=8.0)
    job.metrics(10, evaluation=1.0)  # after the checkpoint
    job.metrics(8, rank=1, loss=-1.0)  # was sent
    job.log(range(11, 21))
    job.commit(20)
    exporter.run_round(sink)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 21)), "other": [(8, 8.0)], "evaluation": [(10, 1.0)]}


def test_evaluation_that_a_kill_interrupted_is_sent_from_the_next_attempt(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.log(range(1, 11))
    job.commit(10)
    job.end(last_step=10)
    job.start((10, 1))
    job.metrics(10, evaluation=1.0)
    job.end(Event.END_SUCCEEDED, last_step=10)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 11)), "evaluation": [(10, 1.0)]}


def test_live_values_are_sent_at_once_and_redone_steps_are_not_sent_again(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard", publish="live")
    job.start()
    job.log(range(1, 6))
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 6))}
    job.end(last_step=5)
    job.start()
    job.log(range(1, 9), 0.5)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 6)) + pairs(range(6, 9), 0.5)}
    assert [*sink.runs] == [job.id]


@pytest.mark.parametrize("publish", ["settled", "live"])
def test_requested_step_below_what_was_sent_makes_a_new_run(
    database: Database, sink: MemorySink, exporter: Exporter, publish: str
) -> None:
    job = TrackedJob(database, "tensorboard", publish=publish)
    job.start()
    for step in (10, 20):
        job.log(range(step - 9, step + 1))
        job.commit(step)
    exporter.run_round(sink)
    job.end(Event.END_FAILED, last_step=20)
    exporter.run_round(sink)
    job.resume(10, 1)
    job.start((10, 1))
    job.log(range(11, 31), 0.5)
    job.end(Event.END_SUCCEEDED, last_step=30)
    exporter.run_round(sink)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 21))}
    assert sink.series(f"{job.id}-2") == {"loss": pairs(range(11, 31), 0.5)}
    run = sink.described[f"{job.id}-2"]
    assert (run.number, run.parent) == (2, job.id)
    assert "attempt 2 starts from step 10, as requested" in sink.texts(f"{job.id}-2")
    assert isinstance(sink.runs[job.id][-1], End)
    assert "tracker-branched" in job.events()
    assert job.outbox() == 0


def test_requested_step_that_was_not_passed_continues_the_run(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.log(range(1, 21))
    job.commit(20)
    exporter.run_round(sink)
    job.end(Event.END_SUSPENDED, last_step=20)
    job.resume(20, 1)
    job.start((20, 1))
    job.log(range(21, 31))
    job.end(Event.END_SUCCEEDED, last_step=30)
    exporter.run_round(sink)
    assert [*sink.runs] == [job.id]
    assert sink.series(job.id) == {"loss": pairs(range(1, 31))}


@pytest.mark.parametrize("seen_before", [True, False])
def test_sent_step_that_differs_when_it_is_done_again_makes_a_new_run(
    database: Database, sink: MemorySink, exporter: Exporter, seen_before: bool
) -> None:
    job = TrackedJob(database, "tensorboard", publish="live")
    job.start()
    job.log(range(1, 11))
    exporter.run_round(sink)
    job.end(last_step=10)
    job.start()
    job.log(range(1, 6), 0.5)
    if seen_before:
        exporter.run_round(sink)
    job.log(range(6, 16), 0.5)
    if seen_before:
        exporter.run_round(sink)
    job.differ(3)
    exporter.run_round(sink)
    job.end(Event.END_SUCCEEDED, last_step=15)
    exporter.run_round(sink)
    exporter.run_round(sink)
    assert sink.series(f"{job.id}-2") == {"loss": pairs(range(1, 16), 0.5)}
    assert sink.series(job.id)["loss"][:10] == pairs(range(1, 11))
    assert job.outbox() == 0


def test_step_that_differs_but_was_not_sent_makes_no_run(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.log(range(1, 11))
    job.commit(10)
    job.log(range(11, 16))
    exporter.run_round(sink)
    job.end(last_step=15)
    job.start((10, 1))
    job.log(range(11, 21), 0.5)
    job.commit(20)
    exporter.run_round(sink)
    job.differ(12)
    job.end(Event.END_SUCCEEDED, last_step=20)
    exporter.run_round(sink)
    assert [*sink.runs] == [job.id]
    assert sink.series(job.id) == {"loss": pairs(range(1, 11)) + pairs(range(11, 21), 0.5)}


def test_job_that_ended_and_is_resumed_continues_its_run(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    job.log(range(1, 11))
    job.commit(10)
    job.log(range(11, 16))
    job.end(Event.END_FAILED, last_step=15)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 16))}
    job.resume()
    job.start((10, 1))
    job.log(range(11, 21), 0.5)
    job.end(Event.END_SUCCEEDED, last_step=20)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 16)) + pairs(range(16, 21), 0.5)}
    assert [one.status for one in sink.runs[job.id] if isinstance(one, End)] == ["FAILED", "SUCCEEDED"]


def test_tracker_that_is_away_loses_nothing_and_the_history_says_so_twice(
    database: Database, sink: MemorySink, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "pause_after", lambda _: 0.0)
    job = TrackedJob(database, "tensorboard", publish="live")
    job.start()
    for number in range(2 * export.EVENT_AFTER):
        job.log([number + 1])
        sink.fault = "refuse"
        exporter.run_round(sink)
    assert not sink.runs
    job.end(Event.END_SUCCEEDED)
    exporter.run_round(sink)
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 2 * export.EVENT_AFTER + 1))}
    assert [one for one in job.events() if one.startswith("tracker")] == ["tracker-failing", "tracker-back"]


def test_pauses_grow_to_some_minutes() -> None:
    assert [export.pause_after(n) for n in (1, 2, 3, 20)] == [2, 4, 8, 300]


def test_one_tracker_that_is_away_does_not_stop_the_other(database: Database) -> None:
    first, second = MemorySink("tensorboard"), MemorySink("mlflow")
    exporter = Exporter(database, [first, second], FACTS)
    job = TrackedJob(database, "tensorboard", "mlflow")
    job.start()
    job.log(range(1, 11))
    job.commit(10)
    second.fault = "refuse"
    exporter.run_round(second)
    exporter.run_round(first)
    assert first.series(job.id) == {"loss": pairs(range(1, 11))}
    assert job.outbox() == 10


def test_fault_of_one_run_does_not_stop_other_jobs(database: Database, sink: MemorySink, exporter: Exporter) -> None:
    jobs = [TrackedJob(database, "tensorboard", publish="live", name=name) for name in ("a", "b")]
    for job in jobs:
        job.start()
        job.log([1])
    sink.fault = "raise"
    exporter.run_round(sink)
    assert [*sink.runs] == [jobs[1].id]
    with database.read() as session:
        run = session.get_one(TrackerRun, (jobs[0].id, "tensorboard", 1))
    assert (run.failures, run.error) == (1, "ValueError: a fault of the tracker's code")


def test_job_that_had_to_wait_for_long_delays_another_by_one_batch(
    database: Database, sink: MemorySink, exporter: Exporter, small_batches: None
) -> None:
    late, other = (TrackedJob(database, "tensorboard", publish="live", name=name) for name in ("a", "b"))
    for job, steps in ((late, 40), (other, 1)):
        job.start()
        job.log(range(1, steps + 1))
    exporter.run_round(sink)
    assert sink.order[:3] == [late.id, other.id, late.id]
    assert sink.series(late.id) == {"loss": pairs(range(1, 41))}
    assert sink.series(other.id) == {"loss": pairs(range(1, 2))}


def test_batch_is_bounded_in_bytes(
    database: Database, sink: MemorySink, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_BYTES", 2000)
    job = TrackedJob(database, "tensorboard", publish="live")
    job.start()
    wide = {f"series {number}": 0.1 for number in range(50)}  # more than 800 bytes
    for step in range(1, 6):
        job.metrics(step, **wide)
    exporter.run_round(sink)
    assert sink.calls == 3
    assert sink.series(job.id) == {name: [(step, 0.1) for step in range(1, 6)] for name in wide}
    job.metrics(6, **wide, **{f"more {number}": 0.2 for number in range(200)})  # alone more than the bound
    exporter.run_round(sink)
    assert sink.series(job.id)["more 199"] == [(6, 0.2)]


def test_service_that_starts_without_a_tracker_says_which_values_wait(
    database: Database, exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    job = TrackedJob(database, "tensorboard", "mlflow", publish="live")
    job.start()
    with exporter.running():
        pass
    [text] = [record.getMessage() for record in caplog.records if "no tracker" in record.getMessage()]
    assert "no tracker mlflow" in text and text.endswith("jobs: 1")


def test_second_process_exports_nothing_while_the_first_lives(
    database: Database, sink: MemorySink, exporter: Exporter
) -> None:
    job = TrackedJob(database, "tensorboard", publish="live")
    job.start()
    job.log([1])
    exporter.run_round(sink)
    job.log([2])
    other = MemorySink()
    Exporter(database, [other], FACTS).run_round(other)
    assert not other.runs
    exporter.run_round(sink)
    assert sink.series(job.id) == {"loss": pairs(range(1, 3))}


class SlowSink(MemorySink):
    """Another process tries to export during a call that takes three times as long as the lease."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._other, self.other = Exporter(database, [], FACTS), MemorySink()

    def export(self, run: Run, state: State, batch: Batch) -> State:
        until = time.monotonic() + 3 * export._LEASE_SECONDS
        while time.monotonic() < until:
            self._other.run_round(self.other)
            time.sleep(0.05)
        return super().export(run, state, batch)


def test_lease_is_kept_during_a_long_call(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_LEASE_SECONDS", 1.5)
    job, sink = TrackedJob(database, "tensorboard", publish="live"), SlowSink(database)
    job.start()
    job.log([1])
    Exporter(database, [sink], FACTS).run_round(sink)
    assert not sink.other.runs
    assert sink.series(job.id) == {"loss": pairs(range(1, 2))}


def test_job_without_trackers_stores_nothing(database: Database) -> None:
    job = TrackedJob(database)
    job.start()
    job.log(range(1, 4))
    assert job.outbox() == 0


class KilledAfterWriting(TensorBoardSink):
    def export(self, run: Run, state: State, batch: Batch) -> State:
        super().export(run, state, batch)
        raise Killed


def test_kill_between_sending_and_recording_leaves_each_point_once(database: Database, tmp_path: Path) -> None:
    job = TrackedJob(database, "tensorboard")
    job.start()
    file = None
    for step in (10, 20, 30):
        job.log(range(step - 9, step + 1))
        job.commit(step)
        dying = KilledAfterWriting(tmp_path)
        killed = Exporter(database, [dying], FACTS)
        with pytest.raises(Killed):
            killed.run_round(dying)
        [file] = (tmp_path / "e" / job.id).iterdir()
        written = file.read_bytes()
        killed._release("tensorboard")  # its lease ends with its process
        sink = TensorBoardSink(tmp_path)
        next_process = Exporter(database, [sink], FACTS)
        next_process.run_round(sink)
        assert file.read_bytes() == written
        next_process._release("tensorboard")
    assert file is not None
    assert read_tensorboard(file.parent)[0] == {"loss": pairs(range(1, 31))}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plan, "MAX_ROWS", 4)
    monkeypatch.setattr(export, "pause_after", lambda _: 0.0)
    yield


class History:
    """A drawn history of a job: attempts, checkpoints, kills, damage, late ranks. ``reported``: which attempts reported a step of
    a series. ``settled``: by the oracle, the attempt of each point at the first moment that it may be sent."""

    def __init__(self, job: TrackedJob, seed: int, damage: bool) -> None:
        self.job, self.random, self.damage = job, random.Random(seed), damage
        self.bases: dict[int, tuple[int, int | None]] = {}
        self.commits: list[tuple[int, int]] = []
        self.reported: dict[tuple[str, int], set[int]] = {}
        self.settled: dict[tuple[str, int], int] = {}
        self.late: list[int] = []
        self.step = 0
        self.attempt = 0
        self.start()

    def start(self) -> None:
        lineage = [one for one in self.commits if self.attempt_at(one[0]) == one[1]]
        if self.damage and lineage and self.random.random() < 0.4:
            lineage = lineage[: self.random.randrange(len(lineage))]
        base: tuple[int, int | None] = lineage[-1] if lineage else (0, None)
        self.attempt = self.job.start(base)
        self.bases[self.attempt], self.step = base, base[0]

    def attempt_at(self, step: int, attempt: int | None = None) -> int:
        """The attempt of the current lineage at a step."""
        attempt = attempt or self.attempt
        base, of = self.bases[attempt]
        return attempt if of is None or step > base else self.attempt_at(step, of)

    def report(self, name: str, step: int, rank: int = 0) -> None:
        self.job.metrics(step, rank, **{name: step + self.attempt / 1000})
        self.reported.setdefault((name, step), set()).add(self.attempt)

    def train(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.step += 1
            self.report("loss", self.step)
            self.late.append(self.step)
            if self.random.random() < 0.6:
                self.catch_up()

    def catch_up(self) -> None:
        for step in self.late:
            self.report("other", step, rank=1)
        self.late = []

    def settle(self, until: int) -> None:
        for (name, step), attempts in self.reported.items():
            if step <= until and (of := self.attempt_at(step)) in attempts:
                self.settled.setdefault((name, step), of)

    def commit(self) -> None:
        if self.step > self.bases[self.attempt][0] and (self.step, self.attempt) not in self.commits:
            self.job.commit(self.step)
            self.commits.append((self.step, self.attempt))

    def end(self, event: Event) -> None:
        self.catch_up()  # what a killed rank had spooled is read before the attempt ends
        self.job.end(event, self.step)

    def newest(self) -> int:
        return max((step for step, of in self.commits if self.attempt_at(step) == of), default=0)


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("publish", ["settled", "live"])
def test_drawn_histories_send_each_point_once(
    database: Database, exporter: Exporter, small_batches: None, publish: str, damage: bool
) -> None:
    for seed in range(SEED, SEED + HISTORIES):
        sink, other = MemorySink(), MemorySink("mlflow")
        job = TrackedJob(database, "tensorboard", "mlflow", publish=publish, name=f"s{seed}")
        history = History(job, seed, damage)

        def run(one: MemorySink, fault: str | None = None) -> None:
            one.fault = fault
            with suppress(Killed):
                exporter.run_round(one)

        for _ in range(25):
            kind = history.random.choice(("train", "train", "commit", "kill", "export", "export", "fault", "other"))
            if kind == "train":
                history.train()
            elif kind == "commit":
                history.commit()
            elif kind == "kill":
                history.end(Event.END_REQUEUE)
                history.start()
            elif kind == "other":
                run(other)
            else:
                run(sink, history.random.choice(("refuse", "kill")) if kind == "fault" else None)
            history.settle(history.newest())
        history.end(Event.END_SUCCEEDED)
        history.settle(history.step)
        for one in (sink, other):
            run(one)
            run(one)
            assert [*one.runs] == [job.id]
            found = one.series(job.id)
            for name, points in found.items():
                steps = [step for step, _ in points]
                assert steps == sorted(set(steps)), (seed, name)
            sent = {
                (name, step): round((value - step) * 1000) for name, points in found.items() for step, value in points
            }
            assert all(of in history.reported[key] for key, of in sent.items())
            final = {key for key, attempts in history.reported.items() if history.attempt_at(key[1]) in attempts}
            if publish == "settled" and not damage:
                assert sent == history.settled, seed
            else:
                assert {key for key in final if key[1] <= history.step} <= sent.keys() <= history.reported.keys(), seed
            assert isinstance(one.runs[job.id][-1], End)
        assert job.outbox() == 0
