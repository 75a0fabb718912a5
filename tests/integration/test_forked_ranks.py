"""Ranks that are forked from one process: each is as if it had been started by itself, and whatever ends that process early ends
the attempt, with nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract import environment as names
from ratchet_contract.phases import Cause
from ratchet_worker.procs import has_variable
from tests.support.launch import Attempt, Job
from tests.support.server import processes_below, rank_pid, wait_for

FACTS = """
import json, os, random, resource, signal, sys
import numpy, torch
facts = {
    "variables": dict(os.environ),
    "leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "the agent's": os.getppid() == int(os.environ["RATCHET_AGENT_PID"]),
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd")[:-1]),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "handlers": {n: getattr(h := signal.getsignal(n), "__qualname__", str(h)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)},
    "threads": sorted(open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")),
    "name": open("/proc/self/comm").read(), "directory": os.getcwd(), "arguments": sys.argv, "path": sys.path,
    "hash": hash("ratchet"), "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "mask": os.umask(0o22),
    "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
    "set": [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.cuda.is_available()],
}
print("facts", json.dumps(facts))
"""
# The site module of an interpreter that an agent's fork server runs in: a thread that an import leaves behind.
THREAD = f"""
import os, threading
if "{names.FORK_PLANS_FD}" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
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
    job = Job(tmp_path / "home", {"task": task, "checkpoint": {"every_steps": None}})
    yield job.launch()
    job.close()


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


def test_a_forked_rank_is_like_one_that_was_started_by_itself(tmp_path: Path, code: Path) -> None:
    env = {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1", "SOME": "thing"}
    spec: dict[str, Any] = {"script": ["facts.py", "--an", "argument"], "code": {"path": str(code)}, "env": env}
    job = Job(tmp_path / "home", spec, code)
    try:
        attempt = job.launch()
        alone = _facts(attempt)
        assert "an import has left 1 threads running" in attempt.paths.log(0).read_text()
        (tmp_path / "site" / "sitecustomize.py").unlink()
        attempt = job.launch()
        forked = _facts(attempt)
        assert "threads running" not in attempt.logs()
    finally:
        job.close()
    for rank in range(2):
        for facts, epoch in ((alone[rank], 1), (forked[rank], 2)):
            text = json.dumps(facts).replace(f"attempts/{epoch:04d}", "attempts/N")
            facts.update(json.loads(text))
            if rank == 0:  # it serves the store: to as many as have come so far
                facts["descriptors"] = [name for name in facts["descriptors"] if name not in ("socket", "anon_inode")]
            for name in ("RATCHET_EPOCH", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RATCHET_STORE_FD"):
                facts["variables"].pop(name, None)
        assert forked[rank] == alone[rank]
        assert forked[rank]["leader"] and forked[rank]["the agent's"] and forked[rank]["name"] == f"rank-{rank}\n"
        assert forked[rank]["variables"]["SOME"] == "thing" and forked[rank]["blocked"] == []


def test_ranks_share_what_was_imported_and_die_with_their_agent(attempt: Attempt) -> None:
    attempt.wait_step(1)
    pids = [attempt.pid(rank) for rank in range(2)]
    assert pids == [rank_pid(attempt.paths, rank) for rank in range(2)]
    # Forked, not executed: their environment is the server's, which has itself gone.
    assert sorted(pid for pid in processes_below(attempt.paths.root) if pid != attempt.agent.pid) == sorted(pids)
    assert all(has_variable(pid, b"WORLD_SIZE=2") and not has_variable(pid, b"RANK=0") for pid in pids)
    attempt.agent.kill()
    wait_for(lambda: not processes_below(attempt.paths.root), "the ranks to die", 10)


def test_what_ends_the_server_ends_the_attempt(attempt: Attempt) -> None:
    os.kill(_server(attempt), signal.SIGKILL)
    result = attempt.wait()
    assert (result.cause, [end.exit_code for end in result.ranks]) == (Cause.RANK_KILLED, [-9, -9]), attempt.logs()
    assert processes_below(attempt.paths.root) == []


def test_a_stop_that_only_the_server_is_told_of_stops_the_job(attempt: Attempt) -> None:
    os.kill(_server(attempt), signal.SIGTERM)
    result = attempt.wait()
    assert result.cause is Cause.SIGTERM and result.last_step < 30, attempt.logs()


def test_an_agent_that_is_killed_takes_the_server_with_it(attempt: Attempt) -> None:
    server = _server(attempt)
    os.kill(server, signal.SIGSTOP)  # nothing that it might do itself ends it
    attempt.agent.kill()
    wait_for(lambda: not processes_below(attempt.paths.root), "the server to die", 10)
