"""Where simulated schedules play: a directory in memory, a database of the current schema, as many processes as there are cores.

Each process takes every so many-th seed, with a directory and a database of its own, which each schedule empties: the schema
is made once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import psycopg
from sqlalchemy.engine import make_url

from ratchet_service.db.engine import sqlite_url
from ratchet_service.db.migrate import upgrade
from tests.support.postgres import postgres_server
from tests.support.sim.processes import SimDatabase

MEMORY = Path("/dev/shm")
CORES = os.cpu_count() or 1
In = TypeVar("In")
Out = TypeVar("Out")


def arguments(prog: str, description: str, *, n: int, moves: int) -> argparse.ArgumentParser:
    """What every simulation asks for; ``n`` and ``moves`` are its defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("--n", type=int, default=n, help="schedules (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (default: %(default)s)")
    parser.add_argument("--moves", type=int, default=moves, help="moves before the faults stop (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=CORES, help="processes (default: %(default)s)")
    return parser


@contextmanager
def stage_directory() -> Iterator[Path]:
    """In memory where the machine has such a place: nothing here has to outlive a power cut."""
    with tempfile.TemporaryDirectory(prefix="ratchet-sim-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


def map_in_processes(jobs: int, do: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """``do`` each of them in ``jobs`` processes; the answers in order."""
    if jobs == 1:
        yield from map(do, items)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(do, items)


def map_seeds(jobs: int, do: Callable[[SimDatabase, Path, range], Out], seeds: range, *, postgres: bool) -> list[Out]:
    """``do`` with a share of the seeds in each of ``jobs`` processes."""
    shares = [seeds[at::jobs] for at in range(jobs)]
    if not postgres:
        return list(map_in_processes(jobs, partial(_on_stage, do, None), shares))
    with postgres_server() as url:
        return list(map_in_processes(jobs, partial(_on_stage, do, url), shares))


def _on_stage(do: Callable[[SimDatabase, Path, range], Out], server: str | None, seeds: range) -> Out:
    with stage_directory() as folder:
        url = sqlite_url(folder / "ratchet.db") if server is None else _new_database(server)
        database = SimDatabase(url)
        try:
            upgrade(database)
            return do(database, folder, seeds)
        finally:
            database.dispose()


def _new_database(server: str) -> str:
    """Of this process, on a server that may have others."""
    name = f"sim_{os.getpid()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name}")
        connection.execute(f"CREATE DATABASE {name}")
    return make_url(server).set(database=name).render_as_string(hide_password=False)
