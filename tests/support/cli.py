"""Running the executable ``ratchet`` as a user would: a process of its own, its streams and exit code, or a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.cli.shared.service_process import without_ratchet_variables
from tests.support.forked_cli import Command, Forks
from tests.support.server import Server

EXECUTABLE = Path(sys.executable).with_name("ratchet")
SPEC = """
name: digits-one
task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 1}}
world: {ranks_per_node: 2, device: cpu}
hook: {name: powerSGD, matrix_approximation_rank: 2, start_powerSGD_iter: 10}
"""
FORKS = Forks(EXECUTABLE)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


@dataclass(frozen=True)
class Result:
    code: int
    text: str
    errors: str

    @property
    def data(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.text)


class Cli:
    """``cli("get", id)`` runs ``ratchet get ID`` with the run directory ``home`` in the directory ``cwd``."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.cwd = cwd
        self.environment = without_ratchet_variables(os.environ) | {
            "RATCHET_HOME": str(home),
            "RATCHET_CONFIG": str(cwd / "ratchet.json"),
            "COLUMNS": "200",
        }

    def command(self, *arguments: str) -> list[str]:
        return [str(EXECUTABLE), *arguments]

    def __call__(self, *arguments: str, expect: int = 0, stdin: str = "", deadline: float = 60.0) -> Result:
        result = self.run_without_check(*arguments, stdin=stdin, deadline=deadline)
        assert result.code == expect, f"{arguments}: {result}"
        return result

    def run_without_check(self, *arguments: str, stdin: str = "", deadline: float = 60.0) -> Result:
        """Whatever its exit code is."""
        if FORKS.can_fork(self.environment):
            ended = FORKS.run(arguments, cwd=self.cwd, env=self.environment, stdin=stdin, deadline=deadline)
        else:
            done = subprocess.run(
                self.command(*arguments), cwd=self.cwd, env=self.environment, input=stdin, capture_output=True, text=True,
                timeout=deadline,
            )  # fmt: skip
            ended = done.returncode, done.stdout, done.stderr
        return Result(*ended)

    @contextmanager
    def terminal(self, *arguments: str, columns: int = 80, **variables: str) -> Iterator[Terminal]:
        """The command in a terminal of its own, which is its controlling one; killed at the end if it still runs."""
        environment = {k: v for k, v in self.environment.items() if k not in ("COLUMNS", "NO_COLOR")}
        environment |= {"TERM": "xterm-256color"} | variables
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process: subprocess.Popen[bytes] | Command
        if FORKS.can_fork(environment):
            process = FORKS.start(arguments, [slave] * 3, cwd=self.cwd, env=environment, terminal=True)
        else:
            process = subprocess.Popen(
                self.command(*arguments), cwd=self.cwd, env=environment, stdin=slave, stdout=slave, stderr=slave,
                start_new_session=True, preexec_fn=_take_terminal,
            )  # fmt: skip
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            process.kill()
            process.wait(10)
            os.close(master)

    def run_on_terminal(self, *arguments: str, columns: int = 80, **variables: str) -> Terminal:
        """The same, run to its end."""
        with self.terminal(*arguments, columns=columns, **variables) as terminal:
            terminal.code = terminal.end()
        return terminal


@pytest.fixture
def cli(idle_server: Server, tmp_path: Path) -> Cli:
    """The command line in a directory with a ``spec.yaml``, its jobs waiting for ever."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    return Cli(idle_server.home, tmp_path)


def _take_terminal() -> None:
    """In the child: make the pty its controlling terminal, so that ^C becomes a signal, and one that is not ignored because
    the tests were started in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.close(os.open(os.ttyname(0), os.O_RDWR))


class Terminal:
    """``raw`` is everything the terminal got, control sequences included; ``code`` the exit code where it is known."""

    def __init__(self, process: subprocess.Popen[bytes] | Command, master: int) -> None:
        self._process, self._master = process, master
        self.raw = ""
        self.code: int | None = None
        self._bytes = b""

    @property
    def text(self) -> str:
        """What was written, without control sequences."""
        return _CONTROL.sub("", self.raw).replace("\r\n", "\n")

    @property
    def longest_line_length(self) -> int:
        """Characters of the longest line that was written."""
        return max(len(line) for part in self.text.split("\n") for line in part.split("\r"))

    def read_until(self, wanted: str, deadline: float = 90.0) -> None:
        end = time.monotonic() + deadline
        while wanted not in self.text and wanted not in " ".join(self.text.split()):  # a narrow terminal breaks lines
            assert time.monotonic() < end, f"waited for {wanted!r}; the terminal shows {self.text[-2000:]!r}"
            assert self._read(), f"ended without {wanted!r}: {self.text[-2000:]!r}"

    def discard_output(self) -> None:
        """What was written up to now is not looked at any more."""
        self.raw, self._bytes = "", b""

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self, deadline: float = 60.0) -> int:
        """Read on until the command has ended; its exit code."""
        end = time.monotonic() + deadline
        while self._read():
            assert time.monotonic() < end, f"still runs; the terminal shows {self.text[-2000:]!r}"
        return self._process.wait(20)

    def _read(self) -> bool:
        """False once nobody can write any more."""
        ready, _, _ = select.select([self._master], [], [], 0.2)
        try:
            self._bytes += os.read(self._master, 65536) if ready else b""
        except OSError:  # the other side is closed
            return False
        self.raw = self._bytes.decode("utf-8", "ignore")
        return True
