"""Reads the launch file for one node, holds the lock of a live agent, and writes the agent's result."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ratchet_contract import env_vars as names
from ratchet_contract.atomic_write import ensure_dir, write_atomic
from ratchet_contract.paths import NodePaths
from ratchet_contract.phases import Cause
from ratchet_contract.processes.procfs import start_time
from ratchet_contract.protocol.messages import AgentFile, AttemptResult, LaunchFile
from ratchet_contract.version import PROTOCOL_VERSION, not_upgraded
from ratchet_worker.ipc.disk_reserve import release
from ratchet_worker.ipc.log_lines import log_message, now

_LOCK_TIMEOUT: Final = 1.0  # seconds; a process that only probes the lock holds it for a moment
_RESULT_TIMEOUT: Final = 10.0  # seconds to wait for free space for result.json on a full disk


class LaunchRefused(Exception):
    """Raised if this agent cannot run the launch file. ``cause``: the cause for the attempt's result."""

    def __init__(self, message: str, cause: Cause = Cause.LAUNCHER_ERROR) -> None:
        super().__init__(message)
        self.cause = cause


def load_launch(path: Path, node: int = 0) -> LaunchFile:
    """Return the content of ``launch.json`` for ``node``. Raises ``LaunchRefused`` for a file that this agent cannot run."""
    try:
        raw: Any = json.loads(path.read_bytes())
        protocol = raw["protocol"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchRefused(f"{path} cannot be read as a launch file: {type(error).__name__}: {error}") from None
    if protocol != PROTOCOL_VERSION:
        raise LaunchRefused(not_upgraded(sys.executable, protocol), Cause.UPGRADE)
    try:
        launch = LaunchFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise LaunchRefused(f"{path} is not a valid launch file: {first['loc']}: {first['msg']}") from None
    root = Path(launch.attempt_dir)
    if not root.is_dir() or not root.samefile(path.parent):
        raise LaunchRefused(f"{path} belongs to attempt directory {launch.attempt_dir}, not to the one that it is in")
    try:
        return launch.for_node(node)
    except ValueError as error:
        raise LaunchRefused(f"{path}: {error}") from None


def lock(paths: NodePaths) -> int | None:
    """Lock ``agent.lock``, and return a descriptor that holds the lock until it is closed. Return None if another process
    holds the lock for more than a second. Creates the node's directory if it is missing."""
    ensure_dir(paths.root)
    fd = os.open(paths.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + _LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(0.02)


def start_session() -> None:
    """Start a new process session, if possible, so that signals to the launcher's process group do not reach the agent."""
    with suppress(PermissionError):
        os.setsid()


def agent_file() -> AgentFile:
    """The content of ``agent.json`` for this process: its pid, start time and the engine's name of its host."""
    started = start_time(os.getpid())
    assert started is not None
    host = os.environ.get(names.NODE_NAME) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return AgentFile(pid=os.getpid(), start_time=started, host=host)


def write_refusal(paths: NodePaths, launch_file: Path, node: int, refusal: LaunchRefused, started_at: str) -> None:
    """Write ``result.json`` for a refused launch. Writes nothing if the launch file does not name its job and attempt."""
    try:
        raw: Any = json.loads(launch_file.read_bytes())
        result = AttemptResult(
            job_id=raw["job_id"],
            attempt=raw["attempt"],
            node=node,
            cause=refusal.cause,
            message=str(refusal),
            last_step=0,
            started_at=started_at,
            ended_at=now(),
            ranks=[],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return
    write_result(paths, result)


def write_result(paths: NodePaths, result: AttemptResult) -> None:
    """Write ``result.json`` durably. After 10 seconds of failures, the result is written to the agent's log instead."""
    release(paths.result_file)
    data = result.model_dump_json(indent=1).encode()
    deadline = time.monotonic() + _RESULT_TIMEOUT
    while True:
        try:
            write_atomic(paths.result_file, data, durable=True)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                log_message(f"result.json cannot be written ({error}); the result is: {data.decode()}")
                return
            time.sleep(0.5)
