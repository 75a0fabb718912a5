"""Rank 0's commits, one after the other, with the real store of messages, files and manifests. What it remembers of the ranks'
lists of tensors is never that of another save."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ratchet_contract.checkpoint.manifest import HOOK_SUMMARY, HookRecord, parse_entries
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_hooks.summary import HookSummary
from ratchet_store.filesystem import durable_io
from ratchet_store.format import manifest_file as store_commit
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.checkpoint_reader import CheckpointReader, verify
from ratchet_store.write.rank_file import Piece, RankWriter, Written
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.manifest_commit import Committer, Order, Verdict, write_progress
from ratchet_worker.coordination.store_exchange import Exchange, PeerTimeout
from ratchet_worker.state.replica_digests import number_of_parts, plan_parts, slice_digests
from ratchet_worker.state.snapshot import Snapshot
from tests.support.one_shot_writers import Given, layout_pieces
from tests.support.server import wait_for

RANKS = 2


class Saves:
    """Two ranks that share one tensor; each has ``size`` bytes of its own, by rank."""

    def __init__(self, root: Path) -> None:
        self.paths = JobPaths(root)
        store = HashStore()
        self.exchanges = [Exchange(store, rank, RANKS, 10) for rank in range(RANKS)]
        spec = SimpleNamespace(checkpoint=CheckpointSpec(), hook=None, digest=lambda: "spec")
        launch: Any = SimpleNamespace(
            job_root=str(root), job_id="job", attempt=1, spec=spec, world_size=RANKS,
            resolved=SimpleNamespace(code_digest=None), deadlines=SimpleNamespace(step=10),
        )  # fmt: skip
        self.told: list[int] = []  # steps that were reported as committed
        reporter: Any = SimpleNamespace(report_committed=lambda manifest, *_: self.told.append(manifest.step))
        self.committer = Committer(launch, self.exchanges[0], reporter, Base())
        self.writers = [RankWriter(rank, RANKS) for rank in range(RANKS)]
        self.listings: list[str] = []
        self.number = 0

    def save(self, step: int, sizes: list[int]) -> Verdict:
        self.number += 1
        order = Order(self.number, step, "schedule", False, time.monotonic())
        weight = torch.full((6,), float(step))
        snapshot = Snapshot(shared={"w": weight})
        parts = number_of_parts(snapshot.sizes(), RANKS)
        digests = [slice_digests(slices, snapshot.shared) for slices in plan_parts(snapshot.sizes(), parts)]
        summaries = [
            HookSummary(
                name="n", rank=rank, step=step, phase="steady", iteration=step, compression_rate=1.0, elements_before=0,
                elements_after=0, bytes_before=0, bytes_after=0,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        self.listings = []
        for rank, exchange in enumerate(self.exchanges):
            pieces = [
                Given("shared/w", "F32", (6,), 3 * rank, weight[3 * rank :][:3].numpy().tobytes()),
                Given(f"rank/{rank}/own", "U8", (sizes[rank],), 0, bytes([step]) * sizes[rank]),
            ]
            written = self.writers[rank].write(self.paths.checkpoint(step, 1), *layout_pieces(pieces), {"step": step})
            mine = slice(rank * parts // RANKS, (rank + 1) * parts // RANKS)
            report = {
                "error": None, "step": step, "finished": False, "file": written.file.model_dump(), "parts": digests[mine],
                "seen": {}, "summary": HOOK_SUMMARY.dump_json(summaries[rank]).decode(), "not_exact": None,
            }  # fmt: skip
            exchange.post(order.name, report, written.tensors_json)
            self.listings.append(written.tensors_json)
        content = Content(
            snapshot, None, HookRecord(name="n", parameters={}, state_version=1), "equal", summaries[0], {}, None, None,
            parts, lambda _: None,
        )  # fmt: skip
        return self.committer.decide(order, content, lambda: 0.0)

    def check(self, step: int, sizes: list[int]) -> None:
        """What is on the disk is what was saved, by the lists that were told."""
        directory = self.paths.checkpoint(step, 1)
        assert verify(directory).ok
        manifest = read_manifest(directory)
        assert manifest.tensors == [entry for text in self.listings for entry in parse_entries(text)]
        reader = CheckpointReader(directory)
        for rank, size in enumerate(sizes):
            own = f"rank/{rank}/own"
            assert bytes(reader.tensors([own])[own].data) == bytes([step]) * size
        whole = reader.tensors("shared/")["shared/w"].data
        assert torch.frombuffer(whole, dtype=torch.float32).tolist() == [float(step)] * 6


def test_commit_contains_tensors_reported_by_ranks_for_that_save(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for step, sizes in enumerate([[5, 5], [5, 5], [5, 9], [5, 9], [7, 5], [5, 5], [5, 5000], [5, 5]], 1):
        assert saves.save(step, sizes)["error"] is None
        saves.check(step, sizes)


@pytest.mark.parametrize("call", ["write_atomic", "fsync_path"])
def test_failed_commit_is_reported_and_leaves_no_state_for_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Also where the manifest had its name already: then it has it no more."""
    saves = Saves(tmp_path)
    assert saves.save(1, [5, 5])["error"] is None

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store_commit, call, refuse)
        assert "Input/output error" in saves.save(2, [9, 9])["error"]
    assert saves.told == [1] and not (saves.paths.checkpoint(2, 1) / MANIFEST_NAME).exists()
    for step, sizes in ((2, [9, 5]), (3, [5, 5])):  # the same step once more, with a list that is half of each
        assert saves.save(step, sizes)["error"] is None
        saves.check(step, sizes)
        assert read_manifest(saves.paths.checkpoint(step, 1)).parent.step == step - 1
    assert saves.told == [1, 2, 3]


def test_fenced_attempt_commits_nothing(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    assert saves.save(1, [8, 8])["error"] is None
    fence = saves.paths.attempt(1).fence_file
    fence.parent.mkdir(parents=True)
    fence.touch()
    assert "over" in saves.save(2, [8, 8])["error"]
    assert saves.told == [1] and not (saves.paths.checkpoint(2, 1) / MANIFEST_NAME).exists()


def test_exchange_text_attachment_round_trips(tmp_path: Path) -> None:
    store = HashStore()
    ranks = [Exchange(store, rank, 3, 10) for rank in range(3)]
    texts = ["", '[{"a": "é\\n"}]', "line\nline\n"]
    for rank, text in zip(ranks, texts, strict=True):
        rank.post("a", {"text": "x\ny"}, text)
    found = ranks[0].collect_with_attachments("a")
    assert found == [({"text": "x\ny"}, text.encode()) for text in texts]
    assert ranks[1].collect("a") == [{"text": "x\ny"}] * 3


def test_exchange_local_value_is_collected_without_store(tmp_path: Path) -> None:
    store = HashStore()
    ranks = [Exchange(store, rank, 3, 10) for rank in range(3)]
    for name in ("a", "b"):
        for rank in (0, 2):
            ranks[rank].post(name, rank, "" if rank else "first")
        ranks[1].post_locally(name, 1, "é")
    assert ranks[1].collect_with_attachments("a") == [(0, b"first"), (1, "é".encode()), (2, b"")]
    assert not store.check(["exchange/a/1"])
    ranks[1].delete("a")
    assert not any(store.check([f"exchange/a/{rank}"]) for rank in range(3))
    assert ranks[1].collect("b") == [0, 1, 2]
    with pytest.raises(PeerTimeout, match=r"rank \[0, 1, 2\]"):  # nothing of the first is left
        ranks[1].collect("a", timeout=0.1)
    alone = Exchange(HashStore(), 0, 1, 10)
    alone.post_locally("a", 0)
    assert alone.collect("a") == [0] and alone.broadcast("b", {"x": 1}) == {"x": 1}
    alone.delete("a")
    alone.delete_broadcast("b")


class Verdicts:
    """A store in which ``verdict`` is there after ``seconds`` of a clock that only sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.seconds = self.begun = 0.0
        self.looks = 0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr("ratchet_worker.coordination.store_exchange.time", clock)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return self.now - self.begun >= self.seconds

    def get(self, key: str) -> bytes:
        return b"1"

    def wait(self, exchange: Exchange, seconds: float) -> tuple[int, float]:
        """Looks at the store, and seconds too many."""
        self.begun, self.seconds, self.looks = self.now, seconds, 0
        assert exchange.broadcast("verdict", is_recurring=True) == 1
        return self.looks, self.now - self.begun - seconds


def test_exchange_wait_adapts_poll_interval_to_previous_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store: Any = Verdicts(monkeypatch)
    exchange = Exchange(store, 1, 2, 10)
    first, _ = store.wait(exchange, 0.012)
    later = [store.wait(exchange, seconds) for seconds in (0.012, 0.012, 0.011, 0.013, 0.012)]
    assert all(looks < first and late < 0.005 for looks, late in later), later
    assert store.wait(exchange, 0.0) == (1, 0.0)
    assert store.wait(exchange, 0.002)[1] <= 0.002
    store.wait(exchange, 5.0)
    assert store.wait(exchange, 0.001)[1] <= 0.02


def test_written_bytes_detect_progress_of_out_of_order_blocks(tmp_path: Path) -> None:
    """Several threads write one file: its size says nothing of those who are not at its end."""
    block = b"x" * (1 << 20)
    with (tmp_path / "rank").open("wb", buffering=0) as file:
        file.seek(len(block))
        file.write(block)
        os.fsync(file.fileno())
        before = write_progress(tmp_path)
        file.seek(0)
        file.write(block)
        os.fsync(file.fileno())
        assert write_progress(tmp_path) != before


class SlowDisk:
    """``sync_file_range`` of a disk that needs a permission for each wait."""

    def __init__(self) -> None:
        self.permits, self.waits = threading.Semaphore(0), list[tuple[int, int]]()
        self.code = 0

    def __call__(self, _fd: int, offset: int, nbytes: int, flags: int) -> int:
        if flags & 4:
            self.waits.append((offset, nbytes))
            assert self.permits.acquire(timeout=30)
            ctypes.set_errno(self.code)
        return -1 if self.code else 0

    def has_begun(self, number: int) -> bool:
        return len(self.waits) > number


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr(durable_io, "_sync_file_range", lambda: disk)
    monkeypatch.setattr(durable_io, "_SHOW_SECONDS", 0.0)
    return disk


def write_three_mib(directory: Path) -> Written:
    return RankWriter(0, 1).write(directory, [Piece("w", "U8", (3 << 20,), 0, 3 << 20)], bytes(3 << 20), {})


def test_written_bytes_show_progress_while_a_slow_disk_has_yet_to_write_them(
    tmp_path: Path, slow_disk: SlowDisk
) -> None:
    """Size and allocation of the file are final, and each MiB that reaches the disk is progress."""
    directory = tmp_path / "step"
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_three_mib, directory)
        seen = []
        for number in range(3):
            wait_for(partial(slow_disk.has_begun, number), "the wait for the disk", 30)
            seen.append(write_progress(directory))
            time.sleep(0.01)  # a file system's clock may be that coarse
            slow_disk.permits.release()
        slow_disk.permits.release(9)
        written.result(30)
    assert len({size for size, _ in seen}) == 1 and len(set(seen)) == 3, seen
    assert slow_disk.waits[0][0] == 0 and all(nbytes <= 1 << 20 for _, nbytes in slow_disk.waits)


@pytest.mark.parametrize(
    ("code", "fails"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.ENOSYS, False), (errno.EPERM, False)]
)
def test_error_of_a_wait_for_the_disk_fails_the_save(
    tmp_path: Path, slow_disk: SlowDisk, code: int, fails: bool
) -> None:
    """Linux reports an error of the disk once: ``fsync`` would succeed. Where the call is refused, ``fsync`` alone decides."""
    slow_disk.permits.release(9)
    slow_disk.code = code
    if not fails:
        assert write_three_mib(tmp_path / "step").file.size > 3 << 20
        return
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        write_three_mib(tmp_path / "step")
    assert not list((tmp_path / "step").iterdir())
