"""The files of an attempt, as every launcher reads and writes them: ``launch.json`` going in, the agents' own coming out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ratchet_contract.messages import AgentFile, LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_service.file_owner import as_owner, foreign, open_read, replace_file
from ratchet_service.launchers.base import AttemptRef, NodeState
from ratchet_service.launchers.results import MOST_BYTES, read_bounded, read_result

M = TypeVar("M", bound=BaseModel)


def write_launch(paths: AttemptPaths, launch: LaunchFile) -> None:
    """Write ``launch.json`` by rename, readable by the owner alone (it holds the report token). The code's commit goes into
    ``git.json`` beside it: agents of an earlier version would refuse the key. Raises ``OSError``."""
    git = None if launch.spec.code is None else launch.spec.code.git
    with as_owner(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        if git is not None:
            replace_file(paths.git_file, git.model_dump_json())
        replace_file(paths.launch_file, launch.model_dump_json(indent=1, exclude={"spec": {"code": {"git"}}}))


def fence(paths: AttemptPaths) -> None:
    """No agent of the attempt starts any more, whoever submits it late. What has started is found and ended after this call.
    Raises ``OSError``; not where users' code has its own user, and has made the mark impossible: what that has wrecked, no agent
    can start from, and what runs of it must be ended all the same."""
    with as_owner(paths.root):
        try:
            _fence(paths)
        except OSError:
            if not foreign(paths.root):
                raise
            with suppress(OSError):
                paths.root.chmod(0o700)
                paths.fence_file.unlink(missing_ok=True)
                _fence(paths)


def _fence(paths: AttemptPaths) -> None:
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.fence_file.touch()


def node_states(
    ref: AttemptRef, *, gone: Callable[[int], bool] = lambda _node: False, notes: Mapping[int, str] | None = None
) -> tuple[NodeState, ...]:
    """What the agents' files say, node by node. ``gone(node)``: is an agent that has begun known not to run any more? ``notes``:
    the engine's word on some of them."""
    return tuple(_node_state(ref, i, gone, (notes or {}).get(i)) for i in range(ref.nodes))


def _node_state(ref: AttemptRef, node: int, gone: Callable[[int], bool], note: str | None) -> NodeState:
    paths = ref.paths.node(node)
    agent = read_message(paths.agent_file, AgentFile)
    if agent is None:
        return NodeState(note=note)
    ended = gone(node)  # asked first: its last word is there by then
    return NodeState(True, ended, agent, read_result(paths.result_file, ref.job_id, ref.epoch, node), note)


def agent_logs(ref: AttemptRef, limit: int) -> str:
    """The ends of the agents' logs, ``limit`` characters together; empty when they have printed nothing."""
    parts = []
    for node in range(ref.nodes):
        text = tail(ref.paths.node(node).agent_log, limit // ref.nodes)
        if text:
            parts.append(f"node {node}: {text}" if ref.nodes > 1 else text)
    return "\n".join(parts)[-limit:]


def tail(path: Path, limit: int) -> str:
    """The last ``limit`` characters of a text file, stripped; empty when it cannot be read."""
    try:
        with open_read(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * limit))
            return file.read(4 * limit).decode(errors="replace").strip()[-limit:]
    except OSError:
        return ""


def read_message(path: Path, model: type[M]) -> M | None:
    """The message in ``path``, or None. Such files are written by rename, so one that cannot be understood is no message of
    ours, and counts as none."""
    try:
        data = read_bounded(path)
        return None if data is None or len(data) > MOST_BYTES else model.model_validate_json(data)
    except (OSError, ValidationError):
        return None


def lock_is_held(path: Path) -> bool:
    """Does a live process of this machine hold the lock? The kernel drops it with the last process that has it open."""
    try:
        with as_owner(path):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        if foreign(path):  # its processes are known by their environment, too
            return False
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
