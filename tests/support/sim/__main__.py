"""``python -m tests.support.sim [--n 1000] [--seed 0] [--storm] [--postgres]`` plays schedules; ``--mutants`` plants faults."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.support.sim.directed import DIRECTED, NEEDS_POSTGRES
from tests.support.sim.mutants import MUTANTS
from tests.support.sim.processes import STORM, Faults, SimDatabase
from tests.support.sim.stage_pool import CORES, map_on_stages
from tests.support.sim.world import MOVES, Broken, play


@dataclass
class Played:
    """The schedules of one process. ``broken``: seed, rule and story of each that has broken one."""

    moves: int = 0
    cpu: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """How a planted fault was looked for. ``what``: the rule that it has broken; None: it was not found."""

    name: str
    schedules: int
    cpu: float
    what: str | None = None


def played(database: SimDatabase, folder: Path, seeds: range, *, moves: int, faults: Faults) -> Played:
    out, began = Played(), time.process_time()
    for seed in seeds:
        try:
            done = play(database, folder, seed, moves=moves, faults=faults)
        except Broken as error:
            out.broken.append((seed, error.what, str(error)))
            continue
        out.moves += done.moves
        out.phases.update(phase.value for phase in done.phases)
    out.cpu = time.process_time() - began
    return out


def hunt(
    database: SimDatabase, folder: Path, name: str, *, seeds: range, moves: int = MOVES, faults: Faults = STORM
) -> Found:
    """Look for the planted fault ``name`` by its directed schedule, or if it has none by random ones until a rule is broken.
    Errors of other kinds do not count. Raises the errors that show that the fault does not fit the code any more."""
    began = time.process_time()
    with MUTANTS[name]():
        if name in DIRECTED:
            try:
                DIRECTED[name](database, folder)
            except AssertionError as error:
                return Found(name, 0, time.process_time() - began, str(error).splitlines()[0])
            return Found(name, 0, time.process_time() - began)
        for count, seed in enumerate(seeds, 1):
            try:
                play(database, folder, seed, moves=moves, faults=faults)
            except Broken as error:
                if isinstance(error.__cause__, AssertionError):
                    return Found(name, count, time.process_time() - began, error.what)
                if isinstance(error.__cause__, TypeError | AttributeError | NameError):
                    raise
    return Found(name, len(seeds), time.process_time() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.sim", description="Simulate schedules by seed.")
    parser.add_argument("--n", type=int, default=1000, help="schedules (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first one (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=MOVES, help="moves before the faults stop (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=CORES, help="processes (default: %(default)s)")
    parser.add_argument("--storm", action="store_true", help="with many more faults")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    parser.add_argument(
        "--mutants", nargs="*", metavar="NAME", choices=MUTANTS, help="find planted faults (default: all)"
    )
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.n)
    if given.mutants is not None:
        return _hunt_all(given.mutants or list(MUTANTS), seeds, given.moves, given.jobs)
    return _play_all(seeds, given)


def _play_all(seeds: range, given: argparse.Namespace) -> int:
    began, all_ = time.monotonic(), Played()
    do = partial(played, moves=given.moves, faults=STORM if given.storm else Faults())
    shares = [seeds[at :: given.jobs] for at in range(given.jobs)]
    for share in map_on_stages(given.jobs, do, shares, postgres=given.postgres):
        all_.moves, all_.cpu = all_.moves + share.moves, all_.cpu + share.cpu
        all_.phases.update(share.phases)
        all_.broken += share.broken
    took = time.monotonic() - began
    for i, (seed, what, story) in enumerate(sorted(all_.broken)):
        print(f"seed {seed}: {what}" if i else story)
    print(
        f"{given.n} schedules on {'PostgreSQL' if given.postgres else 'SQLite'}, {len(all_.broken)} broken, {all_.moves} moves; "
        f"jobs ended {dict(sorted(all_.phases.items()))}"
    )
    print(
        f"{took:.1f} s with {given.jobs} processes ({all_.cpu:.1f} s of CPU without a server's): {given.n / took:.1f} schedules "
        f"per second, {given.n / all_.cpu:.1f} per second of CPU"
    )
    return 1 if all_.broken else 0


def _hunt_all(names: list[str], seeds: range, moves: int, jobs: int) -> int:
    missed = 0
    for found in _hunts(names, seeds, moves, jobs):
        missed += found.what is None
        way = f"{found.schedules} schedules" if found.schedules else "its directed schedule"
        print(
            f"{found.name}: {'not found' if found.what is None else 'found'} by {way}, {found.cpu:.1f} s of CPU: {found.what}",
            flush=True,
        )
    return 1 if missed else 0


def _hunts(names: list[str], seeds: range, moves: int, jobs: int) -> Iterator[Found]:
    for postgres in (False, True):
        chosen = [name for name in names if (name in NEEDS_POSTGRES) is postgres]
        if chosen:
            yield from map_on_stages(jobs, partial(hunt, seeds=seeds, moves=moves), chosen, postgres=postgres)


if __name__ == "__main__":
    sys.exit(main())
