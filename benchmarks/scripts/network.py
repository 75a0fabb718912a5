"""One rank of ``make bench ONLY=network``: a Session that does as many steps as it is told, when it is its turn.

Steps at the beginning of a turn are not timed: caches are full of other groups' numbers then, and reports that go by time, which
a job that trains all the while makes once in many steps, have fallen due.

Groups under several hooks are alive at the same time and share one link, so only one of them may train at any time: the benchmark
says which, over a Unix socket, which knows nothing of network namespaces; while it is not their turn the processes are stopped.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from step import Loop, net

from ratchet_worker.session import Session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples per rank")
    parser.add_argument("--turns", required=True, help="Unix socket of the benchmark")
    args = parser.parse_args()
    with Session() as session, socket.socket(socket.AF_UNIX) as channel:
        torch.manual_seed(session.rank)
        loop = Loop(session.wrap(net(args.width, args.depth)), torch.randn(args.batch, args.width))
        session.register(optimizer=loop.optimizer)
        steps = session.steps()
        channel.connect(args.turns)
        with channel.makefile("rw") as lines:
            next(steps)
            for line in lines:
                before, timed = map(int, line.split())
                run(session, steps, loop, before)
                dist.barrier()
                begin = time.perf_counter()
                run(session, steps, loop, timed)
                dist.barrier()
                lines.write(json.dumps(time.perf_counter() - begin) + "\n")
                lines.flush()


def run(session: Session, steps: Iterator[int], loop: Loop, count: int) -> None:
    """``count`` steps with all that a Session does at their ends; the next one is then open."""
    for _ in range(count):
        session.log({"loss": loop.step()})
        next(steps)


if __name__ == "__main__":
    main()
