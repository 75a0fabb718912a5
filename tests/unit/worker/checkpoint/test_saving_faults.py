"""What goes wrong in a save beside the training fails that save alone: it tears nothing, and nobody waits for ever."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratchet_contract.errors import StateError, UserError
from ratchet_store.write.rank_file import RankWriter
from ratchet_worker.checkpoint import host_copy as staging
from ratchet_worker.checkpoint import rank_file, saver_thread
from ratchet_worker.checkpoint.copy_buffer import StagingBuffer
from ratchet_worker.checkpoint.copy_sources import Source, Sources
from ratchet_worker.checkpoint.host_copy import Staged, Staging
from ratchet_worker.checkpoint.manifest_commit import Committer, Order
from ratchet_worker.checkpoint.save import Save, SaveState
from ratchet_worker.state import replica_digests
from ratchet_worker.state.snapshot import Snapshot, Until
from ratchet_worker.training import runtime as runtime_module
from ratchet_worker.training.runtime import Runtime
from ratchet_worker.training.step_times import StepClock
from tests.support.server import wait_for
from tests.unit.worker.checkpoint.test_saving import RANKS, Gate, Group, slow_copies

pytestmark = pytest.mark.usefixtures("no_small_tensors")

Act = Callable[[], Any]


def begun(act: Act) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(0.2)
    return thread


@pytest.mark.parametrize("spec", [
    {"every_steps": 100, "staging": "blocking"},
    {"every_steps": 100, "staging": "auto", "task": None},
    {"every_steps": None, "staging": "overlapped"},  # nothing was tried where nothing was due
], ids=["blocking", "script", "not tried"])  # fmt: skip
def test_requested_save_is_copied_before_next_step_when_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Any
) -> None:
    group = Group(tmp_path, **spec)
    group.step(1)
    group.step(2)
    may_copy = slow_copies(monkeypatch)

    def ask(rank: int) -> None:
        group.ranks[rank].begin_save(2, "request", lambda: group.content(rank, 2))

    asked = begun(lambda: group.together(ask))
    assert asked.is_alive()
    may_copy.set()
    asked.join(20)
    for weight in group.weights:
        weight.data.fill_(7)  # which torch does not count
    group.drain()
    assert group.saved() == {2: 2.0}


def test_evaluation_waits_for_copies_of_save_begun_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Averages are swapped for the parameters in it."""
    told: list[str] = []

    def undisturbed(*_: Any, **__: Any) -> Any:
        told.append("averages")
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime_module, "preserving_state", undisturbed)
    run: Any = Runtime.__new__(Runtime)
    run.state = SimpleNamespace(
        require_wrapped=lambda: (None, None), data=None, all_optimizers=[], on_evaluation_begin=lambda: None
    )
    run.checkpointer = SimpleNamespace(wait_until_copied=lambda *_, **__: told.append("hold"), drain=None)
    run.counter = SimpleNamespace(enter_stage=lambda _: None, tick=None)
    run.launch = SimpleNamespace(spec=SimpleNamespace(ddp=SimpleNamespace(broadcast_buffers=True)))
    run.exchange = run.device = run.agreement = None
    run.trial, run.step = SimpleNamespace(record_evaluation=lambda *_: None), 1
    run._step_open, run._saved_in_body, run._late_changes, run._clock = False, False, None, StepClock()
    run._begin_evaluation = lambda: str(told.append("request"))  # type: ignore[func-returns-value]
    with pytest.raises(KeyboardInterrupt), run.evaluating():
        pass
    assert told[-2:] == ["hold", "averages"]


def test_hold_waits_for_device_copies_after_host_is_done() -> None:
    """On CUDA the host is done when copies are queued: with nothing to compare (one rank, replicas apart) long before they are
    made."""
    waited: list[Until] = []
    order = Order(1, 1, "schedule", False, 0.0)
    save = Save(order, None, SimpleNamespace(wait=waited.append), None, False)  # type: ignore[arg-type]
    save.progress.advance(SaveState.WRITING)
    save.wait_until_copied(Until.STEP)
    assert Until.STEP in waited
    save.wait_until_copied(Until.BACKWARD)
    assert waited[-1] is Until.BACKWARD


def test_interrupted_hold_stops_counting_stall() -> None:
    def interrupted(_: Until) -> None:
        raise KeyboardInterrupt

    save = Save(Order(1, 1, "schedule", False, 0.0), None, SimpleNamespace(wait=interrupted), None, False)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        save.wait_until_copied(Until.STEP)
    stall = save.stall
    assert 0 < stall == save.stall


def test_failed_copy_releases_loop_and_raises_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, real = Group(tmp_path, every_steps=2), Staged.copy

    def copy(self: Staged, until: Until, **rest: Any) -> None:
        if until is Until.BACKWARD:
            save = next(rank._save for rank in group.ranks if rank._save is not None and rank._save.staged is self)
            wait_for(lambda: save.loop_waits, "the loop to wait", 20)
            raise RuntimeError("no memory for a copy")
        real(self, until, **rest)

    group.step(1)
    monkeypatch.setattr(Staged, "copy", copy)
    group.step(2)
    found = [*group.step(3), *group.drain()]
    told = [
        str(one) for one in found if isinstance(one, RuntimeError)
    ]  # by the loop's thread, where that made the copy
    assert any("no memory for a copy" in text for text in (*told, *(str(rank._failure) for rank in group.ranks)))


def test_staging_reserve_failure_does_not_end_saver_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, asked = Group(tmp_path, every_steps=2), threading.Event()

    def refuse(self: Staging, nbytes: int) -> None:
        asked.set()
        raise MemoryError("can't allocate memory")

    monkeypatch.setattr(Staging, "reserve", refuse)
    group.step(1)
    assert asked.wait(10)
    group.step(2)
    assert all(
        save is not None and save.progress.wait_for(SaveState.RETAINING, 10)
        for save in (rank._save for rank in group.ranks)
    )
    group.drain()
    assert group.saved() == {2: 2.0}


def test_staging_allocation_failure_fails_only_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path, every_steps=2)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(saver_thread.Saver, "reserve", lambda *_: None)
    group.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        assert group.step(2) == [None, None]
    assert group.drain() == [1, 1]
    assert "memory" in group.told[0].of("report_checkpoint_failed")[0][1]


def test_out_of_memory_on_the_device_fails_only_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path, every_steps=2)

    def refuse(*_: Any) -> Any:  # as ``contiguous`` does on CUDA
        raise torch.OutOfMemoryError("CUDA out of memory")

    group.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(Staged, "copy_at_boundary", refuse)
        assert group.step(2) == [None, None]
    assert group.drain() == [1, 1]
    assert "CUDA out of memory" in group.told[0].of("report_checkpoint_failed")[0][1]
    group.step(3), group.step(4), group.drain()
    assert group.saved() == {4: 4.0}


def test_copy_uses_taken_buffer_despite_concurrent_reallocation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meddled(StagingBuffer):
        def acquire(self, nbytes: int) -> torch.Tensor:
            mine = super().acquire(nbytes)
            self._buffer = torch.empty(0, dtype=torch.uint8)
            return mine

    monkeypatch.setattr(staging, "StagingBuffer", Meddled)
    weight = torch.arange(1000.0)
    staged = Staging(torch.device("cpu")).stage(Sources([Source("shared/model/w", weight, 0, 1000, Until.STEP)]))
    staged.finish()
    assert torch.equal(torch.frombuffer(bytearray(staged.data_to_write()[1]), dtype=torch.float32), weight)


def test_unmounted_file_system_fails_save_with_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``umount -l`` shows the directory below the mount point, which takes every write."""
    group = Group(tmp_path)
    group.step(1)
    group.drain()
    monkeypatch.setattr(rank_file, "device_number", lambda _: 4711)
    group.step(2)
    assert group.drain() == [1, 1]
    ((step, text),) = group.told[0].of("report_checkpoint_failed")
    assert step == 2 and "was unmounted" in text and str(group.paths.checkpoints) in text
    assert group.saved() == {1: 1.0} and not (group.paths.checkpoint(2, 1)).exists()


def test_save_time_between_steps_is_not_subtracted_from_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, every_steps=2, staging="blocking")
    group.step(1)
    may_copy = slow_copies(monkeypatch)
    saving = begun(lambda: group.step(2))
    assert saving.is_alive()
    may_copy.set()
    saving.join(20)
    group.drain()
    group.step(3)
    schedule: Any = group.ranks[0]._schedule
    assert all(seconds >= 0 for seconds in schedule._step_durations)


def test_skipped_due_checkpoint_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, group = Gate(monkeypatch), Group(tmp_path, every_steps="auto", when_busy="skip")
    gate.close(0)
    for number in range(1, 26):  # step 10 is under way when 20 is due
        group.step(number)
    gate.open()
    group.drain()
    for number in range(26, 31):
        group.step(number)
    group.drain()
    assert group.saved() == {10: 10.0, 30: 30.0}
    note = next(values for values in group.told[0].of("note") if values[0] == "checkpoint-skipped")
    assert note[1].startswith("1 due")


def test_store_key_count_does_not_grow_with_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path, when_busy="skip")
    store: Any = group.ranks[0]._exchange._store
    real, found = RankWriter.write, []

    def every_other(self: RankWriter, directory: Path, *rest: Any) -> Any:
        if "1.a" in directory.name or "3.a" in directory.name or "5.a" in directory.name:
            raise StateError("no")
        return real(self, directory, *rest)

    monkeypatch.setattr(RankWriter, "write", every_other)
    for number in range(1, 9):
        group.step(number)
        group.drain()
        if number in (4, 8):  # well, like 2, 6 and 7
            told = [f"save/{number}"]
            wait_for(
                lambda told=told: group.ranks[0]._saver._published_names == told, "all before it to be forgotten", 10
            )  # type: ignore[misc]
            found.append(store.num_keys())
    assert found[0] == found[1]
    group.step(9)


def test_failed_save_does_not_set_save_duration_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(tmp_path)

    def refuse(*_: Any) -> None:
        raise StateError("the disk is on fire")

    monkeypatch.setattr(RankWriter, "write", refuse)
    group.step(1)
    group.drain()
    schedule: Any = group.ranks[0]._schedule
    assert schedule.save_seconds() is None


def test_ranks_with_different_tensor_sets_are_reported(tmp_path: Path) -> None:
    group = Group(tmp_path)
    committer: Committer = group.ranks[0]._committer
    mine = group.content(0, 1)
    plan = committer._cuts.plan(mine.snapshot.sizes(), mine.parts)
    own = [["x"] * len(slices) for slices in plan]
    found = committer._divergence(mine, own, [{}, {"0": ["x"] * (len(plan[0]) + 1)}])
    assert found is not None and "different sets of tensors" in found[0] and found[1] is None
    assert RANKS == 2


def test_audit_includes_parameters_written_by_other_ranks(tmp_path: Path) -> None:
    """Else it would call the replicas diverged that a forward pass of its own has changed (an embedding's ``max_norm``)."""
    group = Group(tmp_path, every_steps=100)
    group.step(1)
    group.weights[1].data[0] = 5.0  # rank 0 writes this half
    group.step(2)
    assert [rank._overlapped for rank in group.ranks] == [True, False]
    assert group.told[1].notes() == ["staging-blocking"]


def test_ranks_saving_different_steps_raise_user_error(tmp_path: Path) -> None:
    group = Group(tmp_path)
    found = group.together(
        lambda rank: group.ranks[rank].save(4 + rank, "request", False, lambda: group.content(rank, 4 + rank))
    )
    assert all(isinstance(one, UserError) and "[4, 5]" in str(one) for one in found) and group.saved() == {}


def test_audit_detects_forward_change_of_parameter_without_optimizer(tmp_path: Path) -> None:
    """A codebook: copied at the boundary, but compared beside the step."""
    one, book = Group(tmp_path).ranks[1], torch.zeros(8)
    one._prepare(Snapshot(shared={"model/book": book, "model/w": torch.zeros(4096)}, until={"model/w": Until.STEP}), 0)
    book += 1
    one.wait_until_copied(Until.STEP)
    assert not one._overlapped


@pytest.mark.parametrize(("staging", "gates"), [("blocking", 0), ("overlapped", 1)])
def test_blocking_staging_adds_no_optimizer_hook(tmp_path: Path, staging: str, gates: int) -> None:
    """A hook would be traced with a compiled ``optimizer.step``, and break its graph."""
    run: Any = Runtime.__new__(Runtime)
    optimizer, hook = torch.optim.SGD([torch.zeros(1, requires_grad=True)]), SimpleNamespace(before_change=None)
    run.checkpointer = Group(tmp_path, staging=staging).ranks[0]
    run.state = SimpleNamespace(require_wrapped=lambda: (None, hook), optimizers={"optimizer": optimizer})
    run._set_gates()
    assert len(optimizer._optimizer_step_pre_hooks) == gates and (hook.before_change is not None) == bool(gates)


def test_failed_replica_comparison_releases_loop_while_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, gate = Group(tmp_path), Gate(monkeypatch)
    group.step(1)
    group.drain()
    looked, real = threading.Event(), replica_digests.compare_parts

    def fail(plan: Any, tensors: Any, rank: int, *rest: Any) -> Any:
        if rank == 0:
            gate.reached(0)
            looked.set()
            raise MemoryError("no memory for digests")
        return real(plan, tensors, rank, *rest)

    monkeypatch.setattr(replica_digests, "compare_parts", fail)
    gate.close(0)
    group.step(2)
    assert looked.wait(20)
    stepping = threading.Thread(target=lambda: group.ranks[0].wait_until_copied(Until.STEP), daemon=True)
    stepping.start()
    stepping.join(10)
    assert not stepping.is_alive()  # while the disk still hangs
    gate.open()
    assert group.drain() == [1, 1]
    assert "no memory for digests" in group.told[0].of("report_checkpoint_failed")[0][1]


def test_disk_error_is_reported_when_replica_comparison_also_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path)

    def full(*_: Any) -> None:
        raise StateError("the disk is full")

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for digests")

    group.step(1)  # whose copies are waited for
    group.drain()
    monkeypatch.setattr(RankWriter, "write", full)
    monkeypatch.setattr(replica_digests, "compare_parts", fail)
    group.step(2)
    assert group.drain() == [1, 1]
    text = group.told[0].of("report_checkpoint_failed")[0][1]
    assert "the disk is full" in text


def test_thread_start_failure_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes that is reached in the middle of a training (``pids.max``)."""
    group, real = Group(tmp_path), threading.Thread.start

    def start(self: threading.Thread) -> None:
        if threading.current_thread().name.startswith("ratchet-"):
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    group.step(1)
    assert group.drain() == [0, 0] and group.saved() == {1: 1.0}


def test_failed_save_releases_snapshot_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error has a traceback, that has the frames, and these had the snapshot."""
    group, kept = Group(tmp_path), list[Any]()

    def full(self: RankWriter, directory: Path, *_: Any) -> None:
        raise StateError("the disk is full")

    monkeypatch.setattr(RankWriter, "write", full)
    real = group.content

    def content(rank: int, step: int) -> Any:
        made = real(rank, step)
        kept.append(weakref.ref(made.snapshot))
        return made

    monkeypatch.setattr(group, "content", content)
    gc.collect()
    gc.disable()
    try:
        group.step(1)
        group.drain()
        wait_for(lambda: len(kept) >= RANKS and not any(one() for one in kept), "the snapshots to go", 10)
    finally:
        gc.enable()
