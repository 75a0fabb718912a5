"""A checkpoint at every step of the built-in task ``bytelm`` on two ranks, beside the same job without any until its end."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.checkpoint_jobs import SCRIPTS
from benchmarks.processes import attempt_paths, ended, until
from benchmarks.stats import estimate
from examples.demo.processes import Service, spool

RANKS: Final = 2
STEPS: Final = 120
_SKIPPED: Final = 10  # steps at the start, in which memory is still being taken
_DEADLINE: Final = 300.0  # seconds, for one job


@dataclass(frozen=True)
class Job:
    """``steps``: seconds of each; ``cpu``: processor seconds of rank 0; ``saves``: those that Ratchet reports, from
    the boundary to the commit; ``nbytes``: of the last checkpoint."""

    steps: list[float]
    cpu: float
    saves: list[float]
    nbytes: int


def table(service: Service, folder: Path, pairs: int, title: str = "bytelm", **arguments: Any) -> None:
    """``pairs`` of jobs, the one and the other first by turns. ``arguments``: of the task."""
    jobs: dict[int | None, list[Job]] = {1: [], None: []}
    for number in range(pairs):
        for every in (1, None) if number % 2 == 0 else (None, 1):
            jobs[every].append(_run(service, folder, every, {"steps": STEPS, **arguments}))
    both = list(zip(jobs[1], jobs[None], strict=True))
    ratios = [sum(with_saves.steps) / sum(without.steps) for with_saves, without in both]
    medians = [statistics.median(with_saves.steps) / statistics.median(without.steps) for with_saves, without in both]
    cpu = [with_saves.cpu / without.cpu for with_saves, without in both]
    print(_line("", "all steps, ratio", "median step, ratio", "of CPU time", "ms", "without", "save, ms", "MB"))
    saving, without, seconds = (
        f"{1e3 * statistics.median(values):.1f}"
        for values in (
            [s for job in jobs[1] for s in job.steps],
            [s for job in jobs[None] for s in job.steps],
            [s for job in jobs[1] for s in job.saves],
        )
    )
    found = (str(estimate(values)) for values in (ratios, medians, cpu))
    print(_line(title, *found, saving, without, seconds, f"{jobs[1][0].nbytes / 1e6:.1f}"), flush=True)


def _line(title: str, ratio: str, median: str, cpu: str, saving: str, without: str, seconds: str, size: str) -> str:
    return f"{title:<24} {ratio:<22} {median:<22} {cpu:<22} {saving:>7} {without:>8} {seconds:>9} {size:>6}"


def _run(service: Service, folder: Path, every: int | None, arguments: dict[str, Any]) -> Job:
    place = Path(tempfile.mkdtemp(dir=folder))
    out = place / "steps.json"
    spec = {
        "name": "bench-every-step",
        "code": {"path": str(SCRIPTS)},
        "task": {"entrypoint": "every_step:Timed", "args": {"out": str(out), **arguments}},
        "world": {"ranks_per_node": RANKS, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "checkpoint": {"every_steps": every, "keep_last": 2},
    }
    job = service.client.submit(spec)
    attempt = attempt_paths(service, job.id)
    try:
        until("the last step", out.exists, _DEADLINE, attempt)
        until("the job to end", lambda: ended(attempt), _DEADLINE, attempt)
        times, cpu = zip(*json.loads(out.read_text())[_SKIPPED:], strict=True)
        saves = [message for message in spool(attempt, 0) if message["kind"] == "checkpoint"]
        due = [save["seconds"] for save in saves if save["reason"] == "schedule"]
        steps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Job(steps, cpu[-1] - cpu[0], due, saves[-1]["size"])
    finally:
        service.client.cancel(job.id)
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(attempt.root.parents[1] / "checkpoints", ignore_errors=True)
