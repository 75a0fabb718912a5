"""One rank of ``make bench ONLY=network``: a Session that does as many steps as it is told, when it is its turn.

Groups under several hooks are alive at the same time and share one link, so only one of them may train at any time: the benchmark
says which, over a Unix socket, which knows nothing of network namespaces. Steps outside a turn there are none.
"""

from __future__ import annotations

import argparse
import json
import socket
import time

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
            for line in lines:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(int(line)):
                    next(steps)
                    session.log({"loss": loop.step()})
                dist.barrier()
                lines.write(json.dumps(time.perf_counter() - begin) + "\n")
                lines.flush()


if __name__ == "__main__":
    main()
