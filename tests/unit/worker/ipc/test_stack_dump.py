"""What is recorded about a process that writes no stacks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet_worker.ipc.stack_dump import Target, capture_stacks, request_dump


class Process:
    """A process without a handler. ``asked``: what happens to it when its stacks are requested."""

    def __init__(self, asked: Callable[[subprocess.Popen[bytes]], object]) -> None:
        self._asked, self._process = asked, subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def request_stacks(self) -> None:
        self._asked(self._process)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(
    ("asked", "state"),
    [
        (lambda process: request_dump(process.pid), "could not handle signals yet, and the request's signal ended it"),
        (lambda process: os.kill(process.pid, signal.SIGKILL), "it ended meanwhile (exit code -9)"),
        (lambda process: process.communicate(b"line\n"), "it ended meanwhile (exit code 0)"),
    ],
    ids=["by the request", "by a kill", "by itself"],
)
def test_end_of_a_process_without_stacks_is_described_as_it_was(
    tmp_path: Path, asked: Callable[[subprocess.Popen[bytes]], object], state: str
) -> None:
    process = Process(asked)
    try:
        found = capture_stacks({0: Target(process, tmp_path / "log")}, "too slow", 30.0)
    finally:
        process.end()
    assert state in found[0] and state in (tmp_path / "log").read_text()
