"""Asks a process with the job's interpreter: for a limited time, and nothing of it is left, whoever is killed.

The process is told its asker's number and ends with it. What it starts ends with the answer: its process group, and whatever left
the group but still has the mark. Question and answer are files without a name, so a service that is killed leaves none.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

from ratchet_service.confined import MARK, OWN, Confined, Limits
from ratchet_service.launchers import processes

log = logging.getLogger("ratchet.service")
_END_SECONDS: Final = 10.0
_LONGEST_ANSWER: Final = 1 << 20
_LONGEST_LINE: Final = 4096


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


def ask(
    command: Sequence[str],
    question: Mapping[str, Any],
    *,
    cwd: str,
    env: Mapping[str, str],
    seconds: float,
    start_seconds: float | None = None,
    abandoned: Callable[[], bool] = lambda: False,
    stderr: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    confined: Confined = OWN,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """What the process answers to ``question``, which it reads as JSON from standard input, with ``asker``, the number of this
    process, and ``answer``, a descriptor for the answer's JSON. It runs as ``confined`` says, within ``limits``.

    ``start_seconds``: the limit until the first byte of an answer (a blank, to tell that ``seconds`` begin), where it is another.
    Raises ``TimeoutError``, ``Abandoned``, ``OSError`` where there is no process, ``ValueError`` where it ends without an answer.
    """
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as answer,
        confined.command(command, {**env, MARK: mark}, limits) as started,
    ):
        stdin.write(json.dumps({**question, "asker": os.getpid(), "answer": answer.fileno()}).encode())
        stdin.seek(0)
        child = subprocess.Popen(
            started.argv,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if stderr is None else stderr,
            cwd=cwd,
            env=started.env,
            pass_fds=[answer.fileno(), *pass_fds, *started.fds],
            start_new_session=True,
        )
        try:
            _wait(child, answer, seconds, start_seconds, abandoned)
        finally:
            _end(child, mark)
        said = os.pread(answer.fileno(), _LONGEST_ANSWER, 0)
        if not said.strip():
            raise ValueError(_ending(child.returncode))
        try:
            found = json.loads(said)
        except RecursionError:
            raise ValueError("its answer is nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError("its answer is no object")
        return found


def last_line(stderr: IO[bytes]) -> str:
    """Of what a process has printed, however much; empty where it has printed nothing."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _LONGEST_LINE))
    return (stderr.read(_LONGEST_LINE).decode(errors="replace").strip().splitlines() or [""])[-1]


def _wait(
    child: subprocess.Popen[bytes],
    answer: IO[bytes],
    seconds: float,
    start_seconds: float | None,
    abandoned: Callable[[], bool],
) -> None:
    begun = start_seconds is None
    end = time.monotonic() + (seconds if start_seconds is None else start_seconds)
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if not begun and os.fstat(answer.fileno()).st_size:
            begun, end = True, time.monotonic() + seconds
        if time.monotonic() > end:
            raise TimeoutError
        if abandoned():
            raise Abandoned
        time.sleep(0.01)


def _end(child: subprocess.Popen[bytes], mark: str) -> None:
    """Nothing of it is left: the group first (its leader is not reaped yet, so the number is still the group's), then whoever has
    left the group, until none is found; what multiplies faster than it can be killed, or hangs in the kernel, is given up."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    end = time.monotonic() + _END_SECONDS
    while others := processes.end_all(lambda: [p for p in processes.with_variable(MARK, mark) if p != child.pid]):
        if time.monotonic() > end:
            log.error("processes %s, started by one that was asked, could not be ended", others)
            break
        time.sleep(0.001)
    child.wait()


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} in the middle of it"
