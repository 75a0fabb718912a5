"""Whatever way a file's bytes take to the disk, and however many threads write them, they and their digests are the same."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from ratchet_store.write import block_writer
from ratchet_store.write.block_writer import PAGE, Blockwise

NO_DIRECT = "the file system of the temporary directory has no O_DIRECT: run with --basetemp on ext4 or XFS"
BLOCK = 8 * PAGE
HEAD = bytes(range(256)) * (PAGE // 256) * 3


@pytest.fixture
def memory() -> Iterator[memoryview]:
    """A megabyte that begins on a page."""
    place = mmap.mmap(-1, 1 << 20)
    place.write(random.Random(7).randbytes(1 << 20))
    view = memoryview(place)
    yield view
    view.release()
    place.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    yield fd
    os.close(fd)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def cached_pages(path: Path) -> list[int]:
    """The numbers of the file's pages that are in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as place:
        buffer = np.frombuffer(place, np.uint8)
        found = (ctypes.c_ubyte * -(-len(buffer) // PAGE))()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(len(buffer)), found)
        del buffer
    assert failed == 0
    return [number for number, state in enumerate(found) if state & 1]


def check(tmp_path: Path, digests: list[str], data: memoryview) -> None:
    raw = (tmp_path / "file").read_bytes()
    assert raw == HEAD + bytes(data)
    assert digests == [xxhash.xxh3_128(raw[at : at + BLOCK]).hexdigest() for at in range(0, len(raw), BLOCK)]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Of every write: where, how many bytes, and whether past the page cache."""
    real, seen = os.pwrite, list[tuple[int, int, bool]]()

    def pwrite(fd: int, data: Any, at: int) -> int:
        direct = is_direct(fd)
        count = real(fd, data, at)
        seen.append((at, count, direct))
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    return seen


SIZES = [0, 1, PAGE - 1, PAGE, 5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1, 13 * PAGE, 13 * PAGE + 7, 100_003, 1 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_block_writer_uses_direct_io_for_whole_pages(
    tmp_path: Path, fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """On this disk: where one cannot, the test below stands for it."""
    blocks, seen = Blockwise(fd, HEAD, memory[:size], BLOCK), watched(monkeypatch)
    if size >= PAGE and not is_direct(fd):
        pytest.skip(NO_DIRECT)
    blocks.work()
    check(tmp_path, blocks.finish()[0], memory[:size])
    assert not is_direct(fd) and blocks.size == len(HEAD) + size
    past = sorted((at, count) for at, count, direct in seen if direct)
    assert sum(count for _, count in past) == size // PAGE * PAGE
    assert all(at >= len(HEAD) and count <= BLOCK for at, count in past)


def test_direct_io_leaves_no_pages_in_page_cache(tmp_path: Path, fd: int, memory: memoryview) -> None:
    blocks = Blockwise(fd, HEAD, memory, BLOCK)
    if not is_direct(fd):
        pytest.skip(NO_DIRECT)
    blocks.work()
    blocks.finish()
    assert set(cached_pages(tmp_path / "file")) <= set(range(len(HEAD) // PAGE))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("refusal", ["memory", "flag", "write", "write later"])
def test_block_writer_falls_back_to_buffered_io_when_direct_fails(
    tmp_path: Path, fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch, refusal: str, size: int
) -> None:
    """``memory``: it begins within a page. The others stand for file systems that there are none of here: some refuse the flag,
    some the first write under it, some (striped ones) a later one."""
    data = memory[:size]
    if refusal == "memory":
        size = min(size, len(memory) - 64)
        data = memory[64 : 64 + size]
    real_flags, real, count = fcntl.fcntl, os.pwrite, 0

    def flags(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_flags(fd, command, value)

    def pwrite(fd: int, data: Any, at: int) -> int:
        nonlocal count
        if real_flags(fd, fcntl.F_GETFL) & os.O_DIRECT:
            count += 1
            if refusal == "write" or count > 2:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, at)

    if refusal == "flag":
        monkeypatch.setattr(fcntl, "fcntl", flags)
    elif refusal.startswith("write"):
        monkeypatch.setattr(os, "pwrite", pwrite)
    blocks = Blockwise(fd, HEAD, data, BLOCK)
    blocks.work()
    check(tmp_path, blocks.finish()[0], data)
    assert not is_direct(fd)


@pytest.mark.parametrize("most", [1, 100, PAGE, 3 * PAGE + 5])
def test_block_writer_continues_short_writes(
    tmp_path: Path, fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        if is_direct(fd) and most < PAGE:  # as the system would say it
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data[: most // PAGE * PAGE if is_direct(fd) else most], at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = memory[: 3 * PAGE + 50]
    blocks = Blockwise(fd, HEAD, data, BLOCK)
    blocks.work()
    check(tmp_path, blocks.finish()[0], data)


def test_block_writer_request_size_adapts_to_disk_speed(
    tmp_path: Path, fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's, since a real disk is as fast as it likes: writes of the third block take as long as if it had
    become slow. The header has three pages of the first, and what fills a block up tells nothing of the disk."""
    clock = 0.0
    monkeypatch.setattr(block_writer, "MIN_WRITE_BYTES", PAGE)
    monkeypatch.setattr(block_writer, "time", SimpleNamespace(monotonic=lambda: clock))
    blocks, seen, real = Blockwise(fd, HEAD, memory, BLOCK), watched(monkeypatch), os.pwrite
    if not is_direct(fd):
        pytest.skip(NO_DIRECT)

    def pwrite(fd: int, data: Any, at: int) -> int:
        nonlocal clock
        clock += 1.0 if 2 * BLOCK <= at < 3 * BLOCK else 0.001
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    blocks.work()
    check(tmp_path, blocks.finish()[0], memory)
    pages = [[n // PAGE for at, n, direct in seen if direct and at // BLOCK == number] for number in range(5)]
    assert pages == [[1, 2, 2], [4, 4], [4, 2, 1, 1], [1, 2, 4, 1], [4, 4]]


def test_several_threads_write_one_file(tmp_path: Path, fd: int, memory: memoryview) -> None:
    blocks = Blockwise(fd, HEAD, memory, BLOCK)
    threads = [threading.Thread(target=blocks.work) for _ in range(4)]
    for thread in threads:
        thread.start()
    blocks.work()
    digests, _ = blocks.finish()  # the others may still be at theirs
    check(tmp_path, digests, memory)
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize("through", ["past", "through"])
@pytest.mark.parametrize("seed", range(5))
def test_block_writer_digests_ranges_across_blocks_and_pages(
    tmp_path: Path, fd: int, memory: memoryview, seed: int, through: str
) -> None:
    source = random.Random(seed)
    data = memory[: source.choice([0, 5 * BLOCK, 5 * BLOCK - len(HEAD), 100_003])]
    data = data if through == "past" else memoryview(bytes(data))
    ends = sorted(source.randrange(len(data) + 1) for _ in range(60)) if data else []
    ranges = [(a, b) for a, b in itertools.pairwise(ends) if source.random() < 0.8] + [(len(data), len(data))]
    source.shuffle(ranges)
    blocks = Blockwise(fd, HEAD, data, BLOCK, ranges)
    blocks.work()
    digests, of_ranges = blocks.finish()
    check(tmp_path, digests, data)
    assert of_ranges == [xxhash.xxh3_128_hexdigest(data[begin:end]) for begin, end in ranges]


def test_block_writer_finish_raises_thread_error_after_other_writes(
    fd: int, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, may_go = os.pwrite, threading.Event(), threading.Event()
    ended = []

    def pwrite(fd: int, data: Any, at: int) -> int:
        if threading.current_thread().name == "slow":
            begun.set()
            assert may_go.wait(20)
            ended.append(at)
            return real(fd, data, at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    blocks = Blockwise(fd, HEAD, memory, BLOCK)
    slow = threading.Thread(target=blocks.work, name="slow")
    slow.start()
    assert begun.wait(20)
    blocks.work()  # and fails
    threading.Timer(0.05, may_go.set).start()
    with pytest.raises(OSError, match="No space"):
        blocks.finish()
    assert len(ended) == 1, "it did not wait for a thread that still writes to the descriptor"
    slow.join(20)
    monkeypatch.undo()
    size = os.fstat(fd).st_size
    blocks.work()  # one that comes late
    assert os.fstat(fd).st_size == size and block_writer.BLOCK % PAGE == 0
