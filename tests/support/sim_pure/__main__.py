"""``python -m tests.support.sim_pure --n 100000 [--seed 0] [--moves 20] [--mutants]``: so many schedules, and how fast."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.support.sim_pure.mutants import MUTANTS
from tests.support.sim_pure.world import MOVES, Broken, fast, play


def found_after(seeds: Iterable[int], moves: int = MOVES) -> tuple[int, Broken] | None:
    """How many schedules it took until one was broken; None: none was."""
    for count, seed in enumerate(seeds, 1):
        try:
            play(seed, moves=moves)
        except Broken as error:
            return count, error
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.sim_pure", description="Simulate schedules by seed.")
    parser.add_argument("--n", type=int, default=100_000, help="schedules (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=MOVES, help="moves before the faults stop (default: %(default)s)")
    parser.add_argument("--mutants", action="store_true", help="how many schedules it takes to find each planted fault")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.n)
    with fast():
        return _mutants(seeds, given.moves) if given.mutants else _play(seeds, given.moves)


def _play(seeds: range, steps: int) -> int:
    phases: Counter[str] = Counter()
    moves, attempts, broken, began = 0, 0, 0, time.process_time()
    for seed in seeds:
        try:
            done = play(seed, moves=steps)
        except Broken as error:
            broken += 1
            print(error if broken == 1 else f"seed {error.seed}: {error.what}", flush=True)
            continue
        moves, attempts = moves + done.moves, attempts + done.attempts
        phases.update(phase.value for phase in done.phases)
    cpu = time.process_time() - began
    print(
        f"{len(seeds)} schedules, {broken} broken, {moves} moves, {attempts} attempts in {cpu:.1f} s of CPU: "
        f"{len(seeds) / cpu:.0f} schedules and {moves / cpu:.0f} moves per second; jobs ended {dict(phases)}"
    )
    return 1 if broken else 0


def _mutants(seeds: range, steps: int) -> int:
    missed = 0
    for name, mutant in MUTANTS.items():
        with mutant():
            found = found_after(seeds, steps)
        missed += found is None
        told = f"not in {len(seeds)} schedules" if found is None else f"after {found[0]} schedules: {found[1].what}"
        print(f"{name}: {told}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
