"""Agents as detached processes of this machine, which can outlive the service. An agent counts as alive while its lock is held. A
starting agent is found by RATCHET_ATTEMPT_DIR in its environment. Its lock is not tested, since the test could keep the agent
from taking the lock."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from ratchet_contract import env_vars as names
from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.paths import AttemptPaths, HomePaths, is_job_id, parse_attempt_dir_name
from ratchet_contract.plural import pluralize
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import AgentFile, LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.config.standby_bounds import OFF, StandbyBounds
from ratchet_service.isolation import file_access
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.launchers import attempt_files as files
from ratchet_service.launchers.base import AttemptRef, AttemptState, LaunchError, LaunchPlan
from ratchet_service.launchers.local.standby import MODULE, ROOM, Standby, has_relative_path, kind_of
from ratchet_service.launchers.plan import agent_environment, rank_commands, secret_sources

_MIN_RANK_BYTES = 2**29
"""Bytes of private memory that a rank needs to reach its first step: torch, its threads' stacks, gloo."""


def resource_problems(spec: JobSpec) -> list[FieldProblem]:
    """Return a problem for each limit of the spec that this machine cannot enforce, and for too little memory."""
    found = []
    share, files = spec.memory_per_rank, spec.resources.open_files
    if share is not None and spec.world.device != "cpu":
        text = (
            "the local launcher limits memory only for jobs with world.device cpu, since CUDA maps far more than it uses: "
            "remove it, set device cpu, or use Kubernetes or Slurm"
        )
        found.append(FieldProblem(pointer="/resources/memory", code="launcher-cannot", detail=text))
    elif share is not None and share < _MIN_RANK_BYTES:
        ranks = pluralize(spec.world.ranks_per_node, "rank")
        text = f"{share // 2**20} MiB for each of {ranks}, and torch alone needs 512: request more"
        found.append(FieldProblem(pointer="/resources/memory", code="limit-too-low", detail=text))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files is not None and most != resource.RLIM_INFINITY and files > most:
        text = f"this machine allows a process at most {most} open files: request fewer, or raise LimitNOFILE of the service"
        found.append(FieldProblem(pointer="/resources/open_files", code="limit-too-high", detail=text))
    return found


def warnings(spec: JobSpec) -> list[Warning_]:
    """Return a warning if the spec limits memory: the limit applies to each process separately."""
    share = spec.memory_per_rank
    if share is None:
        return []
    text = (
        f"without a container the limit of {share // 2**20} MiB applies to each process of a rank and to each DataLoader "
        "worker separately: their sum is not limited"
    )
    return [Warning_(pointer="/resources/memory", code="memory-per-process", detail=text)]


AGENT: Final = ("-P", "-m", "ratchet_worker.agent")
"""-P: the directory that the service was started in must not be on the agent's import path."""

_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_ONE_MACHINE: Final = "the local launcher has one machine"


class LocalLauncher:
    """Starts agents as processes of this machine. ``agent``: the agent's command; None: it is run by this process's interpreter.
    ``environ``: agents inherit its variables, except the service's own; None: the environment of this process.
    ``sandbox``: the user and the limits of agents. ``standby``: bounds of the agents that are parked for later attempts."""

    kind = "local"
    max_nodes: int | None = 1
    slots = True
    same_files = True
    excludes_nodes = False

    def __init__(
        self,
        home: HomePaths,
        agent: tuple[str, ...] | None = None,
        environ: Mapping[str, str] | None = None,
        sandbox: Sandbox = NO_SANDBOX,
        standby: StandbyBounds = OFF,
    ) -> None:
        self._home = home
        self._sandbox = sandbox
        self._agent = agent or (sys.executable, *AGENT)
        self._environ = dict(os.environ if environ is None else environ)
        self._children: dict[str, set[int]] = {}  # attempt's name -> pids
        self.standby = Standby(standby, relative_path=has_relative_path(self._environ))
        self._parks = standby.processes > 0 and self._agent[1:] == AGENT

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """Return warnings, and problems for a GPU type, image, volumes, Secrets, and limits (``resource_problems``)."""
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
        problems += resource_problems(spec)
        for name, secret in spec.secrets.items():
            if secret.from_secret is not None:
                text = "the local launcher has no Secrets: name a variable of the service's environment (from_env)"
                problems.append(FieldProblem(pointer=f"/secrets/{name}", code="launcher-cannot", detail=text))
        return warnings(spec), problems

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """Return the plan: the agent's command, added variables, sources of secrets, and the ranks' commands for display."""
        paths = AttemptPaths(Path(launch.attempt_dir))
        nodes = launch.spec.world.nodes
        return LaunchPlan(
            ref=AttemptRef(launch.job_id, launch.attempt, paths, nodes),
            launch=launch,
            argv=(*self._agent, str(paths.launch_file)),
            env={names.ATTEMPT_DIR: launch.attempt_dir},
            secrets=secret_sources(launch.spec),
            ranks=rank_commands(launch, self._agent[0]),
        )

    def submit(self, plan: LaunchPlan) -> None:
        """Write ``launch.json`` and start the agents, unless they were started before. Raises ``LaunchError``."""
        if not self.has_started(plan.ref):
            self._write_launch_file(plan)
            self.start(plan)

    def start(self, plan: LaunchPlan) -> None:
        """Start the agents of an attempt whose ``launch.json`` is written. Returns once they are visible in /proc, or after
        some seconds. Raises ``LaunchError``."""
        env = agent_environment(self._environ, plan)
        if (parent := self._environ.get(names.ENDS_WITH)) is not None:
            env[names.ENDS_WITH] = parent
        try:
            pids = [self._start(plan, node, env) for node in range(plan.ref.nodes)]
        except OSError as error:
            raise LaunchError(f"the agent could not be started: {error}") from error
        for pid in pids:
            with suppress(OSError):  # it has ended
                procfs.read_environ(
                    pid
                )  # returns after execve: a repeated submit, also in another process, must see it

    def has_started(self, ref: AttemptRef) -> bool:
        """True if an agent of the attempt has started, now or earlier, or if processes of the attempt exist."""
        return ref.paths.agent_file.exists() or bool(self._pids(ref))

    def _write_launch_file(self, plan: LaunchPlan) -> None:
        """Give the job's directory to the sandbox's user, if there is one, and write ``launch.json``. Raises ``LaunchError``."""
        try:
            self._give_to_user(plan.ref.paths)
            if (user := self._sandbox.user) is not None and plan.launch.environments_dir is not None:
                file_access.give_to_user(self._home.environments / str(user.uid), user.uid, user.gid)
            files.write_launch(plan.ref.paths, plan.launch)
        except OSError as error:
            raise LaunchError(f"the agent could not be started: {error}") from error

    def poll(self, ref: AttemptRef) -> AttemptState:
        """Return the attempt's state, from the agents' files, locks and processes. Reaps its ended agents that this process
        started."""
        self._reap(ref.name)
        nodes = files.node_states(ref, gone=lambda node: not files.lock_is_held(ref.paths.node(node).lock_file))
        locked = any(node.seen and not node.gone for node in nodes)
        starting = not all(node.seen for node in nodes) and (ref.name in self._children or self._pids(ref))
        state = AttemptState(locked or bool(starting), nodes)
        self.standby.tidy(ref.name, alive=state.alive)
        return state

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """Send SIGTERM to the attempt's agents that have written ``agent.json``; their end is not awaited, and ``grace`` is not
        used."""
        for agent in self._agents(ref).values():
            if self._is_agent(ref, agent):
                procfs.kill(agent.pid, signal.SIGTERM)

    def kill(self, ref: AttemptRef) -> list[str]:
        """Send SIGKILL to all processes of the attempt; their end is not awaited. Return the names of the processes found. The
        names of other agents whose lock is still held are returned, too."""
        found = procfs.kill_all(lambda: self._pids(ref))
        for node, agent in self._agents(ref).items():
            if agent.pid not in found and files.lock_is_held(ref.paths.node(node).lock_file):
                if self._is_agent(ref, agent):
                    procfs.kill(agent.pid)
                found.append(
                    agent.pid
                )  # also if the process is not visible here: its death is not proved while the lock is held
        self._reap(ref.name)
        return [f"process {pid}" for pid in found]

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """Return the ends of the agents' logs, at most ``limit`` characters altogether."""
        return files.agent_logs(ref, limit)

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        """Find attempts of this run directory that have processes here and that ``known`` does not return. Kill their processes,
        and return the attempts' names."""
        self.standby.tidy()
        for name in list(self._children):  # attempts that another reconciler supervises now
            self._reap(name)
        found = {ref.name: folders for ref, folders in self.running_attempts()}
        orphans = sorted(set(found) - set(known(list(found)))) if found else []
        for name in orphans:
            procfs.kill_all(partial(self._pids_in_folders, found[name]))
        return orphans

    def running_attempts(self) -> list[tuple[AttemptRef, set[str]]]:
        """Return the attempts of this run directory that have processes here. Each comes with the paths by which these processes
        name its directory: several spellings are possible."""
        found: dict[str, tuple[AttemptRef, set[str]]] = {}
        for _, folder in procfs.processes_with_variable(names.ATTEMPT_DIR):
            ref = self._ref_from_folder(Path(folder))
            if ref is not None:
                found.setdefault(ref.name, (ref, set()))[1].add(folder)
        return list(found.values())

    def _start(self, plan: LaunchPlan, node: int, env: dict[str, str]) -> int:
        """Start the agent of one node and return its pid; the agent's output is appended to ``agent.log``. Raises ``OSError``."""
        paths = plan.ref.paths.node(node)
        argv = plan.argv if plan.ref.nodes == 1 else (*plan.argv, "--node", str(node))
        with as_owner(paths.root):
            paths.root.mkdir(parents=True, exist_ok=True)
            log = os.open(paths.agent_log, _APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            kind = kind_of(plan, self._environ) if self._parks else ""
            taken = kind if isinstance(kind, str) else self.standby.take(kind, plan, log)
            if isinstance(taken, int):
                pid = taken
            else:
                cold = {names.START: f"cold: {taken}"} if self._parks else {}
                with self._sandbox.command(argv, {**env, **cold}, cwd="/") as command:
                    pid = _spawn(command.argv, command.env, log, command.fds)
            if not isinstance(kind, str):
                inherited = {name: value for name, value in env.items() if name not in plan.env}
                self.standby.started(plan, kind, partial(self._park, inherited))
        finally:
            os.close(log)
        self._children.setdefault(plan.ref.name, set()).add(pid)
        return pid

    def _park(self, env: Mapping[str, str], reserved: Mapping[str, str], attempts: socket.socket, output: int) -> int:
        """Start an agent that waits for an attempt on the socket ``attempts``, and return its pid. ``reserved``: variables behind
        those of ``env``. ``output``: descriptor for what it prints. Raises ``OSError``."""
        argv = (self._agent[0], *AGENT[:-1], MODULE, str(attempts.fileno()), " " * ROOM)
        with self._sandbox.command(argv, {**env, **reserved}, cwd="/") as command:
            return _spawn(command.argv, command.env, output, (*command.fds, attempts.fileno()))

    def _give_to_user(self, paths: AttemptPaths) -> None:
        """Make the sandbox's user, if there is one, the owner of the job's directory. Raises ``OSError``."""
        user = self._sandbox.user
        if user is None:
            return
        ref = self._ref_from_folder(paths.root)
        if ref is None:  # from a launch file that was read back, which user code may have changed
            raise PermissionError(f"{paths.root} is not an attempt in the run directory {self._home.home}")
        file_access.give_to_user(self._home.job(ref.job_id).root, user.uid, user.gid)

    def _is_agent(self, ref: AttemptRef, agent: AgentFile) -> bool:
        """True if the process that ``agent`` names is alive and runs as the owner of the job's directory, or as any user if
        ``owner_of`` returns root or None."""
        # user code may have written the pid of another process into agent.json
        owner = file_access.owner_of(ref.paths.root)
        own = owner is None or owner[0] == 0 or procfs.runs_as(agent.pid, owner[0])
        return own and procfs.is_alive(agent.pid, agent.start_time)

    def _pids(self, ref: AttemptRef) -> list[int]:
        """Return the pids of live processes with the attempt's directory in their environment."""
        return procfs.pids_with_variable(names.ATTEMPT_DIR, str(ref.paths.root))

    def _pids_in_folders(self, folders: Collection[str]) -> list[int]:
        """Return the pids of live processes whose environment names one of these attempt directories."""
        return [pid for pid, folder in procfs.processes_with_variable(names.ATTEMPT_DIR) if folder in folders]

    def _agents(self, ref: AttemptRef) -> dict[int, AgentFile]:
        """Return node -> content of ``agent.json``, of the nodes whose agent has started."""
        agents = {node: state.agent for node, state in enumerate(files.node_states(ref))}
        return {node: agent for node, agent in agents.items() if agent is not None}

    def _ref_from_folder(self, folder: Path) -> AttemptRef | None:
        """Return the attempt whose directory in this run directory is ``folder``, by its path alone; None for another path."""
        try:
            job_id, word, number = folder.relative_to(self._home.jobs).parts
        except ValueError:
            return None
        attempt = parse_attempt_dir_name(number)
        if word != "attempts" or not is_job_id(job_id) or attempt is None:
            return None
        return AttemptRef(job_id, attempt, self._home.job(job_id).attempt(attempt))

    def _reap(self, name: str) -> None:
        """Reap the agents of this attempt that are children of this process and have ended. Does not block."""
        pids = self._children.get(name, set())
        for pid in list(pids):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            pids.discard(pid)
        if not pids:
            self._children.pop(name, None)


def _spawn(argv: Sequence[str], env: dict[str, str], log: int, fds: Sequence[int] = ()) -> int:
    """Start a detached process and return its pid. ``log``: descriptor for its output. ``fds``: descriptors that it inherits, and
    no others: this process may have inherited some from a shell. Raises ``OSError``."""
    strays = [
        fd
        for fd in (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        if fd > 2 and fd not in fds and _is_inheritable(fd)
    ]
    actions = [
        *((os.POSIX_SPAWN_CLOSE, fd) for fd in strays),
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, 1, 2),
        *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds),
    ]
    default = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD]
    return os.posix_spawn(argv[0], list(argv), env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=default)


def _is_inheritable(fd: int) -> bool:
    """True if the descriptor is open and is passed on to new programs."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
