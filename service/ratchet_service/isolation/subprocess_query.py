"""Queries a process of the job's interpreter within a time limit, and then kills what that process has started.

The process receives the pid of the service's process, so that it can end when that process is killed. Once it has ended, or its
time is up, everything that it has started is killed: its process group, and processes that left the group but have the marker
variable. Question and answer are files without a name, so a service that is killed leaves none.
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

from ratchet_service.isolation import proc
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
    """Start ``command``, wait until its process has ended, kill everything that it has started, and return its answer to
    ``question``. If an error is raised, the process is killed, too. The process reads the question as JSON from standard input,
    with the added keys ``asker`` (the pid of this process) and ``answer`` (a descriptor to which it writes the answer as JSON).
    It runs as ``sandbox`` specifies, within ``limits``, in ``cwd`` and with the environment ``env``.

    ``timeout_seconds``: the time limit from the start, or, with ``start_timeout_seconds``, from the first byte of the answer. The
    process may write a blank as that byte. ``start_timeout_seconds``: the time limit from the start to that byte.
    ``is_abandoned`` is called about every 10 ms; if it returns True, the query ends. ``stderr``: a file for the process's error
    output, None to discard it. Raises ``TimeoutError``, which is ``StartTimeout`` for the limit to the first byte,
    ``Abandoned``, ``OSError`` if the process cannot be started, and ``ValueError`` if it ends without a valid answer, which is a
    JSON object of at most 1 MiB.
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
    """Return the last line of the file ``stderr``, which has the error output of a process; empty if it has none. Only the last
    ``_MAX_LINE_BYTES`` bytes are read."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_LINE_BYTES))
    return (stderr.read(_MAX_LINE_BYTES).decode(errors="replace").strip().splitlines() or [""])[-1]


def _wait(
    child: subprocess.Popen[bytes],
    answer: IO[bytes],
    timeout_seconds: float,
    start_timeout_seconds: float | None,
    is_abandoned: Callable[[], bool],
) -> None:
    """Block until the process has ended. Raises ``TimeoutError`` or ``StartTimeout``, and ``Abandoned`` once
    ``is_abandoned()`` is true. The time limits are as in ``query_process``."""
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
    """Kill the process and everything that it has started, and reap it. Its process group is killed first; the leader is not
    reaped yet, so its pid is still the group's. Then processes that have left the group are killed, until none is found. After
    ``_KILL_SECONDS``, those that multiply faster than they can be killed, or hang in the kernel, are logged and left. For the end
    of the process itself the call waits without a limit."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    end = time.monotonic() + _KILL_SECONDS
    while others := proc.kill_all(
        lambda: [p for p in proc.pids_with_variable(MARKER_VARIABLE, marker) if p != child.pid]
    ):
        if time.monotonic() > end:
            log.error("processes %s, started by a helper process, could not be killed", others)
            break
        time.sleep(0.001)
    child.wait()


def _describe_exit(code: int) -> str:
    """Return the text for a process that ended without an answer; ``code``: its return code, negative for a signal."""
    if code >= 0:
        return f"exit code {code} in the middle of it"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"
