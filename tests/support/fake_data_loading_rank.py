"""A stand-in for a rank that loads data with workers: ``python -m tests.support.fake_data_loading_rank MODE``.

``finish``: prints "starting", starts its workers, prints their process ids, goes through one epoch while SIGTERM only sets a
flag, prints the samples and how many signals it saw, and reads a line before it ends. ``stop``: exits in the middle of an epoch
while workers are busy for an hour. ``wait``: prints the process ids and sleeps until it is killed.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import time
from types import FrameType

from ratchet_worker.data.loader import TrainLoader
from tests.support.data_sets import Slow


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main(mode: str) -> None:
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    dataset = Slow(40, 0.02) if mode == "finish" else Slow(40, 3600.0)
    loader = TrainLoader(dataset, batch_size=2, seed=3, rank=0, world_size=1, num_workers=2)
    say(event="starting")
    if mode == "finish":
        batches = iter(loader)
        samples = next(batches).tolist()
        say(event="workers", pids=[p.pid for p in multiprocessing.active_children()])
        for batch in batches:
            samples += batch.tolist()
        say(event="done", samples=samples, signals=len(seen))
        loader.close()
        say(event="closed", left=[p.pid for p in multiprocessing.active_children()])
        sys.stdin.readline()  # until no more signals come: an exiting interpreter has the system's handlers again
        return
    loader._fetch()  # starts the workers and their reading ahead, without waiting for a batch that takes an hour
    say(event="workers", pids=[p.pid for p in multiprocessing.active_children()])
    if mode == "wait":
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
