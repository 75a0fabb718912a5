"""``python -m tests.support.sim_in_memory --n 100000 [--seed 0] [--moves 20] [--mutants]``: so many schedules, and how fast.

What is played depends on the seeds alone, and so does what is printed but for the times: processes share the seeds in portions.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tests.support.sim.stage_pool import arguments, map_in_processes
from tests.support.sim_in_memory.mutants import MUTANTS
from tests.support.sim_in_memory.world import MOVES, Broken, fast, play

_PORTION: Final = 500


@dataclass
class Played:
    """Schedules, one after another. ``broken``: seed and rule of those that broke one; ``told``: the first one's story."""

    schedules: int = 0
    moves: int = 0
    attempts: int = 0
    cpu: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str]] = field(default_factory=list)
    told: str = ""

    def add(self, other: Played) -> None:
        """What came behind."""
        self.schedules += other.schedules
        self.moves += other.moves
        self.attempts += other.attempts
        self.cpu += other.cpu
        self.phases.update(other.phases)
        self.broken += other.broken
        self.told = self.told or other.told


def played(seeds: Iterable[int], moves: int = MOVES) -> Played:
    out, began = Played(), time.process_time()
    with fast():
        for seed in seeds:
            out.schedules += 1
            try:
                done = play(seed, moves=moves)
            except Broken as error:
                out.broken.append((seed, error.what))
                out.told = out.told or str(error)
                continue
            out.moves, out.attempts = out.moves + done.moves, out.attempts + done.attempts
            out.phases.update(phase.value for phase in done.phases)
    out.cpu = time.process_time() - began
    return out


def found_after(seeds: Iterable[int], moves: int = MOVES) -> tuple[int, Broken] | None:
    """How many schedules it took until one was broken; None: none was."""
    for count, seed in enumerate(seeds, 1):
        try:
            play(seed, moves=moves)
        except Broken as error:
            if isinstance(error.__cause__, TypeError | AttributeError):
                raise  # what is planted does not fit the code any more, and its crash shows nothing
            return count, error
    return None


def main() -> int:
    parser = arguments("tests.support.sim_in_memory", "Simulate schedules by seed.", n=100_000, moves=MOVES)
    parser.add_argument("--mutants", action="store_true", help="how many schedules it takes to find each planted fault")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.n)
    return _mutants(seeds, given.moves, given.jobs) if given.mutants else _play(seeds, given.moves, given.jobs)


def _play(seeds: range, moves: int, jobs: int) -> int:
    began, all_ = time.monotonic(), Played()
    portions = [seeds[at : at + _PORTION] for at in range(0, len(seeds), _PORTION)]
    for part in map_in_processes(jobs, partial(played, moves=moves), portions):
        if part.broken and not all_.broken:
            print(part.told, flush=True)
        all_.add(part)
    took = time.monotonic() - began
    for seed, what in all_.broken[1:]:
        print(f"seed {seed}: {what}")
    n = len(seeds)
    print(
        f"{n} schedules, {len(all_.broken)} broken; each {moves} moves of one actor, then rounds until all rests: "
        f"{all_.moves / n:.1f} moves, {sum(all_.phases.values()) / n:.1f} jobs and {all_.attempts / n:.1f} attempts on average; "
        f"jobs ended {dict(sorted(all_.phases.items()))}"
    )
    print(
        f"{took:.1f} s with {jobs} processes ({all_.cpu:.1f} s of CPU): {n / took:.0f} schedules and "
        f"{all_.moves / took:.0f} moves per second; {n / all_.cpu:.0f} schedules per second of CPU"
    )
    return 1 if all_.broken else 0


def _mutants(seeds: range, moves: int, jobs: int) -> int:
    missed = 0
    for name, told in zip(MUTANTS, map_in_processes(jobs, partial(_hunted, seeds, moves), list(MUTANTS)), strict=True):
        missed += told is None
        print(f"{name}: {told or f'not in {len(seeds)} schedules'}", flush=True)
    return 1 if missed else 0


def _hunted(seeds: range, moves: int, name: str) -> str | None:
    with fast(), MUTANTS[name]():
        found = found_after(seeds, moves)
    return None if found is None else f"after {found[0]} schedules: {found[1].what}"


if __name__ == "__main__":
    sys.exit(main())
