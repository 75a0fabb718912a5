"""Faults at random times: the service, agents and ranks are killed again and again; no job is lost, none runs twice.

``python -m tests.e2e.chaos --n 100`` injects N faults into a stream of small jobs through the real service, agents and launcher.
The ranks are the torch-free trainer of ``tests.support.trainer``, which commits real checkpoints: this is about supervision, the
bits are ``tests.e2e.exactness``'s. The invariants, checked over the database at the end:

- every job has ended, SUCCEEDED or (three attempts in a row without a new step) FAILED with reason no-progress;
- steps executed = steps of the job + steps lost, over all attempts of each job that succeeded;
- every attempt began at the newest committed step of its lineage, and no two attempts of a job overlap in time;
- nothing of the run directory is alive.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ratchet_contract.phases import JobPhase
from ratchet_service.database import Database, sqlite_url
from ratchet_service.migrate import upgrade
from ratchet_service.models import Attempt
from tests.support.plane import Plane
from tests.support.server import agent_pid, processes_below

STEPS = 60


class Chaos:
    """``faults`` faults into jobs that are submitted as long as faults are left, at most ``width`` at a time."""

    def __init__(self, plane: Plane, faults: int, seed: int, width: int = 3) -> None:
        self.plane, self.faults, self.width = plane, faults, width
        self.rng = random.Random(seed)
        self.jobs: list[str] = []
        self.done: Counter[str] = Counter()
        self.service = plane.start_process()

    def run(self) -> list[str]:
        """Inject all faults, let every job end; the breaches found, one sentence each."""
        while self.done.total() < self.faults:
            self._fill()
            time.sleep(self.rng.uniform(0.05, 0.6))
            self._strike()
        for job_id in self.jobs:
            self.plane.wait_job(job_id, lambda job: job.phase.terminal, "ended", 120)
        return [breach for job_id in self.jobs for breach in self._breaches(job_id)]

    def _fill(self) -> None:
        running = [j for j in self.jobs if not self.plane.job(j).phase.terminal]
        for _ in range(self.width - len(running)):
            self.jobs.append(
                self.plane.submit({"steps": STEPS, "every": 10, "pause": 0.03}, policy={"max_failures": 50})
            )

    def _strike(self) -> None:
        kind = self.rng.choice(("service", "agent", "rank"))
        if kind == "service":
            self.service.kill()
            self.service.wait(10)
            time.sleep(self.rng.uniform(0, 0.5))
            self.service = self.plane.start_process()
            self.done[kind] += 1
            return
        for job_id in self.rng.sample(self.jobs, len(self.jobs)):
            job = self.plane.job(job_id)
            if job.phase.active and self._kill(kind, job_id, job.epoch):
                self.done[kind] += 1
                return

    def _kill(self, kind: str, job_id: str, epoch: int) -> bool:
        """False when there was nothing to kill yet or any more."""
        paths = self.plane.attempt_paths(job_id, epoch)
        with suppress(OSError, ValueError):
            pid = agent_pid(paths)
            if pid not in processes_below(self.plane.settings.home):
                return False
            victims = [pid] if kind == "agent" else _children(pid)
            for victim in victims[:1]:
                os.kill(victim, signal.SIGKILL)
                return True
        return False

    def _breaches(self, job_id: str) -> list[str]:
        job, attempts = self.plane.job(job_id), self.plane.attempts(job_id)
        out = [f"{job_id}: {text}" for text in _overlaps(attempts)]
        if job.phase is JobPhase.FAILED and job.reason == "no-progress":
            return out
        if job.phase is not JobPhase.SUCCEEDED:
            return [*out, f"{job_id}: {job.phase} {job.reason}: {job.message}"]
        executed = sum(a.last_step - (a.base_step or 0) for a in attempts)
        lost = sum(a.steps_lost or 0 for a in attempts)
        if executed != STEPS + lost:
            out.append(f"{job_id}: {executed} steps executed, {STEPS} wanted + {lost} lost")
        safe = 0
        for attempt in attempts:
            if attempt.base_step is not None and attempt.base_step != safe:
                out.append(f"{job_id}: attempt {attempt.number} began at {attempt.base_step}, {safe} was committed")
            safe = max(safe, attempt.committed_step or 0)
        return out


def _children(pid: int) -> list[int]:
    """An agent's ranks."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _overlaps(attempts: list[Attempt]) -> list[str]:
    pairs = itertools.pairwise(attempts)
    return [
        f"attempts {a.number} and {b.number} overlap" for a, b in pairs if not a.ended_at or b.created_at < a.ended_at
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20, help="faults to inject")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-chaos-") as home:
        database = Database(sqlite_url(Path(home) / "ratchet.db"))
        upgrade(database)
        plane = Plane(Path(home), database)
        try:
            chaos = Chaos(plane, arguments.n, arguments.seed)
            breaches = chaos.run()
        finally:
            plane.close()
            database.dispose()
    print(
        f"{chaos.done.total()} faults ({', '.join(f'{n} x {k}' for k, n in chaos.done.items())}), {len(chaos.jobs)} jobs"
    )
    for breach in breaches:
        print(f"  {breach}")
    print(f"{len(breaches)} breaches: " + ("every job kept" if not breaches else "FAILED"))
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
