"""What /proc says of real processes, some of which have unusual names, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ratchet_contract.processes import procfs
from tests.support.server import wait_for

pytestmark = pytest.mark.processes
VARIABLE = "RATCHET_TEST_PROCFS"


@contextmanager
def started(code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has run ``code`` and printed a line, and the value of ``VARIABLE`` in its environment and its children's."""
    value = uuid.uuid4().hex
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport time; time.sleep(600)"]
    process = subprocess.Popen(command, env={**os.environ, VARIABLE: value}, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "\n"
            yield process, value
        finally:
            procfs.kill_until_gone(lambda: procfs.pids_with_variable(VARIABLE, value), 10)


def test_process_whose_name_is_no_text_is_found_and_killed() -> None:
    """The kernel cuts names to 15 bytes, also within a character; user code may set any bytes, and parentheses."""
    for name in ("тренировка".encode()[:15], b") S 1 (", b"\xff\n"):
        with started(f"open('/proc/self/comm', 'wb').write({name!r})") as (process, value):
            assert procfs.pids_with_variable(VARIABLE, value) == [process.pid]
            assert procfs.environment_variable(process.pid, VARIABLE) == value
            found = procfs.stat(process.pid)
            assert found is not None and found.parent == os.getpid() and procfs.is_alive(process.pid, found.started)
            assert not procfs.is_exiting(process.pid) and procfs.runs_as(process.pid, os.getuid())
            assert procfs.kill_until_gone(lambda: procfs.pids_with_variable(VARIABLE, value), 10) == []
            assert process.wait(10) == -signal.SIGKILL


def test_zombie_is_no_live_process_and_its_children_are_descendants() -> None:
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with started(parent) as (process, value):
        (child,) = procfs.live_descendants(process.pid)
        assert {process.pid, child} <= {
            *procfs.live_descendants(os.getpid())
        }  # other tests' processes may be there, too
        process.kill()
        wait_for(lambda: procfs.start_time(process.pid) is None, "the parent to be a zombie", 10)
        zombie = procfs.stat(process.pid)
        assert zombie is not None and zombie.state == "Z" and procfs.is_exiting(process.pid)
        assert process.pid not in procfs.live_descendants(os.getpid())
        assert procfs.pids_with_variable(VARIABLE, value) == [child]


def test_kill_until_gone_ends_what_starts_meanwhile_and_names_what_it_cannot_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mocked for the second part: a test's processes are all its own."""
    code = "import os, subprocess, sys\nif os.fork() == 0:\n    while True: subprocess.Popen(['sleep', '600'])"
    with started(code) as (process, value):
        left = procfs.kill_until_gone(lambda: procfs.pids_with_variable(VARIABLE, value), 60)
        assert left == [] and process.wait(10) == -signal.SIGKILL

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    begin = time.monotonic()
    assert procfs.kill_until_gone(lambda: [1], 0.05) == [1] and time.monotonic() - begin > 0.05
