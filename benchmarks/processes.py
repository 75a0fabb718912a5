"""Jobs and processes for benchmarks: a job watched through its files alone, and what a process has used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from examples.demo.processes import DemoError, Service
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AgentFile, AttemptResult

T = TypeVar("T")
_ROOT: Final = Path(__file__).resolve().parents[1]


def attempt_paths(service: Service, job_id: str, number: int = 1) -> AttemptPaths:
    return HomePaths(service.home).job(job_id).attempt(number)


def until(
    what: str, happened: Callable[[], T | None], seconds: float, attempt: AttemptPaths, period: float = 0.02
) -> T:
    """The first true value of ``happened()``. Raises ``DemoError`` after ``seconds``, or when the attempt fails before."""
    end = time.monotonic() + seconds
    while not (value := happened()):
        result = ended(attempt)
        if result is not None and result.cause is not Cause.COMPLETED:
            raise DemoError(f"waiting for {what}: the job ended with {result.cause}: {result.message}\n{logs(attempt)}")
        if time.monotonic() > end:
            raise DemoError(f"waited {seconds:.0f} s for {what}, in vain\n{logs(attempt)}")
        time.sleep(period)
    return value


def ended(attempt: AttemptPaths) -> AttemptResult | None:
    try:
        return AttemptResult.model_validate_json(attempt.result_file.read_bytes())
    except (OSError, ValidationError):
        return None


def agent_pid(attempt: AttemptPaths) -> int:
    return AgentFile.model_validate_json(attempt.agent_file.read_bytes()).pid


def logs(attempt: AttemptPaths) -> str:
    """The ends of the attempt's logs, for messages."""
    found = sorted(attempt.root.glob("**/*.log"))
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in found)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, its ended children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_shares(pids: Mapping[str, int], during: Callable[[], Any]) -> dict[str, float]:
    """CPU seconds per second that each process used while ``during`` ran."""
    before, begin = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    during()
    spent = time.monotonic() - begin
    return {name: (cpu_seconds(pid) - before[name]) / spent for name, pid in pids.items()}


def group_result(module: str, world: int, arguments: Mapping[str, object], deadline: float = 600.0) -> dict[str, Any]:
    """What the ranks of ``python -m module`` wrote: processes of one thread each, without a service and an agent.

    They are told the file of their rendezvous (``--store``), who they are (``--rank``, ``--world``), and where the result goes
    (``--out``). Raises ``DemoError`` when one fails, ``subprocess.TimeoutExpired`` after ``deadline`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        out = Path(folder) / "result.json"
        told = {"world": world, "store": Path(folder) / "store", **arguments, "out": out}
        command = [sys.executable, "-m", module]
        command += [str(part) for key, value in told.items() for part in (f"--{key}", value)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], cwd=_ROOT, env=variables) for rank in range(world)]
        try:
            if codes := [code for rank in ranks if (code := rank.wait(deadline))]:
                raise DemoError(f"{' '.join(command)}: a rank ended with {codes[0]}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        result: dict[str, Any] = json.loads(out.read_text())
        return result
