"""Queries a process of the job's interpreter within a time limit, and then kills what that process has started."""

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

from ratchet_contract.processes import procfs
from ratchet_service.isolation.sandbox import MARKER_VARIABLE, NO_SANDBOX, Limits, Sandbox

log = logging.getLogger("ratchet.service")
_KILL_SECONDS: Final = 10.0
_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 4096


class StartTimeout(TimeoutError):
    """Raised by ``query_process`` if the process has not written the first byte of its answer in time."""


class Abandoned(Exception):
    """Raised by ``query_process`` because its caller no longer wants the answer."""


def query_process(
    command: Sequence[str],
    question: Mapping[str, Any],
    *,
    cwd: str,
    env: Mapping[str, str],
    timeout_seconds: float,
    start_timeout_seconds: float | None = None,
    is_abandoned: Callable[[], bool] = lambda: False,
    stderr: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    sandbox: Sandbox = NO_SANDBOX,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Start ``command`` in the sandbox, wait until its process ends, and return its answer to ``question``. In any case, what the
    process has started is killed, as far as it keeps its process group or environment.

    The process reads the question as JSON from standard input, with two added keys: ``asker``, this process's pid, and
    ``answer``, a descriptor for its answer, a JSON object of at most 1 MiB. ``start_timeout_seconds``: time limit for the first
    byte of the answer; None: no such limit. ``timeout_seconds``: time limit for the end of the process, counted from the first
    byte of the answer if ``start_timeout_seconds`` is set, otherwise from the start. ``is_abandoned``: if it returns True, the
    query ends.

    Raises ``TimeoutError`` (``StartTimeout`` for the first byte), ``Abandoned``, ``OSError`` if the process cannot be started,
    and ``ValueError`` without a valid answer.
    """
    marker = uuid.uuid4().hex
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as answer,
        sandbox.command(command, {**env, MARKER_VARIABLE: marker}, limits) as started,
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
            _wait(child, answer, timeout_seconds, start_timeout_seconds, is_abandoned)
        finally:
            _kill_all(child, marker)
        output = os.pread(answer.fileno(), _MAX_ANSWER_BYTES, 0)
        if not output.strip():
            raise ValueError(_describe_exit(child.returncode))
        try:
            found = json.loads(output)
        except RecursionError:
            raise ValueError("its answer is nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError("its answer is not a JSON object")
        return found


def last_line(stderr: IO[bytes]) -> str:
    """Return the last line of a process's error output, the file ``stderr``; empty if there is none. A long line is shortened."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_LINE_BYTES))
    return (stderr.read(_MAX_LINE_BYTES).decode(errors="replace").strip().splitlines() or [""])[-1]


def _wait(
    child: subprocess.Popen[bytes],
    answer: IO[bytes],
    timeout_seconds: float,
    start_timeout_seconds: float | None,
    is_abandoned: Callable[[], bool],
) -> None:
    """Block until the process has ended. Raises ``TimeoutError``, ``StartTimeout`` or ``Abandoned`` (see ``query_process``)."""
    begun = start_timeout_seconds is None
    end = time.monotonic() + (timeout_seconds if start_timeout_seconds is None else start_timeout_seconds)
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if not begun and os.fstat(answer.fileno()).st_size:
            begun, end = True, time.monotonic() + timeout_seconds
        if time.monotonic() > end:
            raise TimeoutError if begun else StartTimeout
        if is_abandoned():
            raise Abandoned
        time.sleep(0.01)


def _kill_all(child: subprocess.Popen[bytes], marker: str) -> None:
    """Kill the process and the processes that it has started, and reap the process. Started processes that are still found after
    ``_KILL_SECONDS`` are left."""
    with suppress(ProcessLookupError):
        # the leader is not reaped yet, so its pid is still the group's
        os.killpg(child.pid, signal.SIGKILL)
    left = procfs.kill_until_gone(
        lambda: [pid for pid in procfs.pids_with_variable(MARKER_VARIABLE, marker) if pid != child.pid], _KILL_SECONDS
    )
    if left:
        log.error("processes %s, started by a helper process, could not be killed", left)
    child.wait()


def _describe_exit(code: int) -> str:
    """Return how a process ended without an answer, as a part of a sentence. ``code``: its return code, negative for a signal."""
    if code >= 0:
        return f"exit code {code} in the middle of it"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"
