"""Ranks that are forked from one process: each is as if it had been started by itself, and whatever ends that process early ends
the attempt, with nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from ratchet_contract import env_vars as names
from ratchet_contract.phases import Cause
from ratchet_contract.processes import procfs
from ratchet_worker.agent.fork_starter import ForkingStarter
from ratchet_worker.agent.rank_starter import Child, RankPlan, RankProcess
from ratchet_worker.ipc import child_processes
from ratchet_worker.ipc.group_abort import ABORT_SIGNAL
from tests.support.launch import Attempt, Job
from tests.support.server import processes_below, rank_pid, wait_for

FACTS = """
import json, os, random, resource, signal, sys, threading
import numpy, torch

def target(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
    except FileNotFoundError:  # that of the listing, or of another thread
        return None

facts = {
    "variables": dict(os.environ),
    "leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "the agent's": os.getppid() == int(os.environ["RATCHET_AGENT_PID"]),
    "descriptors": sorted(filter(None, map(target, os.listdir("/proc/self/fd")))),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "handlers": {n: getattr(h := signal.getsignal(n), "__qualname__", str(h)) for n in (2, 15, 17)},
    "main thread": threading.main_thread().native_id == os.getpid(),
    "threads": sorted(open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")),
    "name": open("/proc/self/comm").read(), "directory": os.getcwd(), "arguments": sys.argv, "path": sys.path,
    "hash": hash("ratchet"), "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "mask": os.umask(0o22),
    "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    "set": [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.cuda.is_available()],
}
print("facts", json.dumps(facts))
"""
# A server that tells of two processes as ranks when it is let, and then ends or stops.
TELLS = f"""
import os, signal, sys
os.read(int(sys.argv[1]), 1)
os.write(int(os.environ["{names.FORK_REPORT_FD}"]), sys.argv[2].encode())
os.kill(os.getpid(), signal.SIGCONT if sys.argv[3] == "ends" else signal.SIGSTOP)
"""
# A server that may not fork another rank when it has forked one.
LIMITED = """
import os
from ratchet_worker.rank import fork_server
server, forks, fork = os.getpid(), [], os.fork
def limited():
    forks.append(0)
    if os.getpid() == server and len(forks) == 3:  # the first shows that it can be forked
        raise BlockingIOError("no more processes")
    return fork()
os.fork = limited
fork_server.fork_ranks()
"""
# What a site does to every interpreter's variables.
SITE = """
import os
os.environ["SOME"] += ", changed"
os.environ.pop("OTHER", None)
"""
# The same, and in an agent's fork server a thread that an import leaves behind.
THREAD = f"""{SITE}
import threading
if "{names.FORK_PLANS_FD}" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


# Training whose last words are in buffers and exit handlers when the script ends.
LAST_WORDS = """
import atexit, ctypes, os, threading, torch, zipfile, kept
from ratchet import Session
class Prints:
    def __del__(self): os.write(1, b"destructor\\n")
prints = Prints()
started = threading.Event()
file = open(f"own-{os.environ['RANK']}.txt", "w")
archive = zipfile.ZipFile(f"{os.environ['RANK']}.zip", "w")
def train(s):  # Ratchet looks for state in what it uses
    net = torch.nn.Linear(2, 1)
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    s.register(optimizer=optimizer)
    for step in s.steps(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        started.set()
with Session() as s:
    train(s)
kept.file.write("last words")
file.write("last words")
archive.writestr("last", "words")
atexit.register(lambda: print("exit handler of Python after step", Session().step))
c = ctypes.CDLL(None)
c.strdup.restype = ctypes.c_void_p
c.__cxa_atexit(c.puts, ctypes.c_void_p(c.strdup(b"exit handler of C")), None)
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "facts.py").write_text(FACTS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(THREAD)
    return code


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    task = {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"evaluate": False}}
    job = Job(tmp_path / "home", {"task": task, "checkpoint": {"every_steps": None}}, afresh=True)
    yield job.launch()
    job.close()


def _starting(tmp_path: Path, server: Sequence[str], fds: Sequence[int] = ()) -> list[RankProcess]:
    """Two ranks of a server that runs ``server``, a program and its arguments, and imports nothing."""
    env = os.environ | {names.AGENT_PID: str(os.getpid())}
    command = [sys.executable, "-c", *server]
    plans = [RankPlan(n, command, tmp_path, env | {names.RANK: str(n)}, tmp_path / f"{n}.log", fds) for n in range(2)]
    return list(ForkingStarter([]).start(plans))


def _server(attempt: Attempt) -> int:
    """The pid of the process that ranks will be forked from, when it is past the interpreter's own start."""
    found: list[int] = []

    def there() -> bool:
        for pid in processes_below(attempt.paths.root):
            with suppress(OSError):
                if b"RATCHET_FORK_PLANS_FD=" not in Path(f"/proc/{pid}/environ").read_bytes():
                    continue
                (blocked,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
                if int(blocked, 16) & 1 << signal.SIGTERM - 1:
                    found[:] = [pid]
        return bool(found)

    wait_for(there, "the fork server", 30, 0.002)
    assert "is process" not in attempt.paths.agent_log.read_text()  # no rank yet
    return found[0]


def _facts(attempt: Attempt) -> list[dict[str, Any]]:
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    found = []
    for rank in range(2):
        (line,) = re.findall(r"^facts (.*)$", attempt.paths.log(rank).read_text(), re.MULTILINE)
        facts = json.loads(line)
        facts["variables"] = {
            k: v for k, v in facts["variables"].items() if k not in ("MASTER_PORT", "RATCHET_AGENT_PID")
        }
        found.append(facts)
    return found


def test_forked_rank_has_same_environment_as_a_directly_started_rank(tmp_path: Path, code: Path) -> None:
    env = {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1", "SOME": "thing", "OTHER": "thing"}
    spec: dict[str, Any] = {"script": ["facts.py", "--an", "argument"], "code": {"path": str(code)}, "env": env}
    job = Job(tmp_path / "home", spec, code)
    try:
        attempt = job.launch()
        alone = _facts(attempt)
        assert "an import has left 1 threads running" in attempt.paths.log(0).read_text()
        (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
        attempt = job.launch()
        forked = _facts(attempt)
        assert "threads running" not in attempt.logs()
    finally:
        job.close()
    for rank in range(2):
        for facts, epoch in ((alone[rank], 1), (forked[rank], 2)):
            text = json.dumps(facts).replace(f"attempts/{epoch:04d}", "attempts/N")
            facts.update(json.loads(text))
            # torch.distributed.nn of torch 2.9 adds a temporary directory when it is imported.
            facts["path"] = [entry for entry in facts["path"] if not re.fullmatch(r"/tmp/tmp\w+", entry)]
            if rank == 0:  # it serves the store: to as many as have come so far
                facts["descriptors"] = [name for name in facts["descriptors"] if name not in ("socket", "anon_inode")]
            for name in ("RATCHET_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RATCHET_STORE_FD"):
                facts["variables"].pop(name, None)
        assert forked[rank] == alone[rank]
        assert forked[rank]["leader"] and forked[rank]["the agent's"] and forked[rank]["name"] == f"rank-{rank}\n"
        variables = forked[rank]["variables"]
        assert (variables["SOME"], variables.get("OTHER"), forked[rank]["blocked"]) == (
            "thing, changed",
            None,
            [ABORT_SIGNAL],
        )


def test_forked_rank_ends_without_taking_torch_apart_and_loses_nothing_that_it_has_written(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(LAST_WORDS)
    (code / "kept.py").write_text('import os\nfile = open(f"{os.environ[\'RANK\']}.txt", "w")\n')
    job = Job(tmp_path / "home", {"script": ["train.py"], "code": {"path": str(code)}}, code)
    try:
        attempt = job.launch()
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        for rank in range(2):
            log = attempt.paths.log(rank).read_text()
            assert (
                "exit handler of Python after step 2" in log
                and "\ndestructor\n" in log
                and "exit handler of C" not in log
            )
            assert (job.paths.work_dir / f"{rank}.txt").read_text() == "last words"
            assert (job.paths.work_dir / f"own-{rank}.txt").read_text() == "last words"
            assert ZipFile(job.paths.work_dir / f"{rank}.zip").read("last") == b"words"
    finally:
        job.close()


def test_rank_in_an_interpreter_of_its_own_loses_no_text_that_its_script_has_written(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(LAST_WORDS)
    (code / "kept.py").write_text('file = open("0.txt", "w")\n')
    world = {"ranks_per_node": 1, "device": "cpu"}
    job = Job(
        tmp_path / "home", {"script": ["train.py"], "code": {"path": str(code)}, "world": world}, code, afresh=True
    )
    try:
        attempt = job.launch()
        assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
        log = attempt.paths.log(0).read_text()
        assert "exit handler of Python after step 2" in log and "\ndestructor\n" in log and "exit handler of C" in log
        for name in ("0.txt", "own-0.txt"):
            assert (job.paths.work_dir / name).read_text() == "last words"
    finally:
        job.close()


def test_forked_ranks_die_with_their_agent(attempt: Attempt) -> None:
    attempt.wait_step(1)
    pids = [attempt.pid(rank) for rank in range(2)]
    assert pids == [rank_pid(attempt.paths, rank) for rank in range(2)]
    # Forked, not executed: their environment is the server's, which has itself gone.
    assert sorted(pid for pid in processes_below(attempt.paths.root) if pid != attempt.agent.pid) == sorted(pids)
    assert all(
        (procfs.environment_variable(pid, "WORLD_SIZE"), procfs.environment_variable(pid, "RANK")) == ("2", None)
        for pid in pids
    )
    attempt.agent.kill()
    wait_for(lambda: not processes_below(attempt.paths.root), "the ranks to die", 10)


def test_killed_fork_server_ends_the_attempt(attempt: Attempt) -> None:
    os.kill(_server(attempt), signal.SIGKILL)
    result = attempt.wait()
    assert (result.cause, [end.exit_code for end in result.ranks]) == (Cause.RANK_KILLED, [-9, -9]), attempt.logs()
    assert processes_below(attempt.paths.root) == []


def test_sigterm_to_fork_server_stops_the_job(attempt: Attempt) -> None:
    os.kill(_server(attempt), signal.SIGTERM)
    result = attempt.wait()
    assert result.cause is Cause.SIGTERM and result.last_step < 30, attempt.logs()


def test_killed_agent_ends_a_stopped_fork_server(attempt: Attempt) -> None:
    server = _server(attempt)
    os.kill(server, signal.SIGSTOP)  # nothing that it might do itself ends it
    attempt.agent.kill()
    wait_for(lambda: not processes_below(attempt.paths.root), "the server to die", 10)


@pytest.mark.parametrize("then", ["ends", "stops"])
def test_ended_fork_server_is_not_mistaken_for_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    go, let = os.pipe()
    children = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2)]
    told = "".join(f"{rank} {child.pid}\n" for rank, child in enumerate(children))
    ranks = _starting(tmp_path, [TELLS, str(go), told, then], [go])
    server, look, codes = ranks[0].pid, Child.exit_code, list[int | None]()

    def late(self: Child) -> int | None:
        """It tells, and ends or stops, between the look at what it has told and the look at itself."""
        if self.pid == server:
            os.write(let, b"\0")
            os.waitid(os.P_PID, server, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        return look(self)

    monkeypatch.setattr(Child, "exit_code", late)
    agent = threading.Thread(target=lambda: codes.extend(rank.exit_code() for rank in ranks), daemon=True)
    agent.start()
    agent.join(5)
    os.kill(server, signal.SIGKILL)
    try:
        assert codes == [None, None] and [rank.pid for rank in ranks] == [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
        os.waitpid(server, 0)
        os.close(go)
        os.close(let)


def test_fork_failure_reason_is_in_the_log_of_the_rank(tmp_path: Path) -> None:
    ranks = _starting(tmp_path, [LIMITED])
    wait_for(lambda: ranks[1].exit_code() is not None, "the server to end", 10)
    assert ranks[1].exit_code() == 1 and "no more processes" in (tmp_path / "1.log").read_text()
    assert (tmp_path / "0.log").read_text() == ""
    ranks[1].reap()


def test_reap_orphans_does_not_reap_a_rank_of_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(procfs, "pids", lambda: iter([child.pid]))

    def ranks() -> set[int]:  # as they are known before this one is
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return set()

    child_processes.reap_orphans(ranks)
    assert child.wait() == -signal.SIGKILL
