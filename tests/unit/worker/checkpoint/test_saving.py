"""Saves beside the training, with the real threads, store and disk; the ranks are threads, and the time that writing takes is the
test's: a gate in front of the real function stands for a slow or stuck disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ratchet_contract.checkpoint.manifest import HookRecord
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.paths import JobPaths
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_hooks.summary import HookSummary
from ratchet_store.read.checkpoint_reader import CheckpointReader
from ratchet_store.write.rank_file import RankWriter
from ratchet_worker.checkpoint import host_copy
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.checkpointer import Checkpointer
from ratchet_worker.checkpoint.manifest_commit import Committer
from ratchet_worker.checkpoint.save import SaveState
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.state.live_memory import Bytes, SafeReader
from ratchet_worker.state.replica_digests import number_of_parts
from ratchet_worker.state.snapshot import Snapshot, Until
from tests.support.server import wait_for

pytestmark = pytest.mark.usefixtures("no_small_tensors")

RANKS = 2


class Gate:
    """Writing waits while it is closed, for the ranks that it is closed for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed: set[int] = set()
        self.waiting: set[int] = set()
        self._changed = threading.Condition()
        real = RankWriter.write

        def write(self_: RankWriter, *rest: Any) -> Any:
            rank = self_.rank
            with self._changed:
                self.waiting.add(rank)
                self._changed.notify_all()
                self._changed.wait_for(lambda: rank not in self.closed, 30)
                self.waiting.discard(rank)
            return real(self_, *rest)

        monkeypatch.setattr(RankWriter, "write", write)

    def close(self, *ranks: int) -> None:
        self.closed = set(ranks)

    def open(self) -> None:
        with self._changed:
            self.closed = set()
            self._changed.notify_all()

    def reached(self, *ranks: int) -> None:
        wait_for(lambda: self.waiting >= set(ranks), f"ranks {ranks} to write", 10)


class Told:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def __getattr__(self, kind: str) -> Any:
        def say(*values: Any, **data: Any) -> None:
            self.said.append((kind, values))

        return say

    def of(self, kind: str) -> list[Any]:
        return [values for name, values in self.said if name == kind]

    def notes(self) -> list[str]:
        return [values[0] for values in self.of("note")]


class Group:
    """``RANKS`` checkpointers over one store. ``weight`` is every rank's parameter. ``task``: None for a script."""

    def __init__(
        self, root: Path, deadline: float = 10, *, early: bool = False, task: str | None = "task", **spec: Any
    ) -> None:
        self.paths, self.told = JobPaths(root), [Told() for _ in range(RANKS)]
        self.weights = [torch.zeros(4096) for _ in range(RANKS)]
        self.gave_up: list[bool] = []
        checkpoint = CheckpointSpec(**{"every_steps": 1, **spec})
        job = SimpleNamespace(checkpoint=checkpoint, task=task, hook=None, digest=lambda: "spec")
        launch: Any = SimpleNamespace(
            job_root=str(root), job_id="job", attempt=1, spec=job, save_seconds=0.0, world_size=RANKS,
            resolved=SimpleNamespace(code_digest=None), deadlines=SimpleNamespace(step=deadline),
        )  # fmt: skip
        store, counter = HashStore(), Told()
        self.ranks = [
            Checkpointer(
                launch, Exchange(store, r, RANKS, deadline), Exchange(store, r, RANKS, deadline), counter, self.told[r],  # type: ignore[arg-type]
                Base(), torch.device("cpu"), lambda: self.gave_up.append(True), early=early,
            )
            for r in range(RANKS)
        ]  # fmt: skip

    def content(self, rank: int, step: int) -> Content:
        snapshot = Snapshot(
            shared={"model/w": self.weights[rank]},
            private={"buffers/seen": torch.tensor([rank, step])},
            until={"model/w": Until.STEP},
        )
        summary = HookSummary(
            name="allreduce", wrapper=None, parameters={}, rank=rank, step=step, phase="steady", iteration=step,
            compression_rate=1.0, elements_before=0, elements_after=0, bytes_before=0, bytes_after=0, memory_bytes=0,
            buckets=1,
        )  # fmt: skip
        hook = HookRecord(name="allreduce", parameters={}, state_version=1)
        parts = number_of_parts(snapshot.sizes(), RANKS)
        return Content(snapshot, None, hook, "equal", summary, {}, None, None, parts, lambda _: None)

    def together(self, act: Any) -> list[Any]:
        """``act(rank)`` of all ranks at once; what each returned or raised."""
        found: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                found[rank] = act(rank)
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(found) == RANKS, "a rank hangs"
        return [found[rank] for rank in range(RANKS)]

    def step(self, number: int, apart: float = 0.0) -> list[Any]:
        """The optimizer's step and the boundary behind it, on all ranks. ``apart``: by so much rank 1's weights are others."""

        def act(rank: int) -> None:
            self.ranks[rank].on_step_begin()
            self.ranks[rank].wait_until_copied(Until.STEP)
            self.weights[rank].fill_(number + apart * rank)
            late = Snapshot(shared={"model/w": self.weights[rank]}, until={"model/w": Until.STEP})
            self.ranks[rank].on_step_end(number, lambda: (late, 0), lambda: self.content(rank, number))

        return self.together(act)

    def drain(self) -> list[Any]:
        return self.together(lambda rank: self.ranks[rank].drain())

    def saved(self) -> dict[int, float]:
        """The weight in each checkpoint, by step."""
        found = {}
        for manifest in sorted(self.paths.checkpoints.glob("*/MANIFEST.json")):
            reader = CheckpointReader(manifest.parent)
            whole = reader.tensors("shared/model/w")["shared/model/w"]
            values = torch.frombuffer(whole.data, dtype=torch.float32).unique().tolist()
            assert len(values) == 1, "of two steps"
            found[reader.manifest.step] = values[0]
        return found


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies of parameters wait for the event."""
    may_copy, real = threading.Event(), host_copy._copy_bytes

    def move(memory: Bytes, target: Bytes, reader: SafeReader | None) -> None:
        assert memory.size < 1000 or may_copy.wait(20)
        real(memory, target, reader)

    monkeypatch.setattr(host_copy, "_copy_bytes", move)
    return may_copy


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def test_training_continues_during_write_and_saved_state_is_of_that_step(tmp_path: Path, gate: Gate) -> None:
    group = Group(tmp_path, every_steps=3)
    gate.close(0, 1)
    for number in range(1, 6):  # step 3 is under way while 4 and 5 are done
        assert group.step(number) == [None, None]
    gate.reached(0, 1)
    assert group.saved() == {} and group.ranks[0].last == Base()
    gate.open()
    group.drain()
    assert group.saved() == {3: 3.0}
    assert [rank.last.step for rank in group.ranks] == [3, 3]


def test_training_continues_during_retention_and_stop_waits_for_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, may_delete, real = Group(tmp_path, every_steps=2, keep_last=2), threading.Event(), Committer.retain

    def retain(committer: Committer) -> None:
        assert may_delete.wait(20)
        real(committer)

    monkeypatch.setattr(Committer, "retain", retain)
    for number in (1, 2, 3):
        assert group.step(number) == [None, None]
        assert group.drain() == [0, 0]
    assert [rank.last.step for rank in group.ranks] == [2, 2] and not may_delete.is_set()
    ending = threading.Thread(target=group.ranks[0].wait_for_retention, daemon=True)
    ending.start()
    ending.join(0.5)
    assert ending.is_alive()
    may_delete.set()
    ending.join(20)
    assert not ending.is_alive()
    for number in (4, 5, 6, 7):
        group.step(number)
    group.together(lambda rank: group.ranks[rank].save(7, "stop", False, lambda: group.content(rank, 7)))
    assert [*group.saved()] == [6, 7] and len(list(group.paths.checkpoints.iterdir())) == 2


def test_next_save_begins_during_deletion_but_writes_after_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion that hangs would hold up the optimizer, without a sign of life."""
    group, may_delete, real = Group(tmp_path, every_steps=2), threading.Event(), Committer.retain

    def retain(committer: Committer) -> None:
        assert may_delete.wait(30)
        real(committer)

    monkeypatch.setattr(Committer, "retain", retain)
    for number in (1, 2, 3):
        assert group.step(number) == [None, None]
        assert group.drain() == [0, 0]
    try:
        for number in (4, 5):  # the save of 4 is begun, and what it copies is changed
            assert group.step(number) == [None, None]
        there = group.paths.checkpoint(4, 1)
        wait_for(lambda: [*there.glob("rank-00001*.safetensors")], "rank 1, which deletes nothing, to write", 10)
        assert not [*there.glob("rank-00000*")] and group.saved() == {2: 2.0}
    finally:
        may_delete.set()
    assert group.drain() == [0, 0] and group.saved() == {2: 2.0, 4: 4.0}


def test_retention_error_reaches_loop_with_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, told = Group(tmp_path, every_steps=2), threading.Event()

    def retain(committer: Committer) -> None:
        assert told.wait(20)
        raise MemoryError("no memory to delete anything")

    monkeypatch.setattr(Committer, "retain", retain)
    group.step(1)
    group.step(2)
    assert group.drain() == [0, 0]
    told.set()
    group.step(3)
    assert group.step(4) == [None, None]
    with pytest.raises(MemoryError, match="to delete"):
        group.ranks[0].drain()


def test_state_dict_is_called_only_by_saves_and_errors_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from ``state_dict()`` of the user's objects, which may change something or fail."""
    group, asked = Group(tmp_path, every_steps=3), list[tuple[int, int]]()
    real = group.content

    def content(rank: int, step: int) -> Content:
        asked.append((rank, step))
        if (rank, step) == (1, 6):
            raise RuntimeError("an object has no state any more")
        return real(rank, step)

    monkeypatch.setattr(group, "content", content)
    for number in (1, 2, 3, 4, 5):
        assert group.step(number) == [None, None]
    group.drain()
    assert sorted(asked) == [(0, 3), (1, 3)] and group.saved() == {3: 3.0}
    with pytest.raises(RuntimeError, match="no state any more"):
        group.ranks[1].begin_save(6, "schedule", lambda: content(1, 6))


def test_optimizer_step_waits_for_pending_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path, every_steps=3)
    group.step(1), group.step(2)
    may_copy = slow_copies(monkeypatch)
    group.step(3)
    save = group.ranks[0]._save
    assert save is not None
    at_once = group.together(lambda rank: group.ranks[rank].wait_until_copied(Until.BOUNDARY))
    assert at_once == [None, None]  # what was copied then
    behind = threading.Thread(target=lambda: group.step(4), daemon=True)
    behind.start()
    wait_for(lambda: save.stall > 0.2, "a loop that stands still", 10)
    assert behind.is_alive() and group.weights[0].unique().tolist() == [3.0]
    may_copy.set()
    behind.join(20)
    group.drain()
    assert group.saved() == {3: 3.0}
    ((_, _, stall),) = group.told[0].of("report_committed")
    assert stall > 0.2


def test_reported_stall_is_complete_when_loop_wakes_after_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, every_steps=3)
    group.step(1), group.step(2)
    may_copy = slow_copies(monkeypatch)
    group.step(3)
    save = group.ranks[0]._save
    assert save is not None
    real = save.progress.wait_for
    monkeypatch.setattr(save.progress, "wait_for", lambda _state, *given: real(SaveState.RETAINING, *given))
    behind = threading.Thread(target=lambda: group.step(4), daemon=True)
    behind.start()
    wait_for(lambda: save.stall > 0.2, "a loop that stands still", 10)
    may_copy.set()
    behind.join(20)
    group.drain()
    ((_, _, stall),) = group.told[0].of("report_committed")
    assert 0.2 < stall <= save.stall


def test_a_checkpoint_that_is_due_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    group = Group(tmp_path, keep_last=9)
    group.step(1)
    group.drain()
    gate.close(0)
    group.step(2)
    gate.reached(0)
    behind = threading.Thread(target=lambda: group.step(3), daemon=True)
    behind.start()
    behind.join(0.2)
    assert behind.is_alive()
    save = group.ranks[0]._save
    assert save is not None
    wait_for(lambda: save.stall > 0.2, "a loop that stands still", 10)
    gate.open()
    behind.join(20)
    group.drain()
    assert group.saved() == {1: 1.0, 2: 2.0, 3: 3.0}
    (seconds, stall), *_ = [told[1:] for told in group.told[0].of("report_committed") if told[0].step == 2]
    assert 0.2 < stall <= seconds


def test_reported_stall_of_a_requested_save_includes_its_writing(tmp_path: Path, gate: Gate) -> None:
    group = Group(tmp_path, every_steps=3)
    group.step(1)
    gate.close(1)  # rank 0 itself has written, and waits for rank 1

    def act(rank: int) -> Any:
        return group.ranks[rank].save(1, "request", False, lambda: group.content(rank, 1))

    saving = threading.Thread(target=lambda: group.together(act), daemon=True)
    saving.start()
    gate.reached(1)
    save = group.ranks[0]._save
    assert save is not None
    wait_for(lambda: save.stall > 0.2, "a loop that stands still", 10)
    gate.open()
    saving.join(20)
    ((_, seconds, stall),) = group.told[0].of("report_committed")
    assert 0.2 < stall <= seconds


def test_due_checkpoint_with_when_busy_skip_is_skipped_and_noted(tmp_path: Path, gate: Gate) -> None:
    group = Group(tmp_path, keep_last=9, when_busy="skip")
    group.step(1)
    group.drain()
    gate.close(0)
    for number in (2, 3, 4):
        assert group.step(number) == [None, None]
    gate.reached(0)
    gate.open()
    group.drain()
    group.step(5)
    group.drain()
    assert group.saved() == {1: 1.0, 2: 2.0, 5: 5.0}
    note = next(values for values in group.told[0].of("note") if values[0] == "checkpoint-skipped")
    assert note[1].startswith("2 due checkpoints before step 5 skipped")


def test_interval_of_the_automatic_schedule_is_noted_once_a_save_is_measured(tmp_path: Path) -> None:
    group = Group(tmp_path, every_steps="auto")
    for number in range(1, 20):
        group.step(number)
        if number == 10:
            group.drain()
    assert group.told[0].notes() == []
    group.step(20)
    group.drain()
    ((kind, text),) = group.told[0].of("note")
    assert kind == "checkpoint-interval" and text.startswith("automatic schedule: every ")
    assert list(group.saved()) == [10, 20] and group.told[1].notes() == []


def test_a_rank_that_is_stuck_fails_the_one_checkpoint_alone(tmp_path: Path, gate: Gate) -> None:
    group = Group(tmp_path, deadline=2.0)
    gate.close(1)
    group.step(1)
    gate.reached(1)
    wait_for(lambda: group.told[0].of("report_checkpoint_failed"), "rank 0 to give the checkpoint up", 10)
    ((step, text),) = group.told[0].of("report_checkpoint_failed")
    assert step == 1 and "no answer from rank [1]" in text
    gate.open()
    assert group.drain() == [1, 1]
    group.ranks[0]._committer._timeout = 20.0  # the next one is given up for no pause of the machine
    group.step(2)
    assert group.drain() == [0, 0]
    assert group.saved() == {2: 2.0} and not group.gave_up


def test_third_consecutive_save_failure_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StateError("the disk is on fire")

    group = Group(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(RankWriter, "write", refuse)
        for number in (1, 2, 3):
            assert group.step(number) == [None, None]
        group.drain()
    assert group.gave_up == [True] and len(group.told[0].of("report_checkpoint_failed")) == 3
    group.step(4)  # the disk would take it now, but all ranks are about to stop
    assert group.drain() == [0, 0] and group.saved() == {}
    for rank in group.ranks:
        assert isinstance(rank.too_many_failures, CheckpointError) and "step 3" in str(rank.too_many_failures)


def test_stop_save_that_would_exceed_remaining_time_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path)
    group.step(1)
    group.drain()
    schedule: Any = group.ranks[0]._schedule
    monkeypatch.setattr(schedule, "save_seconds", lambda: 12.0)

    def stop(rank: int, left: float) -> Any:
        return group.ranks[rank].save(2, "stop", False, lambda: group.content(rank, 2), left).error

    late = group.together(lambda rank: stop(rank, 5.0))
    assert late[0] == late[1] and "a save takes about 12.0 s, and 5.0 s are left" in late[0]
    assert group.told[0].notes() == ["checkpoint-late"] and group.saved() == {1: 1.0}
    assert group.together(lambda rank: stop(rank, 13.0)) == [None, None]
    assert 2 in group.saved()


def test_diverged_replicas_are_not_saved_and_tensor_is_named(tmp_path: Path) -> None:
    group = Group(tmp_path)

    def act(rank: int) -> Any:
        group.weights[rank][4000 if rank else 0] = 1.0
        return group.ranks[rank].save(1, "request", False, lambda: group.content(rank, 1)).error

    group.ranks[0].last = group.ranks[1].last = Base()
    errors = group.together(act)
    assert errors[0] == errors[1] and errors[0].startswith("replicas have diverged: model/w of rank [")
    assert group.saved() == {}


def test_early_save_step_is_decided_by_rank_0_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def slow(_: Path, size: int) -> float:
        asked.append(size)
        return 2.0

    monkeypatch.setattr("ratchet_worker.checkpoint.checkpointer.expected_seconds", slow)
    group = Group(tmp_path, early=True, every_steps=5000)
    schedule: Any = group.ranks[0]._schedule
    schedule._trained_seconds, number = 39.97, 0
    while not group.ranks[0]._save_count:
        number += 1
        assert group.step(number) == [None, None]
    assert group.drain() == [0, 0]
    assert asked == [4096 * 4] and schedule._trained_seconds >= 39.99 and list(group.saved()) == [number]
    assert [rank.metric_step for rank in group.ranks] == [None, None]
    assert [values[0].reason for values in group.told[0].of("report_committed")] == ["first"]


def test_replica_difference_during_step_is_divergence_when_repeated(tmp_path: Path) -> None:
    """What code changes while it is copied may differ between the ranks for that alone."""
    group = Group(tmp_path, every_steps=3)
    for number in range(1, 3):
        group.step(number)
    group.step(3, apart=1.0)
    group.drain()
    for number in range(4, 7):
        group.step(number, apart=1.0)
    group.drain()
    told = [text for _, text in group.told[0].of("report_checkpoint_failed")]
    assert len(told) == 2 and group.saved() == {}
    assert (
        told[0].startswith("model/w of rank [1] differs") and "Code other than optimizer.step() changed it" in told[0]
    )
    assert told[1].startswith("replicas have diverged: model/w of rank [1]") and "Likely cause: " in told[1]


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_early_save_never_displaces_first_scheduled_save(tmp_path: Path, gate: Gate, when_busy: str) -> None:
    group = Group(tmp_path, early=True, every_steps=3, when_busy=when_busy)
    gate.close(0, 1)
    group.step(1)
    gate.reached(0, 1)
    group.step(2)
    opening = threading.Timer(0.3, gate.open)
    opening.start()
    group.step(3)
    group.drain()
    assert list(group.saved()) == [1, 3] and not group.told[0].notes()


def test_early_save_is_omitted_after_another_save(tmp_path: Path) -> None:
    group = Group(tmp_path, early=True, every_steps=10, first=5)
    for number in range(1, 9):
        group.step(number)
        if number == 3:
            group.together(lambda rank: group.ranks[rank].begin_save(3, "request", lambda: group.content(rank, 3)))
    group.drain()
    assert list(group.saved()) == [3]
