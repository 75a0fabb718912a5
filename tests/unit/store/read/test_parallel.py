"""Reading by several threads: the same bytes, the same verdict and the same end as by one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.manifest import FileEntry, Manifest
from ratchet_contract.errors import CheckpointError
from ratchet_store.filesystem.durable_io import DAMAGED, UNREADABLE
from ratchet_store.read import parallel as module
from ratchet_store.read.checkpoint_reader import load, verify_files
from ratchet_store.read.parallel import IsCancelled, parallel_map
from ratchet_store.write import rank_file
from tests.support.checkpoints import make_checkpoint, shared_bytes
from tests.support.server import wait_for

BLOCK = 4096
PATIENCE = 20.0  # seconds


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()  # of which one of an earlier test may end meanwhile
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest]:
    """2 ranks, a dozen blocks in each file."""
    monkeypatch.setattr(rank_file, "BLOCK", BLOCK)
    manifest = make_checkpoint(tmp_path, 7, seed=1, scale=48)
    assert all(len(file.blocks) > 8 for file in manifest.files)
    return tmp_path / manifest.id, manifest


def flip(directory: Path, file: FileEntry, *blocks: int) -> None:
    raw = bytearray((directory / file.name).read_bytes())
    for block in blocks:
        raw[block * BLOCK] ^= 1
    (directory / file.name).write_bytes(raw)


def on_block(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """``act`` is called with the number of each block, by the thread that has read of it."""
    real = os.preadv

    def read(fd: int, buffers: Any, offset: int) -> int:
        count = real(fd, buffers, offset)
        act(offset // BLOCK)
        return count

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_load_with_any_thread_count_reads_and_reports_every_byte(
    saved: tuple[Path, Manifest], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the caller's thread alone; and with two there are two at work at one time."""
    directory, manifest = saved
    both = threading.Barrier(2) if threads == 2 else None
    on_block(monkeypatch, lambda block: both and block < 2 and both.wait(PATIENCE))  # type: ignore[func-returns-value]
    told: list[tuple[int, int]] = []
    loaded = load(
        directory, manifest, lambda e: e.name == "shared/model/weight", complete_ranks=(0, 1), threads=threads,
        progress=lambda count: told.append((threading.get_ident(), count)),
    )  # fmt: skip
    assert b"".join(bytes(data) for _, data in loaded.pieces) == shared_bytes(1, 48)["shared/model/weight"]
    assert sum(count for _, count in told) == loaded.bytes_read == manifest.size
    assert {ident for ident, _ in told} == {threading.get_ident()}


def test_first_damaged_block_is_reported_even_if_later_one_found_first(
    saved: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = saved
    flip(directory, manifest.files[0], 2, 3, 7)
    flip(directory, manifest.files[1], 0)
    later, read = threading.Event(), set[int]()

    def act(block: int) -> None:
        """Block 2 is slow: 3 has been read, and another thread wants its next one or has ended."""
        read.add(block)
        if block == 2:
            assert later.wait(PATIENCE)
        elif block >= 3:
            later.set()

    on_block(monkeypatch, act)
    with pytest.raises(
        CheckpointError, match=rf"{manifest.files[0].name}.*in block 2 \(bytes 8192 to 12287\)"
    ) as caught:
        verify_files(directory, manifest, threads=2)
    assert caught.value.code == DAMAGED and 7 not in read


def test_read_error_in_helper_thread_reaches_caller(
    saved: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails for the helpers alone; the caller's blocks are right."""
    directory, manifest = saved
    caller, helped = threading.get_ident(), threading.Event()

    def act(block: int) -> None:
        if threading.get_ident() != caller:
            helped.set()
            raise OSError(5, "Input/output error")
        assert helped.wait(PATIENCE)

    on_block(monkeypatch, act)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as caught:
        verify_files(directory, manifest, threads=3)
    assert caught.value.code == UNREADABLE


def test_verify_works_when_threads_cannot_be_started(
    saved: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, manifest = saved

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert verify_files(directory, manifest, threads=4) == manifest.size


@pytest.mark.parametrize("while_it", ["works", "waits"])
def test_keyboard_interrupt_ends_parallel_map_and_stops_threads(while_it: str) -> None:
    """The signal comes while the caller has an item of its own, and while it only waits for a helper's."""
    caller, written = threading.get_ident(), list[int]()
    begun, returns = threading.Event(), threading.Event()

    def begin(given_up: IsCancelled) -> Callable[[int], None]:
        def work(item: int) -> None:
            if threading.get_ident() == caller:
                assert begun.wait(PATIENCE)
                if while_it == "works":
                    signal.raise_signal(signal.SIGINT)
                returns.set()
                return
            begun.set()
            if while_it == "waits":
                assert returns.wait(PATIENCE)
                signal.pthread_kill(caller, signal.SIGINT)
            ended = threading.Event()
            for _ in range(int(PATIENCE * 1000)):
                if given_up() or ended.wait(0.001):
                    break
            assert given_up()
            written.append(item)

        return work

    with pytest.raises(KeyboardInterrupt):
        parallel_map(range(2 if while_it == "waits" else 50), begin, 2)
    assert len(written) == 1  # before the call had ended


def test_keyboard_interrupt_before_wait_leaves_no_thread_working(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, begun, written, struck = threading.get_ident(), threading.Event(), list[int](), list[str]()
    real = module.wait

    def wait(*arguments: Any) -> Any:
        if not struck:
            struck.append("before it waits")
            raise KeyboardInterrupt
        return real(*arguments)

    def begin(given_up: IsCancelled) -> Callable[[int], None]:
        def work(item: int) -> None:
            if threading.get_ident() == caller:
                assert begun.wait(PATIENCE)
                return
            begun.set()
            wait_for(given_up, "the call to be given up", PATIENCE)
            written.append(item)

        return work

    monkeypatch.setattr(module, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(range(2), begin, 2)
    assert len(written) == 1  # before the call had ended


def test_keyboard_interrupt_while_threads_start_leaves_no_thread_working(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has started, and the caller does not know it."""
    real, begun, items = ThreadPoolExecutor.submit, threading.Event(), list[int]()

    def submit(pool: ThreadPoolExecutor, *call: Any) -> None:
        real(pool, *call)
        begun.wait(0.2)
        raise KeyboardInterrupt

    def work(item: int) -> None:
        begun.set()
        items.append(item)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(range(3), lambda _: work, 2)
    assert items == []


def test_keyboard_interrupt_during_thread_join_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.join

    def join(helper: threading.Thread, timeout: float | None = None) -> None:
        real(helper, PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        parallel_map("abc", lambda _: str.upper, 2)


def test_parallel_map_keeps_order_and_raises_first_error() -> None:
    assert parallel_map("abc", lambda _: str.upper, 2) == parallel_map("abc", lambda _: str.upper, 1) == ["A", "B", "C"]
    assert parallel_map([], lambda _: str.upper, 4) == []
    second = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            assert second.wait(PATIENCE)
        second.set()
        raise ValueError(item)

    with pytest.raises(ValueError, match=r"^0$"):
        parallel_map([0, 1, 2], lambda _: work, 2)
