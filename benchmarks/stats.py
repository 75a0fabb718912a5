"""What every benchmark tells with its figures: medians with confidence intervals, and the machine they were taken on."""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_RESAMPLES: Final = 4000
_COVERAGE: Final = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median, the 95 % interval around it, and of how many values."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The median of ``values`` with a percentile bootstrap interval (Efron 1979), the same for the same values."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = int(_RESAMPLES * (1 - _COVERAGE) / 2)
    return Estimate(statistics.median(values), medians[tail], medians[-1 - tail], len(values))


def machine() -> str:
    """``2 cores (AMD EPYC), 23 GB, load 0.4; Linux 6.1, Python 3.11.7``: what figures depend on, other users included."""
    model = next((m for m in _cpu_models()), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores ({model}), {memory:.0f} GB, load {os.getloadavg()[0]:.1f}; "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def _cpu_models() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
