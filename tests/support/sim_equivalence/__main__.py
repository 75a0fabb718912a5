"""``python -m tests.support.sim_equivalence --n 200 [--seed 0] [--postgres]``: does the fast lane do what the service does?"""

from __future__ import annotations

import difflib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

from tests.support.sim.processes import SimDatabase
from tests.support.sim.stage_pool import arguments, map_seeds
from tests.support.sim_equivalence.histories import Kept, Modelled
from tests.support.sim_equivalence.service_world import Served
from tests.support.sim_in_memory.world import MOVES

PLAYED: Final = "after"


def driven(world: Kept, moves: int) -> list[str]:
    """A whole schedule's histories, and where its choices have got to."""
    try:
        world.run(moves)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        ended = f"{PLAYED} {world.moves} moves: {world.rnd()}"
    out = [f"{job_id} {line}" for job_id, lines in sorted(world.histories().items()) for line in lines]
    world.close()
    return [*out, ended]


def difference(seed: int, database: SimDatabase, folder: Path, moves: int = MOVES) -> str | None:
    """None: both lanes play the schedule ``seed`` to its end, and tell the same of it."""
    model, served = driven(Modelled(seed), moves), driven(Served(seed, database, folder), moves)
    if model == served:
        return None if model[-1].startswith(PLAYED) else f"neither lane plays it to its end: {model[-1]}"
    return "\n".join(difflib.unified_diff(model, served, "the fast lane", database.url.drivername, lineterm="", n=2))


def differing(database: SimDatabase, folder: Path, seeds: range, *, moves: int = MOVES) -> list[tuple[int, str]]:
    found = ((seed, difference(seed, database, folder, moves)) for seed in seeds)
    return [(seed, text) for seed, text in found if text is not None]


def main() -> int:
    parser = arguments("tests.support.sim_equivalence", "One schedule, both lanes.", n=200, moves=MOVES)
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    given = parser.parse_args()
    began, seeds = time.monotonic(), range(given.seed, given.seed + given.n)
    shares = map_seeds(given.jobs, partial(differing, moves=given.moves), seeds, postgres=given.postgres)
    took = time.monotonic() - began
    found = sorted(one for share in shares for one in share)
    for seed, text in found:
        print(f"seed {seed}:\n{text}" if seed == found[0][0] else f"seed {seed} differs", flush=True)
    kind = "PostgreSQL" if given.postgres else "SQLite"
    print(
        f"{given.n} schedules of {given.moves} moves in memory and over the service on {kind}: {len(found)} differ; "
        f"{took:.1f} s with {given.jobs} processes, {given.n / took:.1f} a second"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
