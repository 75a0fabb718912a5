"""What checkpoints cost a training, and a restart: Ratchet's, other packages' and the plain system calls', by turns in one run.

Jobs of 1, 2 and 4 ranks under a real service and agent save at least 400 MB of parameters and AdamW's state beside real steps.
Each row is a way to save; rounds have each of them once; medians with their 95 % intervals, the first save of each apart.
``RATCHET_BENCH_PARTS`` (names of ``PARTS``, separated by commas), ``RATCHET_BENCH_MB``, ``RATCHET_BENCH_BATCH``,
``RATCHET_BENCH_RANKS`` and ``RATCHET_BENCH_ROUNDS`` say what is measured, ``RATCHET_BENCH_DIR`` on which disk.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from benchmarks import checkpoint_steps, checkpoint_store, checkpoint_tables
from benchmarks.checkpoint_jobs import Measured, Setup, measure, service
from benchmarks.checkpoint_room import insist
from benchmarks.stats import machine
from examples.demo.processes import Service

MEGABYTES: Final = 401  # what is meant by "at least 400 MB" when a manifest's header is not counted
RANKS: Final = (1, 2, 4)
ROUNDS: Final = {1: 9, 2: 5, 4: 5}
BLOCKING_ROUNDS: Final = 7  # in which no steps are made
FIRSTS: Final = 2  # attempts that are made for their first saves
WAY_ROUNDS: Final = 3  # of these other packages have
RESTORES: Final = {1: 7, 2: 5, 4: 0}
BATCH: Final = 48  # samples per rank, for which a step of one rank takes about 0.3 s
SIZES: Final = (50, 1000)  # and what ``stalls`` has measured
GROWTH_ROUNDS: Final = 2
LIMITS: Final = (checkpoint_tables.LIMIT, checkpoint_tables.DIRECT)
FEW: Final = (
    "torch.save",
    "dcp.async_save, thread, defaults",
    "dcp.async_save, thread, kept stager",
    "Lightning AsyncCheckpointIO",
    *LIMITS,
)
ALL: Final = (
    "dcp.save",
    "dcp.async_save, thread, staged beside",
    "dcp.async_save, process, shared stager",
    *FEW,
)
"""Of ``scripts/save_ways.py``."""
WAYS: Final = {1: FEW, 2: ALL, 4: LIMITS}
"""By ranks: all of them on two, and on others what there is time for."""
PARTS: Final = ("stalls", "growth", "every_step", "store")


def main() -> None:
    parts = os.environ.get("RATCHET_BENCH_PARTS", ",".join(PARTS)).split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise SystemExit(f"RATCHET_BENCH_PARTS: no {', '.join(unknown)} here; there are {', '.join(PARTS)}")
    print(machine(), flush=True)
    begin = time.monotonic()
    folder = tempfile.TemporaryDirectory(prefix="ratchet-bench-", dir=os.environ.get("RATCHET_BENCH_DIR"))
    with _in_order_at_signals(), folder as name, service(Path(name)) as found:
        run(parts, found, Path(name))
    print(f"all of it took {time.monotonic() - begin:.0f} s")


def run(parts: list[str], service: Service, folder: Path) -> None:
    """Raises ``SystemExit`` at once where there is no room for it."""
    jobs = [stalls_of(ranks) for ranks in _ranks()] if "stalls" in parts else []
    sizes = growth_of() if "growth" in parts else []
    insist([*(setup for some in jobs for setup in some), *sizes, Setup(1, 1, 1)], folder)
    grown: list[Measured] = []
    for some in jobs:
        overlapped, blocking, *again = [measure(service, setup, folder) for setup in some]
        checkpoint_tables.stalls(overlapped, blocking, again)
        grown.append(overlapped)
    if sizes:
        grown += [measure(service, setup, folder) for setup in sizes]
        print("\ngrowth: Ratchet beside the plain copy and write of the same bytes, each rank its share")
        print(checkpoint_tables.growth_head())
        for measured in sorted(grown, key=lambda m: (m.setup.ranks, m.nbytes)):
            print(checkpoint_tables.growth_row(measured), flush=True)
    if "every_step" in parts:
        print(
            "\na checkpoint, or a copy in memory, at every step of bytelm, against the limit and the same job without"
        )
        checkpoint_steps.table(service, folder)
    if "store" in parts:
        print("\nthe store alone")
        checkpoint_store.main()


def stalls_of(ranks: int) -> list[Setup]:
    """Every way beside training and loading what was saved; Ratchet's staging that blocks; and attempts for their first saves."""
    megabytes = int(os.environ.get("RATCHET_BENCH_MB", MEGABYTES))
    batch = int(os.environ.get("RATCHET_BENCH_BATCH", BATCH))
    rounds = _rounds(ROUNDS.get(ranks, 3))
    ways, way_rounds = WAYS.get(ranks, FEW), min(rounds, WAY_ROUNDS)
    restores = min(rounds, RESTORES.get(ranks, 0))
    return [
        Setup(megabytes, ranks, rounds, "overlapped", ways, way_rounds, restores, batch),
        Setup(megabytes, ranks, _rounds(BLOCKING_ROUNDS), "blocking", batch=batch),
        *[Setup(megabytes, ranks, 1, "overlapped", batch=batch)] * FIRSTS,
    ]


def growth_of() -> list[Setup]:
    """Ratchet alone, over sizes and ranks."""
    sizes = [int(size) for size in os.environ.get("RATCHET_BENCH_SIZES", ",".join(map(str, SIZES))).split(",")]
    return [Setup(size, ranks, min(_rounds(GROWTH_ROUNDS), GROWTH_ROUNDS)) for ranks in _ranks() for size in sizes]


@contextmanager
def _in_order_at_signals() -> Iterator[None]:
    """What ends this process ends it in order: no process and no directory is left. (Ctrl-C does so by itself.)"""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ranks() -> list[int]:
    return [int(number) for number in os.environ.get("RATCHET_BENCH_RANKS", ",".join(map(str, RANKS))).split(",")]


def _rounds(default: int) -> int:
    return int(os.environ.get("RATCHET_BENCH_ROUNDS", default))


if __name__ == "__main__":
    main()
