"""Which share of the time slots are idle while jobs wait for them: jobs of ten seconds on eight slots.

A job is a script that sleeps (``scripts/stamped_sleep``), on one rank, so that the machine's cores belong to Ratchet. A slot is
*idle* while no job's script is between its first and its last line in it. The time counts from the first start of a script to the
last one: as long as that, a job waits for each idle slot.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from examples.demo.processes import Service, wait_for

SLOTS: Final = 8
SECONDS: Final = 10.0
AIM_IDLE: Final = 0.05
"""With parked agents."""
_DEADLINE: Final = 900.0
_SCRIPT: Final = Path(__file__).with_name("scripts") / "stamped_sleep.py"


def slots(folder: Path, jobs: int) -> None:
    """Print the share of idle slots for ``jobs`` jobs, with cold starts and with parked agents."""
    print(f"\n{jobs} jobs of {SECONDS:g} s on {SLOTS} slots (ideal: {_ideal(jobs):.0f} s)")
    for name, standby in (("cold", "off"), ("standby", f"processes={SLOTS}")):
        with ExitStack() as stack:
            service = Service(folder / name, "--standby", standby, "--cpu-slots", str(SLOTS))
            stack.callback(service.stop)
            service.start()
            if standby != "off":
                park(service, folder / f"{name}-first")
            spans, seconds = _run(service, folder / f"{name}-jobs", jobs)
        share, gaps = idle(spans), sorted(_gaps(spans))
        aim = "" if standby == "off" else f" (aim: at most {AIM_IDLE * 100:.0f} %)"
        print(f"  {name:<8} slots idle {share * 100:.1f} % of the time{aim}; all in {seconds:.0f} s", end="")
        print(f"; from the end of a job to the next start: median {statistics.median(gaps):.2f} s", end="")
        print(f", p99 {gaps[int(len(gaps) * 0.99)]:.2f} s", flush=True)


def submit(service: Service, out: Path, seconds: float) -> Any:
    """Submit a job that writes its stamps into ``out``."""
    return service.client.submit(
        {
            "name": "bench",
            "code": {"path": str(_SCRIPT.parent)},
            "script": [_SCRIPT.name, str(out), str(seconds)],
            "python": sys.executable,
            "world": {"ranks_per_node": 1, "device": "cpu"},
            "resources": {"cpus_per_rank": 1},
        }
    )


def stamps(folder: Path, lines: int) -> list[tuple[float, ...]]:
    """What each job has written that has written at least ``lines`` lines."""
    found = [tuple(map(float, path.read_text().splitlines())) for path in folder.glob("job-*")]
    return [times for times in found if len(times) >= lines]


def park(service: Service, folder: Path) -> None:
    """Run as many jobs as there are slots until an agent is parked for each slot. ``folder`` is made."""
    folder.mkdir()
    jobs = [submit(service, folder / f"job-{number}", 3600.0) for number in range(SLOTS)]
    wait_for("parked agents", lambda: service.count_parked() >= SLOTS, _DEADLINE, service.log)
    for job in jobs:
        service.client.cancel(job.id)
    ended = ("CANCELLED", "FAILED", "SUCCEEDED")
    wait_for("their end", lambda: all(service.client.job(job.id).phase in ended for job in jobs), 60.0, service.log)


def _run(service: Service, folder: Path, jobs: int) -> tuple[list[tuple[float, ...]], float]:
    """First and last line of each job's script, and the seconds from the first submission to the last end."""
    folder.mkdir()
    begin = time.time()
    for number in range(jobs):
        submit(service, folder / f"job-{number}", SECONDS)
    wait_for("all jobs", lambda: len(stamps(folder, 2)) == jobs, _ideal(jobs) * 4 + _DEADLINE, service.log)
    spans = stamps(folder, 2)
    return spans, max(end for _, end in spans) - begin


def _ideal(jobs: int) -> float:
    return -(-jobs // SLOTS) * SECONDS


def idle(spans: Sequence[tuple[float, ...]]) -> float:
    """The share of the slots' time in which no job was in them, from the first start to the last one."""
    first, last = min(start for start, _ in spans), max(start for start, _ in spans)
    busy = sum(min(end, last) - start for start, end in spans)
    return 1.0 - busy / ((last - first) * SLOTS)


def _gaps(spans: Sequence[tuple[float, ...]]) -> list[float]:
    """From each end of a job to the next start, in the order in which slots became free."""
    starts = sorted(start for start, _ in spans)[SLOTS:]
    ends = sorted(end for _, end in spans)
    return [start - end for start, end in zip(starts, ends, strict=False)]
