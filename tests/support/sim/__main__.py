"""``python -m tests.support.sim --n 10000 [--seed 0] [--postgres] [--jobs 2]``: so many schedules, and how fast they ran."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.support.sim.processes import STORM, Faults, SimDatabase
from tests.support.sim.stage_pool import arguments, map_seeds
from tests.support.sim.world import Broken, play


@dataclass
class Played:
    """A process's share. ``broken``: seed, rule, and what happened."""

    moves: int = 0
    cpu: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str, str]] = field(default_factory=list)


def played(database: SimDatabase, folder: Path, seeds: range, *, steps: int, faults: Faults) -> Played:
    out, began = Played(), time.process_time()
    for seed in seeds:
        try:
            done = play(database, folder, seed, steps=steps, faults=faults)
        except Broken as error:
            out.broken.append((seed, error.what, str(error)))
            continue
        out.moves += done.steps
        out.phases.update(phase.value for phase in done.phases)
    out.cpu = time.process_time() - began
    return out


def main() -> int:
    parser = arguments("tests.support.sim", "Simulate schedules by seed.", n=1000, moves=60)
    parser.add_argument("--storm", action="store_true", help="with many more faults")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    given = parser.parse_args()
    began, seeds = time.monotonic(), range(given.seed, given.seed + given.n)
    do = partial(played, steps=given.moves, faults=STORM if given.storm else Faults())
    shares = map_seeds(given.jobs, do, seeds, postgres=given.postgres)
    took = time.monotonic() - began
    phases = sum((share.phases for share in shares), Counter[str]())
    broken = sorted(one for share in shares for one in share.broken)
    moves, cpu = sum(share.moves for share in shares), sum(share.cpu for share in shares)
    for seed, what, told in broken:
        print(told if seed == broken[0][0] else f"seed {seed}: {what}")
    kind = "PostgreSQL" if given.postgres else "SQLite"
    print(
        f"{given.n} schedules on {kind}, {len(broken)} broken, {moves} moves of one actor; "
        f"jobs ended {dict(sorted(phases.items()))}"
    )
    print(
        f"{took:.1f} s with {given.jobs} processes ({cpu:.1f} s of CPU without a server's): {given.n / took:.1f} schedules "
        f"and {moves / took:.0f} moves per second; {given.n / cpu:.1f} schedules per second of CPU"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
