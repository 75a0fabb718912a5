"""Where simulated schedules run: a directory in memory, a database with the current schema, and a process for each core."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
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


@contextmanager
def stage_directory() -> Iterator[Path]:
    """A new directory, in memory if the machine has such a place; deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="ratchet-sim-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


def map_on_stages(
    jobs: int, do: Callable[[SimDatabase, Path, In], Out], items: Iterable[In], *, postgres: bool
) -> Iterator[Out]:
    """``do`` each of ``items`` in one of ``jobs`` processes, with a database and a directory of its own; the results in order."""
    with (
        postgres_server() if postgres else nullcontext() as server,
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool,
    ):
        yield from pool.map(partial(_on_stage, do, server), items)


def _on_stage(do: Callable[[SimDatabase, Path, In], Out], server: str | None, item: In) -> Out:
    with stage_directory() as folder:
        database = SimDatabase(sqlite_url(folder / "ratchet.db") if server is None else _new_database(server))
        try:
            upgrade(database)
            return do(database, folder, item)
        finally:
            database.dispose()


def _new_database(server: str) -> str:
    """A database of this process, on a server that may have others."""
    name = f"sim_{os.getpid()}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name}")
        connection.execute(f"CREATE DATABASE {name}")
    return make_url(server).set(database=name).render_as_string(hide_password=False)
