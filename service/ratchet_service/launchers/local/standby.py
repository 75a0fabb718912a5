"""Parked agents: processes of this machine that have made an agent's and its ranks' imports, and wait for an attempt. They know
no job and no token. They end with this process: their socket's other end closes with it. The first of a kind imports torch; the
others are forked from one that is parked."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_contract.api.fleet import ParkedObstacle, ParkedView
from ratchet_contract.plural import join_first
from ratchet_contract.processes import available_memory, procfs
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved, TaskSpec
from ratchet_service.config.standby_bounds import StandbyBounds
from ratchet_service.isolation import file_access
from ratchet_service.launchers.base import LaunchPlan

log = logging.getLogger(__name__)

MODULE: Final = "ratchet_worker.agent.parked"
_DELAY_SECONDS: Final = 3.0
"""Seconds after the start of an attempt until one is parked for the next: its own start does not share the cores with that."""
_FORK_DELAY_SECONDS: Final = 1.0
"""The same for an agent that is forked: it makes no import of torch."""
_FORK: Final = b"fork"
"""With a socket and an output: a parked agent has another one forked (``ratchet_worker.agent.parked``)."""
_ANSWER_SECONDS: Final = 1.0
ROOM: Final = 1 << 12
"""Bytes for an attempt's paths in what /proc shows of the process."""
_MAX_MESSAGE: Final = 1 << 17
_NICE: Final = 10
"""Beside ranks that use all cores, about a tenth of one: with 19, a hundredth, the imports take minutes."""
_FREE_FACTOR: Final = 2
"""An agent is parked only if this multiple of the memory that it may use is free."""
_MEMORY_SECONDS: Final = 60.0
"""Seconds until the free memory is looked at again."""
_RETRY_SECONDS: Final = 60.0
"""If an agent that is younger cannot fork another one, no other is started for a while."""
_MAX_IMPORTS: Final = 1 << 14
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid and gid of a message's sender: unix(7)
_CAP_SYS_NICE: Final = 23
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Kind:
    """What an attempt must have in common with a parked agent. ``owner``: of the job. ``job_id``: with secrets the job itself,
    else None. ``like``: a launch file with what decides the ranks' environment alone, as JSON."""

    owner: str
    job_id: str | None
    like: str = field(repr=False)

    def differences(self, other: Kind) -> list[str]:
        """Return what differs, as keys of the spec and names of variables. Of another owner's kind no more than that."""
        if self.owner != other.owner:
            return ["owner"]
        found = ["job with secrets"] if self.job_id != other.job_id else []
        likes = [json.loads(kind.like) for kind in (self, other)]
        keys = set[str]()
        for part in ("spec", "resolved"):  # both have `python`
            ours, theirs = (_flat(like[part]) for like in likes)
            keys |= {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
        return [*found, *sorted(keys)]


def _flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the spec that make a kind, those of objects one by one: ``env.NAME``."""
    flat: dict[str, Any] = {}
    for key, value in keys.items():
        if key in ("script", "task"):
            flat["script or task"] = key if value is not None else flat.get("script or task")
        elif isinstance(value, dict):
            flat |= {f"{key}.{name}": each for name, each in value.items()}
        else:
            flat[key] = value
    return flat


def kind_of(plan: LaunchPlan, environ: Mapping[str, str]) -> Kind | str:
    """Return the kind of the attempt, or why no agent can be parked for it. ``environ``: what agents inherit."""
    launch, spec = plan.launch, plan.launch.spec
    if plan.owner is None:
        return "the job's owner is not known"
    if spec.world.nodes != 1:
        return "none is parked for a job on several nodes"
    if spec.environment is not None:
        return "none is parked for a job with an `environment`, whose interpreter the agent makes"
    if "PYTHONPATH" in spec.env:
        return "none is parked for a job whose `env` sets PYTHONPATH"
    if has_relative_path(environ):
        return "the service was started with a relative directory in PYTHONPATH"
    like = LaunchFile(
        job_id="",
        attempt=0,
        world_size=1,
        ranks=[0],
        spec=JobSpec(
            name="parked",
            task=TaskSpec(entrypoint="no:Job") if spec.script is None else None,
            script=None if spec.script is None else ["no-job.py"],
            **{key: getattr(spec, key) for key in ("python", "env", "secrets", "nccl", "determinism", "seed")},
        ),
        resolved=Resolved(
            **{key: getattr(launch.resolved, key) for key in ("device", "backend", "threads_per_rank", "python")}
        ),
        job_root="/",
        attempt_dir="/",
        workdir="/",
        report_token="",
        service_file="",
    ).model_dump_json()
    if len(like) > _MAX_MESSAGE:
        return f"the job's `env` has more than {_MAX_MESSAGE} bytes"
    return Kind(plan.owner, launch.job_id if spec.secrets or spec.secret_env else None, like)


def has_relative_path(environ: Mapping[str, str]) -> bool:
    """True if PYTHONPATH has a relative directory: for a parked agent and for a job's ranks, that is not the same one."""
    return not all(Path(part).is_absolute() for part in environ.get("PYTHONPATH", "/").split(os.pathsep))


def code_of(plan: LaunchPlan) -> str | None:
    """Return what must be equal for an attempt to use the packages that another one has imported: the code, and what it runs of
    it, as JSON. None: the code is not known."""
    launch, spec = plan.launch, plan.launch.spec
    if launch.resolved.code_digest is None or (spec.code is not None and spec.code.source == "nodes"):
        return None
    return json.dumps([launch.resolved.code_digest, spec.script, spec.task and spec.task.model_dump(mode="json")])


def _code_folders(plan: LaunchPlan) -> list[str]:
    """Return the directories that the attempt's code may import its own modules from."""
    launch = plan.launch
    code = Path(launch.code_dir or launch.workdir)
    return [str(code), *([str((code / launch.spec.script[0]).parent)] if launch.spec.script else [])]


Spawn = Callable[[Mapping[str, str], socket.socket, int], int]
"""Starts ``python -m MODULE`` with these variables added to those of an agent, the socket, and a descriptor for its output;
returns the pid. Raises ``OSError``."""


@dataclass(eq=False)
class _Parked:
    """A parked agent. ``code``: of the attempt whose packages it imports (``code_of``); None: it imports none. ``socket``: to it;
    ``output``: file of what it prints. ``used_at``: when an attempt of its kind last ran; ``begins_at``: when ``given`` is sent
    (monotonic). ``forked``: from ``source``, which is None once it is ready. ``pid``: 0 until it has been forked; ``started``:
    the process's start time. ``given``: message with what it starts with, until it is sent. ``server``: pid of its fork server.
    ``taken``: it is given an attempt."""

    kind: Kind
    code: str | None
    socket: socket.socket
    output: int
    used_at: float
    begins_at: float
    forked: bool = False
    source: _Parked | None = None
    pid: int = 0
    started: int | None = None
    given: bytes = b""
    server: int | None = None
    ready: bool = False
    taken: bool = False

    def fits(self, code: str | None) -> bool:
        """True if an attempt of ``code`` can start in it: a forked one has no server without the packages."""
        return self.code in (None, code) or not self.forked

    def begin(self) -> None:
        """Send what it starts with, if that was not sent yet."""
        given, self.given = self.given, b""
        if given:
            self.socket.send(given)

    def close(self) -> None:
        """Close this process's descriptors of the parked agent."""
        self.socket.close()
        os.close(self.output)


@dataclass(frozen=True)
class _Refused:
    """Why no agent of a kind is parked, and until when (monotonic)."""

    until: float
    obstacle: ParkedObstacle
    why: str


@dataclass(eq=False)
class _Running:
    """An attempt that runs, and how an agent is parked for the next one. ``at``: of its start (monotonic). ``code``: of agents
    that are parked for it (``_Parked.code``), once that ``is_known``."""

    kind: Kind
    plan: LaunchPlan
    spawn: Spawn
    at: float
    code: str | None = None
    is_known: bool = False

    def look(self) -> None:
        """Set ``code``; it is known once rank 0 records its imports, which it does after its own import of torch."""
        packages = self.packages()
        self.code = code_of(self.plan) if packages else None
        self.is_known = packages is not None

    def needs(self, parked: _Parked) -> bool:
        """True if the next attempt like this one may start in the parked agent."""
        return self.kind == parked.kind and (not self.is_known or self.code == parked.code)

    def seconds_quiet(self) -> float:
        """Return the seconds since its start or, if that is later, since its rank 0 last imported a package."""
        seconds = time.monotonic() - self.at
        with suppress(OSError):
            imports = self.plan.ref.paths.imports_file
            with file_access.as_owner(imports):
                seconds = min(seconds, max(0.0, time.time() - imports.lstat().st_mtime))
        return seconds

    def packages(self) -> list[str] | None:
        """Return the modules of packages that its rank 0 has imported; None: it does not record them yet."""
        if code_of(self.plan) is None:
            return []
        try:
            with file_access.open_read(self.plan.ref.paths.imports_file) as file:
                return file.read(_MAX_IMPORTS).decode(errors="replace").split()
        except OSError:
            return None


class Standby:
    """The parked agents of one launcher, which uses it in one thread."""

    def __init__(self, bounds: StandbyBounds, *, relative_path: bool = False) -> None:
        """``relative_path``: agents inherit a relative directory in PYTHONPATH, so that none can be parked."""
        self._bounds, self._relative_path = bounds, relative_path
        self._parked: list[_Parked] = []
        self._refused: dict[Kind, _Refused] = {}
        self._ended: set[int] = set()  # pids that were killed, and are not reaped yet
        self._running: dict[str, _Running] = {}  # by the attempt's name
        self._active = Counter[Kind]()  # running attempts of each kind
        self._nice = os.getpriority(os.PRIO_PROCESS, 0) if bounds.processes and _may_raise_priority() else None

    @property
    def view(self) -> ParkedView:
        """The number of parked agents, their memory, and what prevents others. Any thread may ask."""
        parked, bounds = list(self._parked), self._bounds
        ready = sum(each.ready for each in parked)
        obstacles = {one.obstacle for one in list(self._refused.values()) if one.until > time.monotonic()}
        if bounds.processes and not parked and self._memory_short() is not None:
            obstacles.add("memory-short")
        if bounds.processes and self._relative_path:
            obstacles.add("relative-pythonpath")
        return ParkedView(
            ready=ready, starting=len(parked) - ready, memory_bytes=sum(map(self._memory, parked)),
            max_agents=bounds.processes, max_seconds=bounds.seconds, max_memory_bytes=bounds.memory,
            obstacles=sorted(obstacles),
        )  # fmt: skip

    @property
    def ready(self) -> int:
        """The number of parked agents that have made all imports. Any thread may ask."""
        return sum(parked.ready for parked in list(self._parked))

    def started(self, plan: LaunchPlan, kind: Kind, spawn: Spawn) -> None:
        """Record that the attempt was started: after a while, an agent is parked for the next attempt of its kind."""
        name = plan.ref.name
        self._forget(name)
        self._running[name] = _Running(kind, plan, spawn, time.monotonic())
        self._active[kind] += 1

    def _forget(self, name: str) -> None:
        """Record that the attempt ``name``, if it was recorded, does not run any more."""
        if (running := self._running.pop(name, None)) is not None:
            self._active.subtract([running.kind])
            self._active += Counter()  # drops kinds without attempts

    def tidy(self, name: str | None = None, *, alive: bool = False) -> None:
        """End what exceeds the bounds. ``name``: an attempt that was polled, ``alive`` or not; if fewer agents of its kind are
        parked than attempts run, park one."""
        now = time.monotonic()
        self._reap()
        self._refused = {kind: one for kind, one in self._refused.items() if one.until > now}
        for parked in list(self._parked):
            if now >= parked.begins_at:
                with suppress(OSError):  # it has ended
                    parked.begin()
            self._read(parked)
            if parked in self._parked and now - parked.used_at > self._bounds.seconds:
                self._end(parked)
        running = self._running.get(name or "")
        if running is None:
            return
        kind = running.kind
        mine = self._of(kind)
        for parked in mine:
            parked.used_at = now
        if not alive:
            self._forget(name or "")
            return
        if kind in self._refused:
            return
        if not running.is_known:
            if running.seconds_quiet() <= _DELAY_SECONDS:
                return
            running.look()
        same = [parked for parked in mine if parked.code == running.code]
        source = next((parked for parked in same if parked.ready), None)
        is_starting = source is None and not all(parked.ready for parked in same)
        if len(same) < self._active[kind] and not is_starting:
            try:
                self._park(running, source, now)
            except OSError as error:  # the attempt that was polled has nothing to do with it
                log.warning("no agent is parked: %s", error)
                self._refused[kind] = _Refused(now + self._bounds.seconds, "not-started", str(error))

    def _of(self, kind: Kind) -> list[_Parked]:
        """Return the parked agents of this kind."""
        return [parked for parked in self._parked if parked.kind == kind]

    def _park(self, running: _Running, source: _Parked | None, now: float) -> None:
        """Park an agent for the next attempt like ``running``, forked from ``source`` if there is one. If there are too many, end
        one that no running attempt needs, or, for a kind without any, one of a kind with several: the least recently used. If
        there is no such agent, park none. Raises ``OSError`` if none can be started."""
        kind = running.kind
        if (short := self._memory_short()) is not None:
            log.warning("no agent is parked: %s", short)
            self._refused[kind] = _Refused(now + min(_MEMORY_SECONDS, self._bounds.seconds), "memory-short", short)
            return
        if len(self._parked) >= self._bounds.processes:
            attempts = self._running.values()
            surplus = [parked for parked in self._parked if not any(one.needs(parked) for one in attempts)]
            if not surplus and not self._of(kind):
                surplus = [parked for parked in self._parked if len(self._of(parked.kind)) > 1]
            if not surplus:
                return
            self._end(min(surplus, key=lambda parked: (parked.used_at, not parked.forked)))
        if source is not None:
            self._fork(source, source.code, now, now)
            return
        packages = (running.packages() or []) if running.code is not None else []
        parked, theirs = _new(kind, running.code, packages, _code_folders(running.plan), now)
        try:
            parked.begin()
            with theirs:
                pid = running.spawn({names.PARKED: " " * ROOM}, theirs, parked.output)
        except OSError:
            parked.close()
            raise
        self._set_pid(parked, pid)
        self._parked.append(parked)
        if parked.code is not None and len(self._parked) < self._bounds.processes:
            self._fork(parked, None, now, now)  # before it imports the packages: for attempts of other code

    def _fork(self, source: _Parked, code: str | None, now: float, begins_at: float) -> _Parked:
        """Have a parked agent fork another one, with the packages of ``code``, which makes an agent's imports from ``begins_at``
        on. Raises ``OSError`` if this process cannot make a socket for it."""
        parked, theirs = _new(source.kind, code, [], [], now)
        parked.forked, parked.source, parked.begins_at = True, source, begins_at
        self._parked.append(parked)
        with theirs, suppress(OSError):  # else the source has ended, and the other end is closed
            socket.send_fds(source.socket, [_FORK], [theirs.fileno(), parked.output])
        return parked

    def _set_pid(self, parked: _Parked, pid: int) -> None:
        """Record the process. Running ranks come before its imports, if this process can raise its priority again."""
        parked.pid, parked.started = pid, procfs.start_time(pid)
        if self._nice is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, pid, max(_NICE, self._nice))

    def _memory_short(self) -> str | None:
        """Return why too little memory is free for a parked agent; None if there is enough, or if it is not known."""
        free, wanted = available_memory.available(), _FREE_FACTOR * self._bounds.memory
        if free is None or free >= wanted:
            return None
        return f"{free / 2**20:.0f} MiB of memory are free, {wanted / 2**20:.0f} MiB wanted (twice --standby memory)"

    def _read(self, parked: _Parked) -> None:
        """Read what the parked agent has sent. One that has ended during its imports, or uses too much memory, is ended and not
        replaced soon."""
        while parked in self._parked:
            try:
                self._receive(parked)
            except BlockingIOError:
                return

    def _receive(self, parked: _Parked, until: float | None = None) -> str:
        """Record and return the next message, for which this waits until ``until`` (monotonic); empty if the agent has ended.
        Raises ``OSError`` if there is none."""
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("it does not answer")
            parked.socket.settimeout(left)
        try:
            data, ancillary, _, _ = parked.socket.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        except ConnectionError:
            data, ancillary = b"", []
        # not from the message: its sender runs as the jobs' user, and this process may end it as root
        pid = next((_CREDENTIALS.unpack(sent)[0] for _, kind, sent in ancillary if kind == socket.SCM_CREDENTIALS), 0)
        message = data.decode(errors="replace")
        self._note(parked, message, pid)
        return message if parked in self._parked else ""

    def _note(self, parked: _Parked, message: str, sender: int) -> None:
        """Record what the parked agent has sent; empty: it has ended. ``sender``: the process that has sent it."""
        word, _, rest = message.partition(" ")
        if word == "forked" and parked.forked and not parked.pid and sender:
            self._set_pid(parked, sender)
        elif word == "started" and rest.isdigit():
            parked.server = int(rest)
        elif word == "ready":
            parked.ready, parked.source = True, None
            if (used := self._memory(parked)) > self._bounds.memory:
                most = self._bounds.memory / 2**20
                why = f"it uses {used / 2**20:.0f} MiB of memory, at most {most:.0f} MiB are allowed (--standby memory)"
                self._refuse(parked, "too-large", why)
        elif word not in ("taken", "unfit"):
            self._note_end(parked)

    def _note_end(self, parked: _Parked) -> None:
        """End what is left of a parked agent that has ended. One that was ready is replaced; its kind is refused for a while if
        it has ended during its imports, or if an agent that has just been started cannot fork another one."""
        said = os.pread(parked.output, 4000, max(0, os.fstat(parked.output).st_size - 4000))
        # it becomes part of a variable, in which no NUL can be
        why = f"it has ended. {said.decode(errors='replace').strip()}".replace("\0", "\ufffd")
        if parked.ready or (parked.pid and parked.given):
            log.warning("a parked agent is not used: %s", why)
            self._end(parked)
        elif not parked.forked:
            self._refuse(parked, "ended", why)
        else:
            self._end(parked)
            source = parked.source
            if source is None or source not in self._parked or source.taken:
                return
            why = (
                f"no agent is forked from it: a file that it has imported was changed, or the new one has ended. {why}"
            )
            log.warning("a parked agent is replaced: %s", why)
            now = time.monotonic()
            if now - source.begins_at < _RETRY_SECONDS:
                self._refused[source.kind] = _Refused(now + _RETRY_SECONDS, "ended", why)
            else:
                self._end(source)

    def _refuse(self, parked: _Parked, obstacle: ParkedObstacle, why: str) -> None:
        """End the parked agent, and park no other of its kind for a while."""
        log.warning("an agent was parked in vain, the next start is cold: %s", why)
        self._refused[parked.kind] = _Refused(time.monotonic() + self._bounds.seconds, obstacle, why)
        self._end(parked)

    def _memory(self, parked: _Parked) -> int:
        """Return the resident bytes of the parked agent's processes; pages that several processes share count in part."""
        return sum(map(_share, self._pids(parked)))

    def _pids(self, parked: _Parked) -> list[int]:
        """Return the pids of the parked agent and its fork server with that one's fork."""
        return [parked.pid, *procfs.live_descendants(parked.pid)] if parked.pid else []

    def _end(self, parked: _Parked) -> None:
        """Kill the parked agent, with which its fork server dies."""
        self._parked.remove(parked)
        parked.close()
        if parked.started is not None and procfs.is_alive(parked.pid, parked.started):
            procfs.kill(parked.pid)
        if parked.pid:
            self._ended.add(parked.pid)
        self._reap()

    def _reap(self) -> None:
        """Reap those that have ended. Does not block."""
        for pid in list(self._ended):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._ended.discard(pid)

    def take(self, kind: Kind, plan: LaunchPlan, log_fd: int) -> int | str:
        """Make a parked agent of this kind, one that has made all imports if possible, the agent of the attempt, and return its
        pid; or return why there is none. One that does not answer in time is killed. ``log_fd``: the agent's log."""
        for one in self._of(kind):
            self._read(one)
        code = code_of(plan)
        fitting = [one for one in self._of(kind) if one.fits(code)]
        parked = max(fitting, key=lambda one: (one.ready, one.code == code, one.code is None, one.forked), default=None)
        if parked is None:
            return self._why_none(kind)
        if parked.server is None and not parked.forked:
            self._end(parked)
            return "the parked agent had not made its own imports yet"
        try:
            until, parked.taken = time.monotonic() + _ANSWER_SECONDS, True
            parked.begin()
            self._wait_forked(parked, until)
            self._raise_priority(parked)
            self._fork_successor(parked, code, len(fitting))
            self._wait_for_forks(parked, until)
            until = time.monotonic() + _ANSWER_SECONDS
            message = {
                "launch_file": str(plan.ref.paths.launch_file),
                "attempt_dir": plan.launch.attempt_dir,
                "same_code": parked.code in (None, code),
            }
            socket.send_fds(parked.socket, [json.dumps(message).encode()], [log_fd])
            while (answer := self._receive(parked, until)) != "taken":
                if answer in ("unfit", ""):
                    raise ConnectionError("it cannot run the attempt" if answer else "it has ended")
            parked.socket.send(b"go")
        except OSError as error:
            log.warning("a parked agent is not used: %s", error)
            if parked in self._parked:
                self._end(parked)
            return f"the parked agent does not answer: {error}"
        self._parked.remove(parked)
        parked.close()
        parked.source = None
        return parked.pid

    def _wait_forked(self, parked: _Parked, until: float) -> None:
        """Wait until the agent is a process of its own. Raises ``OSError``."""
        while not parked.pid:
            if not self._receive(parked, until):
                raise ConnectionError("it could not be forked")

    def _fork_successor(self, parked: _Parked, code: str | None, fitting: int) -> None:
        """Have an agent that an attempt of ``code`` takes fork another one, unless enough are parked, none may be, or memory is
        short. ``fitting``: the number of agents that are parked for such attempts. The only one that serves other code, too,
        forks none: its place is needed for another such one."""
        enough = (
            fitting >= self._active[parked.kind] + 2
        )  # with this attempt, one more is active, and one less is parked
        alone = parked.code is not None and all(one.code is not None for one in self._of(parked.kind))
        if enough or parked.code not in (None, code) or (alone and not parked.forked) or parked.kind in self._refused:
            return
        if (parked.ready or parked.forked) and self._memory_short() is None:
            now = time.monotonic()
            try:
                self._fork(parked, parked.code, now, now + _FORK_DELAY_SECONDS)
            except OSError as error:  # the attempt can start nevertheless
                log.warning("no agent is forked: %s", error)

    def _wait_for_forks(self, parked: _Parked, until: float) -> None:
        """Wait until all agents that ``parked`` forks are processes of their own, and end those that are not in time: an agent
        with an attempt adopts, and ends with it, what its descendants leave behind."""
        for one in [one for one in self._parked if one.source is parked and not one.pid]:
            try:
                self._wait_forked(one, until)
                one.socket.setblocking(False)
            except OSError as error:
                log.warning("no agent is forked: %s", error)
                if one in self._parked:
                    self._end(one)

    def _why_none(self, kind: Kind) -> str:
        """Return why no agent of this kind is parked."""
        if kind in self._refused:
            return f"no agent is parked: {self._refused[kind].why}"
        if self._of(kind):
            return "only agents with the packages of other code are parked"
        others = len(self._parked)
        if others >= self._bounds.processes:
            return f"{others} agents of other kinds are parked (--standby processes={self._bounds.processes})"
        differences = [kind.differences(one.kind) for one in self._parked]
        nearest = min(differences, key=lambda found: (found == ["owner"], len(found)), default=[])
        differ = f" (the nearest parked one has another {join_first(nearest)})" if nearest else ""
        return f"no agent of this kind is parked yet{differ}"

    def _raise_priority(self, parked: _Parked) -> None:
        """Give all threads of the parked agent and its fork server the priority of this process. Raises ``OSError``."""
        if self._nice is None:
            return
        for pid in self._pids(parked):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(task.name), self._nice)


def _new(
    kind: Kind, code: str | None, packages: list[str], folders: list[str], now: float
) -> tuple[_Parked, socket.socket]:
    """Return a parked agent that is still to be started or forked, and the other end of its socket. ``folders``: of the job's
    code. Raises ``OSError``."""
    output = os.memfd_create("parked", os.MFD_CLOEXEC)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        os.close(output)
        raise
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    given = json.dumps({"like": json.loads(kind.like), "packages": packages, "code": folders}).encode()
    return _Parked(kind, code, ours, output, now, now, given=given), theirs


def _share(pid: int) -> int:
    """Return the resident bytes of the process (proportional set size), or all of them if the kernel does not say; 0: it has
    ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    return 0


def _may_raise_priority() -> bool:
    """True if this process may raise another's priority again, after it has lowered it (CAP_SYS_NICE)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False
