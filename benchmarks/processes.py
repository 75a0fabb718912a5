"""Jobs and processes for benchmarks: a job watched through its files alone, and what a process has used."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from examples.demo.processes import DemoError, Service
from ratchet_contract.messages import AgentFile, AttemptResult
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.phases import Cause

T = TypeVar("T")


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
