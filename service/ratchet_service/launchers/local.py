"""Agents as detached processes of this machine. They outlive the service on purpose: training goes on while it restarts.

Proof of life is the agent's ``flock`` on ``agent.lock``. It is probed only once ``agent.json`` is there, which the agent
writes while it holds the lock: probing earlier could take the lock from under a starting agent's hands. Until then a
starting agent is known by RATCHET_ATTEMPT_DIR in its environment, which every descendant inherits.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ratchet_contract import environment as names
from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.messages import AgentFile, LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths, is_job_id
from ratchet_contract.spec import JobSpec
from ratchet_service import file_owner
from ratchet_service.confined import OWN, Confined
from ratchet_service.file_owner import as_owner
from ratchet_service.launchers import files, limits, processes
from ratchet_service.launchers.apart import Apart
from ratchet_service.launchers.base import AttemptRef, AttemptState, Launcher, LaunchError, LaunchPlan
from ratchet_service.launchers.planning import agent_environment, rank_commands, secret_sources

AGENT: Final = ("-P", "-m", "ratchet_worker.agent")
"""-P: the directory that the service was started in must not be on the agent's import path."""

_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_ONE_MACHINE: Final = "the local launcher is one machine"


def make(home: HomePaths, settings: Mapping[str, Any], confined: Confined = OWN) -> Launcher:
    """The factory that the table names. Raises ``ValueError`` for settings that it does not have."""
    hosted = settings.get("agent_host", False)
    further = [str(name) for name in settings if name != "agent_host"]
    if further or not isinstance(hosted, bool):
        given = ", ".join(further) or f"agent_host: {hosted!r}"
        raise ValueError(
            f"the launcher local has the setting agent_host, true or false, and no other: {given} is given"
        )
    if not hosted:
        return LocalLauncher(home, confined=confined)
    if confined.user is not None:
        raise ValueError("local jobs run as the user of their agent host (agent_host: true): leave --run-as out")
    from ratchet_service.launchers.agent_host_client import HostedLauncher

    return Apart(HostedLauncher(home))


class LocalLauncher:
    """See the module. ``agent`` is the command before the launch file; ``environ`` what agents inherit from;
    ``confined``: whom agents and ranks run as, and within what."""

    kind = "local"
    max_nodes: int | None = 1
    slots = True
    same_files = True

    def __init__(
        self,
        home: HomePaths,
        agent: tuple[str, ...] | None = None,
        environ: Mapping[str, str] | None = None,
        confined: Confined = OWN,
    ) -> None:
        self._home = home
        self._confined = confined
        self._agent = agent or (sys.executable, *AGENT)
        self._environ = dict(os.environ if environ is None else environ)
        self._children: dict[str, set[int]] = {}  # by the attempt's name

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        given = {
            "/resources/gpu": spec.resources.gpu,
            "/image": spec.image,
            "/volumes": spec.volumes or None,
        }
        problems = [
            FieldProblem(
                pointer=pointer, code="launcher-cannot", detail=f"{_ONE_MACHINE} without containers: remove it"
            )
            for pointer, value in given.items()
            if value is not None
        ]
        problems += limits.problems(spec)
        for name, secret in spec.secrets.items():
            if secret.from_secret is not None:
                text = "the local launcher has no Secrets: name a variable of the service's environment (from_env)"
                problems.append(FieldProblem(pointer=f"/secrets/{name}", code="launcher-cannot", detail=text))
        return limits.warnings(spec), problems

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        paths = AttemptPaths(Path(launch.attempt_dir))
        nodes = launch.spec.world.nodes
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.epoch, paths, nodes),
            launch=launch,
            argv=(*self._agent, str(paths.launch_file)),
            env={names.ATTEMPT_DIR: launch.attempt_dir},
            secrets=secret_sources(launch.spec),
            ranks=rank_commands(launch, self._agent[0]),
        )

    def submit(self, plan: LaunchPlan) -> None:
        if not self.began(plan.ref):
            self._write(plan)
            self.start(plan)

    def start(self, plan: LaunchPlan) -> None:
        """The agents of an attempt that has not begun, and whose ``launch.json`` is written. Raises ``LaunchError``."""
        env = agent_environment(self._environ, plan)
        if (parent := self._environ.get(names.ENDS_WITH)) is not None:
            env[names.ENDS_WITH] = parent
        try:
            pids = [self._start(plan, node, env) for node in range(plan.ref.nodes)]
        except OSError as error:
            raise LaunchError(f"the agent could not be started: {error}") from error
        for pid in pids:
            processes.wait_until_visible(pid)  # who submits again, here or in another process, must see it

    def began(self, ref: AttemptRef) -> bool:
        """Were its agents started?"""
        return ref.paths.agent_file.exists() or bool(self._found(ref))

    def _write(self, plan: LaunchPlan) -> None:
        """Raises ``LaunchError``."""
        try:
            self._own(plan.ref.paths)
            files.write_launch(plan.ref.paths, plan.launch)
        except OSError as error:
            raise LaunchError(f"the agent could not be started: {error}") from error

    def poll(self, ref: AttemptRef) -> AttemptState:
        self._reap(ref.name)
        nodes = files.node_states(ref, gone=lambda node: not files.lock_is_held(ref.paths.node(node).lock_file))
        locked = any(node.seen and not node.gone for node in nodes)
        starting = not all(node.seen for node in nodes) and (ref.name in self._children or self._found(ref))
        return AttemptState(locked or bool(starting), nodes)

    def stop(self, ref: AttemptRef, grace: float) -> None:
        for agent in self._agents(ref).values():
            if self._is_agent(ref, agent):
                processes.kill(agent.pid, signal.SIGTERM)

    def kill(self, ref: AttemptRef) -> list[str]:
        found = processes.end_all(lambda: self._found(ref))
        for node, agent in self._agents(ref).items():
            if agent.pid not in found and files.lock_is_held(ref.paths.node(node).lock_file):
                if self._is_agent(ref, agent):
                    processes.kill(agent.pid)
                found.append(
                    agent.pid
                )  # also when it cannot be seen from here: while the lock is held, nothing is proved
        self._reap(ref.name)
        return [f"process {pid}" for pid in found]

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return files.agent_logs(ref, limit)

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        for name in list(self._children):  # of attempts that another reconciler looks after now
            self._reap(name)
        found = {ref.name: folders for ref, folders in self.running()}
        orphans = sorted(set(found) - set(known(list(found)))) if found else []
        for name in orphans:
            processes.end_all(partial(self._of_folders, found[name]))
        return orphans

    def running(self) -> list[tuple[AttemptRef, set[str]]]:
        """Attempts of this run directory that processes of this machine belong to, and the directories that these name."""
        found: dict[str, tuple[AttemptRef, set[str]]] = {}
        for _, folder in processes.values_of(names.ATTEMPT_DIR):
            ref = self._ref(Path(folder))
            if ref is not None:
                found.setdefault(ref.name, (ref, set()))[1].add(folder)
        return list(found.values())

    def _start(self, plan: LaunchPlan, node: int, env: dict[str, str]) -> int:
        """Start the agent of one node; its pid. Raises ``OSError``."""
        paths = plan.ref.paths.node(node)
        argv = plan.argv if plan.ref.nodes == 1 else (*plan.argv, "--node", str(node))
        with as_owner(paths.root):
            paths.root.mkdir(parents=True, exist_ok=True)
            log = os.open(paths.agent_log, _APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            with self._confined.command(argv, env, cwd="/") as command:
                pid = _spawn(command.argv, command.env, log, command.fds)
        finally:
            os.close(log)
        self._children.setdefault(plan.ref.name, set()).add(pid)
        return pid

    def _own(self, paths: AttemptPaths) -> None:
        """The job's directory is its user's. Raises ``OSError``."""
        user = self._confined.user
        if user is None:
            return
        ref = self._ref(paths.root)
        if ref is None:  # a launch file that was read again, which user code may have changed
            raise PermissionError(f"{paths.root} is no attempt of the run directory {self._home.home}")
        file_owner.give(self._home.job(ref.job_id).root, user.uid, user.gid)

    def _is_agent(self, ref: AttemptRef, agent: AgentFile) -> bool:
        """Is the process there, and no other user's? User code may have written another's number into ``agent.json``."""
        owner = file_owner.owner_of(ref.paths.root)
        own = owner is None or owner[0] == 0 or processes.is_of(agent.pid, owner[0])
        return own and processes.is_alive(agent.pid, agent.start_time)

    def _found(self, ref: AttemptRef) -> list[int]:
        return processes.with_variable(names.ATTEMPT_DIR, str(ref.paths.root))

    def _of_folders(self, folders: Collection[str]) -> list[int]:
        return [pid for pid, folder in processes.values_of(names.ATTEMPT_DIR) if folder in folders]

    def _agents(self, ref: AttemptRef) -> dict[int, AgentFile]:
        agents = {node: state.agent for node, state in enumerate(files.node_states(ref))}
        return {node: agent for node, agent in agents.items() if agent is not None}

    def _ref(self, folder: Path) -> AttemptRef | None:
        """Which attempt of this run directory the directory belongs to; None when it is another's."""
        try:
            job_id, word, number = folder.relative_to(self._home.jobs).parts
        except ValueError:
            return None
        if word != "attempts" or not is_job_id(job_id) or not number.isdigit():
            return None
        return AttemptRef(job_id, int(number), self._home.job(job_id).attempt(int(number)))

    def _reap(self, name: str) -> None:
        """Collect agents of that attempt that have ended and are this process's own, so that they leave no zombies."""
        pids = self._children.get(name, set())
        for pid in list(pids):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            pids.discard(pid)
        if not pids:
            self._children.pop(name, None)


def _spawn(argv: Sequence[str], env: dict[str, str], log: int, fds: Sequence[int] = ()) -> int:
    """Start a process in a session of its own, with no tie to this one; it prints to the descriptor ``log``, and inherits
    ``fds``. Raises ``OSError``."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds),
    ]
    default = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD]
    return os.posix_spawn(argv[0], list(argv), env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=default)
