"""Python programs without the start of an interpreter: ``python [-P] (-m MODULE | FILE) ARGUMENTS`` is forked from a process that
has imported nearly all that the program imports, and goes on as that program.

It is the program's own code from its first line on, in a process with the session, directory, variables, descriptors, signals and
name that it would have been started with; ``/proc`` shows its command line and its variables, as ever. Behind ``nsenter
--net=FILE --`` it is in that network. What differs: imports were made in the forking process, and what is read at an
interpreter's start (PYTHONHASHSEED) is that process's. Where the program would have seen another value of what imports read, it
is started afresh.

An agent that is started so has its ranks, or the process that it forks them from, started so, too, once (``_fork_spare_child``),
and torchrun all of its ranks. An agent's ranks sleep TEST_STEP_SECONDS behind each step of an optimizer, if that is set.

As a program (``fork_server.py SOCKET OWNER PADDING``) this is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

ROOT: Final = str(Path(__file__).parents[2])
_EARLY: Final = ("PYTHON", "LD_", "MALLOC_", "LANG", "LC_")  # read by every interpreter as it starts
_EARLY_BY_TORCH: Final = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "TORCH", "CUDA_", "CUBLAS_",
)  # fmt: skip
_NOT_EARLY: Final = (
    "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
_THREADS: Final = "_NUM_THREADS"  # torch is told its number
_OF_RANKS: Final = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1", "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
_CLONE_NEWNET: Final = 0x40000000
_PADDING: Final = 1 << 15  # bytes that a program's variables may take beyond those of the forking process
_AGENTS: Final = tuple(
    ["-P", "-m", module]
    for module in ("ratchet_worker.agent", "ratchet_worker.agent.parked", "tests.support.fake_trainer")
)
_SERVICE: Final = (
    "ratchet_service.commands.serve", "ratchet_service.__main__", "uvicorn.protocols.http.auto", "alembic.command",
    "ratchet_worker.agent.main",
)  # fmt: skip
_TORCHRUN: Final = "torch.distributed.run"
_RANKS: Final = ("torch._dynamo", _TORCHRUN, "ratchet_worker.rank.rank_process", "ratchet_worker.agent.main")
_MODULES: Final = {
    "service": _SERVICE,
    "trainer": (*_SERVICE, "psycopg", "tests.support.control_plane", "tests.support.fake_trainer"),
    "ranks": _RANKS,
    "libraries": (*_RANKS, "sklearn.datasets", "accelerate", "lightning", "transformers", "transformers.trainer"),
    "mlflow": ("uvicorn.protocols.http.auto", "mlflow.server.fastapi_app", "mlflow.store.tracking.sqlalchemy_store"),
}
_RUN_AS_MAIN: Final = (  # imported for what they import
    "ratchet_service.__main__", "tests.support.control_plane", "tests.support.fake_trainer", _TORCHRUN,
)  # fmt: skip
_IGNORED_MEANWHILE: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _early_variables(environment: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith((*_EARLY, *also)) and not name.startswith(_NOT_EARLY) and not name.endswith(_THREADS)
    }


class Program:
    """What ``subprocess.Popen`` would be, of a process that is somebody else's child."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told  # where its end will be told
        weakref.finalize(self, os.close, told)

    def poll(self) -> int | None:
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            told = os.read(self._told, 32)
            self.returncode = (
                int(told) if told else -signal.SIGKILL
            )  # the forking process has gone, and takes all with it
        return self.returncode


class Interpreter:
    """The forking process: ``kind`` tells what it imports, when it is asked for something for the first time. It ends, with all
    that was forked, when the process ends that started it, or closes it. ``own``: not that of who has started this process, for
    what shall see other variables."""

    def __init__(self, kind: str, *, own: bool = False) -> None:
        self._kind, self._own = kind, own
        self.close: Callable[[], None] = lambda: None
        self._environment: dict[str, str] | None = None
        self._directory = ""

    @property
    def variable(self) -> str:
        """Of a program that is to use the forking process of who has started it."""
        return f"RATCHET_TEST_{self._kind.upper()}"

    @property
    def address(self) -> str:
        if self.variable in os.environ and not self._own:
            return os.environ[self.variable]
        if self._environment is None:
            self._start()
        return f"{self._directory}/socket"

    def wait_ready(self) -> None:
        """Return when it has imported what it is to import."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self.address)
            assert connection.recv(32) == b"ready", f"the process that imports for {self._kind} has ended"

    def start(
        self,
        command: Sequence[str],
        log: int,
        *,
        errors: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        agents: str | None = None,
    ) -> Program | subprocess.Popen[bytes]:
        """``command`` in a session of its own, its output into the descriptor ``log``, and ``errors`` where these are apart;
        afresh where it does not fit. ``agents``: the address where a service has its local agents forked."""
        env = os.environ if env is None else env
        errors = log if errors is None else errors
        found = request_fork(self.address, command, log, env, cwd or Path.cwd(), agents, errors)
        if found is None:
            return subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
                start_new_session=True,
            )
        return Program(*found)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """To its end. Raises ``TimeoutExpired``, with the command killed."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            program = self.start(command, out.fileno(), errors=errors.fileno(), env=env, cwd=cwd)
            try:
                code = program.wait(timeout)
            finally:
                program.kill()
            out.seek(0), errors.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), errors.read())

    def _start(self) -> None:
        self._environment = dict(os.environ) | (_OF_RANKS if self._kind != "service" else {})
        if self._kind == "trainer":
            self._environment["PYTHONPATH"] = ROOT
        if self._kind == "mlflow":
            self._environment["MLFLOW_DISABLE_TELEMETRY"] = "true"  # or its import starts a thread
        self._directory = tempfile.mkdtemp(prefix="ratchet-", dir="/tmp")  # the path of a socket may have 107 bytes
        owner, owned = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{self._directory}/socket")
            listener.listen(128)
            padding = "x" * 8192
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(listener.fileno()), str(owner), self._kind, padding],
                env=self._environment | {"PADDING": "x" * _PADDING}, pass_fds=[listener.fileno(), owner],
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        os.close(owner)

        def end() -> None:
            os.close(owned)
            process.wait(30)
            shutil.rmtree(self._directory, ignore_errors=True)
            atexit.unregister(end)

        self.close = atexit.register(end)


SERVICES: Final = Interpreter("service")
RANKS: Final = Interpreter("ranks")
TRAINERS: Final = Interpreter("trainer")
LIBRARIES: Final = Interpreter("libraries")
"""Ranks with what users' scripts import, too: several seconds of a core, for each rank of each attempt."""
MLFLOW: Final = Interpreter("mlflow")
"""MLflow's server: eight seconds of a core, for each."""


def export_fork_server_addresses() -> None:
    """The processes that this one starts from now on use its forking processes, and start none of their own."""
    for interpreter in (SERVICES, RANKS, TRAINERS, LIBRARIES, MLFLOW):
        os.environ[interpreter.variable] = interpreter.address


def request_fork(
    address: str,
    command: Sequence[str],
    log: int,
    env: Mapping[str, str],
    cwd: Path,
    agents: str | None = None,
    errors: int | None = None,
    fds: Sequence[int] = (),
) -> tuple[int, int] | None:
    """Have ``command`` forked: its pid, and the descriptor where its exit code will be read. None: it must be started afresh.
    ``fds``: descriptors that it inherits."""
    net = None
    if Path(command[0]).name == "nsenter" and command[1].startswith("--net=") and command[2] == "--":
        net, command = command[1].removeprefix("--net="), command[3:]
    if command[0] != sys.executable:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        assert connection.recv(32) == b"ready"
        request = {
            "command": list(command),
            "env": dict(env),
            "cwd": str(cwd),
            "agents": agents,
            "net": net,
            "fds": list(fds),
        }
        _send(connection, request, [log, log if errors is None else errors, *fds])
        told = connection.recv(32)
    except OSError:
        told = b""
    if not told.startswith(b"pid "):
        connection.close()
        return None
    return int(told[4:]), connection.detach()


def fork_agent(
    address: str, argv: Sequence[str], env: Mapping[str, str], log: Path | int, fds: Sequence[int] = ()
) -> int | None:
    """The agent's pid, or None where it must be started afresh. ``log``: its place, or a descriptor. ``fds``: inherited."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.dup(log) if isinstance(log, int) else os.open(log, flags, 0o600)
    try:
        found = request_fork(address, argv, descriptor, env, Path.cwd(), fds=fds)
    finally:
        os.close(descriptor)
    if found is None:
        return None
    os.close(found[1])
    return found[0]


def fork_agents(address: str) -> None:
    """Agents that this process's local launchers start are forked by the process at ``address``."""
    from ratchet_service.launchers.local import launcher

    start_afresh = launcher._spawn
    launcher._spawn = lambda argv, env, log, fds=(): (
        fork_agent(address, argv, env, log, fds) or start_afresh(argv, env, log, fds)
    )


def _fork_ranks_of_torchrun(address: str) -> None:
    """What this process's torchrun starts is forked by the process at ``address``."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    start_afresh = SubprocessHandler._popen

    def start(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
        out, errors = (file.fileno() if file else n for n, file in ((1, handler._stdout), (2, handler._stderr)))
        found = request_fork(address, args, out, env, Path.cwd(), errors=errors)
        return start_afresh(handler, args, env) if found is None else Program(*found)

    SubprocessHandler._popen = start  # type: ignore[method-assign]


def _send(connection: socket.socket, request: dict[str, Any], descriptors: Sequence[int]) -> None:
    with os.fdopen(os.memfd_create("request"), "w+b") as file:
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(connection, [b"request"], [file.fileno(), *descriptors])


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    message, descriptors, _, _ = socket.recv_fds(connection, 32, 64)
    if not message:
        return None
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        return json.load(file), descriptors[1:]


# --- the forking process ---------------------------------------------------------------------------------------------------


class _Server:
    """``environment``: what the imports were made in."""

    def __init__(self, listener: int, owner: int, environment: Mapping[str, str]) -> None:
        self._listener = socket.socket(fileno=listener)
        self._owner = owner
        self._connections: dict[int, socket.socket] = {}
        self._children: dict[int, socket.socket] = {}
        self._early, self._environment = _early_variables(environment), environment

    def serve(self) -> list[str]:
        """Returns in each forked process, as that program: its command."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the tests
        while True:
            waiting = select.select([self._listener, self._owner, woken, *self._connections.values()], [], [])[0]
            if self._owner in waiting:
                os._exit(0)
            if woken in waiting:
                os.read(woken, 4096)
                self._collect()
            if self._listener in waiting:
                connection = self._listener.accept()[0]
                self._connections[connection.fileno()] = connection
                with suppress(OSError):
                    connection.send(b"ready")
            for number, connection in list(self._connections.items()):
                if connection in waiting:
                    del self._connections[number]
                    command = self._answer(connection)
                    if command is not None:
                        return command

    def _answer(self, connection: socket.socket) -> list[str] | None:
        received = None
        with suppress(OSError):
            received = _receive(connection)
        if received is None:
            connection.close()
            return None
        request, (log, errors, *inherited) = received
        env = request["env"]
        if _early_variables(env) != self._early or len(_block(env)) > _field_size("environ"):
            with suppress(OSError):
                connection.send(b"afresh")
            connection.close()
            for descriptor in (log, errors, *inherited):
                os.close(descriptor)
            return None
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _die_with(parent)
            set_by_imports = {k: v for k, v in os.environ.items() if self._environment.get(k) != v}
            told, address = connection.detach(), self._listener.getsockname()
            _enter(request["net"])
            for other in (self._listener, *self._connections.values(), *self._children.values()):
                other.detach()  # nobody is to close a number that will be somebody else's
            _become_program(request, log, {2: errors, **dict(zip(request["fds"], inherited, strict=True))}, told)
            if request["agents"] is not None:
                fork_agents(request["agents"])
            command: list[str] = request["command"]
            if _TORCHRUN in command[1:3]:
                _fork_ranks_of_torchrun(address)
            if command[1:4] in _AGENTS and (seconds := request["env"].get("TEST_STEP_SECONDS")):
                _slow_down(float(seconds))
            return (command[1:4] in _AGENTS and _fork_spare_child(self._environment, set_by_imports)) or command
        self._children[pid] = connection
        for descriptor in (log, errors, *inherited):
            os.close(descriptor)
        return None

    def _collect(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._children.pop(pid) as connection, suppress(OSError):
                connection.send(b"%d" % os.waitstatus_to_exitcode(status))


def _slow_down(seconds: float) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: time.sleep(seconds))


def _fork_spare_child(imported_in: Mapping[str, str], set_by_imports: Mapping[str, str]) -> list[str] | None:
    """In an agent, before it begins: fork the child that will be the first process that it starts, a rank or what ranks are
    forked from. It waits until then. Returns its command in that process, and None in the agent."""
    agent, early = os.getpid(), _early_variables(imported_in, _EARLY_BY_TORCH)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _die_with(agent)
        ours.close()
        ignored = [n for n in _IGNORED_MEANWHILE if signal.signal(n, signal.SIG_IGN) is not signal.SIG_IGN]
        received = _receive(theirs)
        if received is None:
            os._exit(0)
        request, (log, *kept) = received
        try:
            numbered = dict(zip(request["numbers"], kept, strict=True))
            _become_program(request | {"ignored": ignored}, log, numbered, theirs.detach())
        except OSError:
            os._exit(1)  # the agent will meet the error itself
        os.environ.update(set_by_imports)
        if (torch := sys.modules.get("torch")) and (threads := request["env"].get("OMP_NUM_THREADS")) is not None:
            torch.set_num_threads(int(threads))
        return list(request["command"])
    theirs.close()
    from ratchet_worker.agent import fork_starter, rank_starter

    spares, start_afresh = [ours], rank_starter.start_process

    def start_process(plan: rank_starter.RankPlan) -> rank_starter.Child:
        if spares:
            with spares.pop() as spare:
                fits = _early_variables(plan.env, _EARLY_BY_TORCH) == early and len(_block(plan.env)) <= _field_size(
                    "environ"
                )
                if fits and plan.command[0] == sys.executable:
                    plan.log.parent.mkdir(parents=True, exist_ok=True)
                    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
                    request = {"command": list(plan.command), "env": dict(plan.env), "cwd": str(plan.cwd), "mask": mask}
                    with plan.log.open("ab") as log, suppress(OSError):
                        _send(spare, request | {"numbers": list(plan.pass_fds)}, [log.fileno(), *plan.pass_fds])
                        if spare.recv(32):
                            return rank_starter.Child(plan.rank, pid)
        return start_afresh(plan)

    fork_starter.start_process = rank_starter.start_process = start_process
    return None


def _become_program(request: dict[str, Any], log: int, kept: Mapping[int, int], told: int) -> None:
    """This process is as if it had just been started: what is told then is its pid. ``kept``: descriptors by the numbers that
    they are to have. Raises ``OSError`` where the directory is not there."""
    os.setsid()
    os.chdir(request["cwd"])
    wanted = {0: os.open(os.devnull, os.O_RDONLY), 1: log, 2: log, **kept}
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 512) for number, fd in wanted.items()}
    told = fcntl.fcntl(told, fcntl.F_DUPFD_CLOEXEC, 512)
    for number in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {told, *high.values()}:
        with suppress(OSError):  # that of the list is closed
            os.close(number)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    signal.set_wakeup_fd(-1)
    for each in signal.valid_signals():
        if callable(signal.getsignal(each)) or each in request.get("ignored", ()):
            signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.get("mask", ()))
    os.environ.clear()
    os.environ.update(request["env"])
    _overwrite_field("cmdline", b"".join(os.fsencode(word) + b"\0" for word in request["command"]))
    _overwrite_field("environ", _block(request["env"]))
    getattr(threading.main_thread(), "_set_native_id", lambda: None)()
    tempfile.tempdir = None
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    os.write(told, b"pid %d" % os.getpid())
    os.close(told)


def _enter(net: str | None) -> None:
    """This process, and what it starts, in the network namespace of that file, as behind ``nsenter --net``."""
    if net is not None:
        with open(net, "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {net}")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _block(env: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())


def _field_bounds(what: str) -> tuple[int, int]:
    """Where ``/proc/self/WHAT`` is read from: fields 48 to 51 of ``/proc/self/stat``."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first = 45 if what == "cmdline" else 47
    return int(fields[first]), int(fields[first + 1])


def _field_size(what: str) -> int:
    begin, end = _field_bounds(what)
    return end - begin


def _overwrite_field(what: str, data: bytes) -> None:
    begin, end = _field_bounds(what)
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, data[: end - begin - 1], min(len(data), end - begin - 1))


def _run(command: list[str]) -> None:
    """As the interpreter would."""
    import runpy

    words = command[1:]
    safe = words[0] == "-P"
    words = words[safe or words[0] == "-u" :]  # of torchrun, where PYTHONUNBUFFERED has been set
    sys.orig_argv = command
    if not safe:
        sys.path.insert(0, str(Path.cwd()) if words[0] == "-m" else str(Path(words[0]).parent))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv = words
        main = sys.modules["__main__"].__dict__
        main |= {"__file__": words[0], "__spec__": None, "__package__": None, "__cached__": None}
        exec(compile(Path(words[0]).read_text(), words[0], "exec"), main)


def _end(code: object) -> NoReturn:
    """As the interpreter would, but for what takes it a third of a second with torch: to take apart what was imported."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def _skip_torch_exit() -> None:
    """Torch takes its operators apart at exit: 0.03 s and more of a core, in every process that ends here."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if finalizer.peek()[1].__module__ == "torch.library":
            finalizer.atexit = False


def main(arguments: Sequence[str]) -> None:
    listener, owner, kind = int(arguments[0]), int(arguments[1]), arguments[2]
    if owner in select.select([listener, owner], [], [])[0]:  # nobody has asked
        return
    environment = dict(os.environ)
    gc.disable()
    for name in _MODULES[kind]:
        with suppress(ModuleNotFoundError):  # libraries need not be there; who needs one will tell
            importlib.import_module(name)
    for name in _RUN_AS_MAIN:
        sys.modules.pop(name, None)
    _skip_torch_exit()
    gc.enable()
    gc.freeze()  # what the collector does not look at, it does not copy
    command = _Server(listener, owner, environment).serve()
    try:
        _run(command)
    except SystemExit as end:
        _end(end.code)
    _end(None)


if __name__ == "__main__":
    # As a module of its own: the program's names will stand here.
    _spec = importlib.util.spec_from_file_location("fork_server", __file__)
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.main(sys.argv[1:])
