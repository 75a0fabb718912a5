"""``python -m tests.support.sim --n 10000 [--seed 0] [--postgres]``: so many schedules, and how fast they ran."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratchet_service.database import sqlite_url
from ratchet_service.migrate import upgrade
from tests.support.postgres import postgres_server
from tests.support.sim.processes import STORM, Faults, SimDatabase
from tests.support.sim.world import Broken, play

MEMORY = Path("/dev/shm")


@contextmanager
def stage_directory() -> Iterator[Path]:
    """In memory where the machine has such a place: nothing here has to outlive a power cut."""
    with tempfile.TemporaryDirectory(prefix="ratchet-sim-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@contextmanager
def _database(folder: Path, *, postgres: bool) -> Iterator[SimDatabase]:
    if postgres:
        with postgres_server() as url:
            yield SimDatabase(url)
        return
    yield SimDatabase(sqlite_url(folder / "ratchet.db"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.sim", description="Simulate schedules by seed.")
    parser.add_argument("--n", type=int, default=1000, help="schedules (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="moves before the faults stop (default: %(default)s)")
    parser.add_argument("--storm", action="store_true", help="with many more faults")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    given = parser.parse_args()
    phases: Counter[str] = Counter()
    moves, broken, began = 0, 0, time.monotonic()
    with stage_directory() as folder, _database(folder, postgres=given.postgres) as database:
        upgrade(database)
        for seed in range(given.seed, given.seed + given.n):
            try:
                done = play(database, folder, seed, steps=given.steps, faults=STORM if given.storm else Faults())
            except Broken as error:
                broken += 1
                print(error if broken == 1 else f"seed {error.seed}: {error.what}", flush=True)
                continue
            moves += done.steps
            phases.update(phase.value for phase in done.phases)
        database.dispose()
    took = time.monotonic() - began
    cpu = time.process_time()
    print(f"{given.n} schedules, {broken} broken, {moves} moves in {took:.1f} s ({cpu:.1f} s of CPU): {given.n / cpu:.1f} "
          f"schedules and {moves / cpu:.0f} moves per second of CPU; jobs ended {dict(phases)}")  # fmt: skip
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
