"""Worker processes: deaf to what stops the rank, gone when the rank is gone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.processes import procfs
from ratchet_worker.data.order import epoch_order
from tests.support.full_matrix import full

ROOT = Path(__file__).parents[4]


@contextmanager
def rank(mode: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], dict[str, Any]]]]:
    """A process group of its own, and a function that waits for the line of one event."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore:This DataLoader will create:UserWarning",
         "-m", "tests.support.fake_data_loading_rank", mode],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None

    def wait_for(event: str) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            values: dict[str, Any] = json.loads(line)
            if values["event"] == event:
                return values
        assert process.stderr is not None
        raise AssertionError(f"no {event!r}: {process.stderr.read()}")

    try:
        yield process, wait_for
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what a faulty rank left behind
        process.communicate()


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60  # a worker that imports torch still
    while left := [pid for pid in pids if procfs.start_time(pid) is not None]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)


def test_process_group_signals_do_not_kill_dataloader_workers() -> None:
    """One signal every 50 ms from before the workers exist until the epoch is over."""
    with rank("finish") as (process, wait_for):
        wait_for("starting")
        enough = threading.Event()

        def shower() -> None:
            for number in itertools.cycle((signal.SIGTERM, signal.SIGINT)):
                os.killpg(process.pid, number)
                if enough.wait(0.05):
                    return

        sender = threading.Thread(target=shower)
        sender.start()
        try:
            pids = wait_for("workers")["pids"]
            done = wait_for("done")
        finally:
            enough.set()
            sender.join()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert len(pids) == 2
        assert done["samples"] == epoch_order(40, 3, 0).tolist()
        assert done["signals"] > 0
        assert wait_for("closed")["left"] == []
        assert process.wait(20) == 0
        wait_until_gone(pids)


@pytest.mark.parametrize("busy", [pytest.param("starting", marks=full), "loading"])
def test_workers_die_with_a_rank_that_is_killed(busy: str) -> None:
    with rank("wait") as (process, wait_for):
        pids = wait_for("workers")["pids"]
        assert len(pids) == 2 and all(procfs.start_time(pid) is not None for pid in pids)
        if busy == "loading":
            deadline = time.monotonic() + 60
            while not all(ignores_sigterm(pid) for pid in pids):  # init_worker has run
                assert time.monotonic() < deadline
                time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        wait_until_gone(pids)


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def test_rank_ends_at_once_while_dataloader_workers_are_busy() -> None:
    with rank("stop") as (process, wait_for):
        pids = wait_for("workers")["pids"]
        _, errors = process.communicate(timeout=30)  # the workers sleep for an hour
        assert process.returncode == 0, errors
        assert errors == ""
        wait_until_gone(pids)
