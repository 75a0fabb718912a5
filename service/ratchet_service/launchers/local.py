"""Agents as detached processes of this machine. They outlive the service on purpose: training goes on while it restarts.

Proof of life is the agent's ``flock`` on ``agent.lock``. It is probed only once ``agent.json`` is there, which the agent
writes while it holds the lock: probing earlier could take the lock from under a starting agent's hands. Until then a
starting agent is known by RATCHET_ATTEMPT_DIR in its environment, which every descendant inherits.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from ratchet_contract import environment as names
from ratchet_contract.messages import AgentFile, AttemptResult, LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_service.credentials import inherited, withheld
from ratchet_service.launchers import processes
from ratchet_service.launchers.base import AttemptRef, LaunchError, LaunchPlan, NodeState

AGENT: Final = ("-P", "-m", "ratchet_worker.agent")
"""-P: the directory that the service was started in must not be on the agent's import path."""

M = TypeVar("M", bound=BaseModel)


def make(_home: HomePaths) -> LocalLauncher:
    """The factory that the table names."""
    return LocalLauncher()


class LocalLauncher:
    """See the module. ``agent`` is the command before the launch file; ``environ`` what agents inherit from."""

    kind = "local"

    def __init__(self, agent: tuple[str, ...] | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._agent = agent or (sys.executable, *AGENT)
        self._environ = dict(os.environ if environ is None else environ)
        self._children: dict[str, int] = {}

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        paths = AttemptPaths(Path(launch.attempt_dir))
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.epoch, paths),
            launch=launch,
            argv=(*self._agent, str(paths.launch_file)),
            env={names.ATTEMPT_DIR: launch.attempt_dir},
            secrets={name: secret.from_env for name, secret in launch.spec.secrets.items()},
            ranks=tuple(_rank_command(launch, i) for i in range(len(launch.ranks))),
        )

    def submit(self, plan: LaunchPlan) -> None:
        paths = plan.ref.paths
        if paths.agent_file.exists() or processes.with_variable(names.ATTEMPT_DIR, str(paths.root)):
            return
        env = self._child_environment(plan)
        try:
            _write_private(paths.launch_file, plan.launch)
            pid = self._children[plan.ref.name] = _spawn(plan.argv, env, paths.agent_log)
        except OSError as error:
            raise LaunchError(f"the agent could not be started: {error}") from error
        processes.wait_until_visible(pid)  # who submits again, here or in another process, must see it

    def poll(self, ref: AttemptRef) -> NodeState:
        self._reap()
        agent = _read(ref.paths.agent_file, AgentFile)
        if agent is None:
            alive = ref.name in self._children or bool(processes.with_variable(names.ATTEMPT_DIR, str(ref.paths.root)))
            return NodeState(alive, seen=False)
        alive = lock_is_held(ref.paths.lock_file)
        return NodeState(alive, True, agent, _read(ref.paths.result_file, AttemptResult))

    def stop(self, ref: AttemptRef, grace: float) -> None:
        agent = _read(ref.paths.agent_file, AgentFile)
        if agent is not None and processes.is_alive(agent.pid, agent.start_time):
            processes.kill(agent.pid, signal.SIGTERM)

    def sweep(self, ref: AttemptRef) -> list[int]:
        found = processes.with_variable(names.ATTEMPT_DIR, str(ref.paths.root))
        for pid in found:
            processes.kill(pid)
        agent = _read(ref.paths.agent_file, AgentFile)
        if agent is not None and agent.pid not in found and lock_is_held(ref.paths.lock_file):
            if processes.is_alive(agent.pid, agent.start_time):
                processes.kill(agent.pid)
            found.append(agent.pid)  # also when it cannot be seen from here: while the lock is held, nothing is proved
        self._reap()
        return found

    def _child_environment(self, plan: LaunchPlan) -> dict[str, str]:
        """This process's environment without Ratchet's own variables and database credentials, plus the named secrets."""
        kept = withheld(self._environ)
        env = inherited(self._environ)
        for name, source in plan.secrets.items():
            value = self._environ.get(source)
            if source in kept:
                raise LaunchError(
                    f"secret {name} is read from {source}, which is the service's own and given to no job"
                )
            if value is None:
                raise LaunchError(
                    f"secret {name} is read from {source}, which is not set in the launcher's environment: set it where the "
                    "service is started"
                )
            env[name] = value
        return env | plan.env

    def _reap(self) -> None:
        """Collect agents of ours that have ended, so that they leave no zombies."""
        for name, pid in list(self._children.items()):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            del self._children[name]


def lock_is_held(path: Path) -> bool:
    """Does a live process hold the lock? The kernel drops it with the last process that has it open."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _rank_command(launch: LaunchFile, local: int) -> dict[str, Any]:
    """What the agent will run for its ``local``-th rank, for people to read."""
    env = {names.RANK: str(launch.ranks[local]), names.LOCAL_RANK: str(local), names.WORLD_SIZE: str(launch.world_size)}
    env |= {"OMP_NUM_THREADS": str(launch.resolved.threads_per_rank)} | launch.spec.env
    if launch.resolved.backend == "nccl":
        env |= launch.spec.nccl
    if launch.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in launch.gpus)
    return {"command": [launch.resolved.python, "-P", "-m", "ratchet_worker.rank"], "env": env, "cwd": launch.workdir}


def _spawn(argv: tuple[str, ...], env: dict[str, str], log: Path) -> int:
    """Start a process in a session of its own, with no tie to this one. Raises ``OSError``."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    default = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD]
    return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=default)


def _write_private(path: Path, message: BaseModel) -> None:
    """Write by rename, readable by the owner alone (it holds the report token)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".launch-")  # mode 0600
    with os.fdopen(fd, "w") as handle:
        handle.write(message.model_dump_json(indent=1))
        handle.flush()
        os.fsync(handle.fileno())
    Path(temporary).rename(path)


def _read(path: Path, model: type[M]) -> M | None:
    """The message in ``path``, or None. Both files are written by rename, so one that cannot be understood is no message of
    ours, and counts as none."""
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
