"""Real attempts for a tenth of their price: agent and ranks are forked from one process that has imported torch.

The agent's and the ranks' own code runs, from ``agent.run`` and ``rank.main`` on, with the plan's variables, descriptors, log,
session and life. What differs from a job's: no interpreter is started, for the agent nor for the ranks.

    with Warm() as warm:
        job = WarmJob(warm, home, spec, code)      # see tests.support.launch

``slow``: as long as this file exists, every ``os.fsync`` of what is forked waits: a disk that does not answer.
``disk``: a directory that is a small tmpfs for all that is forked, in a mount namespace of their own; what they see there is
found at ``warm.seen(path)``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import AttemptPaths
from ratchet_worker.agent.rank_starter import Child, RankPlan, RankProcess
from ratchet_worker.host.cpu import gc_disabled
from tests.support.launch import Job

ROOT = Path(__file__).parents[2]


class Agent:
    """What ``subprocess.Popen`` would be, of a process that is somebody else's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._pidfd)  # a thousand kills have three thousand of them

    def poll(self) -> int | None:
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("agent", timeout)
        return 0

    def ranks(self) -> dict[int, int]:
        """Pids of the ranks that have begun, by rank. (Their variables are not to be seen from outside: nothing was executed.)"""
        with suppress(OSError):
            found = {}
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                with suppress(OSError):
                    name, _, rank = Path(f"/proc/{pid}/comm").read_text().strip().partition("-")
                    found |= {int(rank): int(pid)} if name == "rank" else {}
            return found
        return {}

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class AttemptForkServer:
    """The process that is forked from."""

    def __init__(self, disk: Path | None = None, size: str = "16m", slow: Path | None = None) -> None:
        command = [sys.executable, "-m", "tests.support.forked_attempts", *([str(slow)] if slow is not None else [])]
        if disk is not None:
            if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
                pytest.skip("needs root and mount namespaces")
            mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, str(disk), *command]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._read() == "ready"

    def __enter__(self) -> AttemptForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def visible_path(self, path: Path) -> Path:
        """``path`` as the forked processes see it."""
        return Path(f"/proc/{self._process.pid}/root{path}")

    def run_in_mount_namespace(self, *arguments: str) -> str:
        """``run_in_mount_namespace``, ``umount`` or the like, where the forked processes live; returns what it prints."""
        enter = ["nsenter", "--mount", f"--target={self._process.pid}"]
        return subprocess.run([*enter, *arguments], check=True, capture_output=True, text=True).stdout

    def start(self, launch_file: Path, log: Path, limits: dict[int, int]) -> Agent:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(launch_file), str(log), list(limits.items())]) + "\n")
        self._process.stdin.flush()
        return Agent(int(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class ForkedJob(Job):
    """``limits``: resource limits of the next attempts' processes (``resource.RLIMIT_...``)."""

    def __init__(
        self, warm: AttemptForkServer, home: Path, spec: dict[str, Any], code: Path | None = None, **options: Any
    ) -> None:
        super().__init__(home, spec, code, **options)
        self._warm = warm
        self.limits: dict[int, int] = {}

    def start_agent(self, paths: AttemptPaths) -> Any:
        return self._warm.start(paths.launch_file, paths.agent_log, self.limits)


class _Starter:
    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        for plan in plans:
            plan.log.parent.mkdir(parents=True, exist_ok=True)
            pid = os.fork()
            if pid == 0:
                _run_and_exit(_rank, plan)
            yield Child(plan.rank, pid)


def _rank(plan: RankPlan) -> int:
    from ratchet_worker.rank import main as rank

    os.setsid()
    os.chdir(plan.cwd)
    _log_to(plan.log)
    kept = sorted({0, 1, 2, *plan.pass_fds})
    for low, high in zip(kept, [*kept[1:], 65536], strict=True):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(plan.env)
    return rank.main()


def _agent(parent: int, launch_file: str, log: str, limits: list[tuple[int, int]]) -> int:
    import resource

    from ratchet_worker.agent import main as agent
    from ratchet_worker.ipc import child_processes

    child_processes.die_with_parent(parent)  # which ends with the test, however that does; an agent's own would live on
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _log_to(Path(log))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for which, value in limits:
        resource.setrlimit(which, (value, resource.getrlimit(which)[1]))
    return agent.run(Path(launch_file), _Starter())


def _run_and_exit(act: Any, *arguments: Any) -> None:
    """Be this, and nothing else, until the end of the process."""
    import traceback

    code = 1
    try:
        code = act(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _log_to(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _slow_down(while_there: Path) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        while "/step-" in str(Path(f"/proc/self/fd/{fd}").readlink()) and while_there.exists():
            time.sleep(0.005)
        real(fd)

    os.fsync = fsync


def main() -> None:
    with gc_disabled():
        for module in ("torch._dynamo", "ratchet_worker.agent.main", "ratchet_worker.rank.rank_process"):
            importlib.import_module(module)
    gc.freeze()
    if sys.argv[1:]:
        _slow_down(Path(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # agents collect themselves
    print("ready", flush=True)
    parent = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run_and_exit(_agent, parent, *json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
