"""One rank of ``make bench ONLY=step``: a Session whose body alternates between Ratchet's loop and a hand-written one.

Both loops train an equal net on equal batches in this process, over the same process group, under the same settings. What is
timed is a block of steps, ended by a barrier of all ranks; a pair is one block of each, and the order turns around from pair to
pair. The hand-written block runs inside an open step of the Session, which costs neither side anything.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from loops import START_ITERATION, WARM_UP, Loop, net, timed
from stock import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ratchet_worker.session.session import Session


def stock_ddp(module: nn.Module, hook: str, bucket_cap_mb: float | None) -> DistributedDataParallel:
    """DDP under torch's own hook; but for the size of buckets at its defaults."""
    model = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
    low_rank = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START_ITERATION}
    register(model, hook, **low_rank if hook == "powerSGD" else {})
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hook", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples per rank")
    parser.add_argument("--block", type=int, required=True, help="steps")
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True, help="steps of Ratchet's loop before the first block")
    parser.add_argument("--bucket-cap-mb", type=float)
    parser.add_argument("--out", required=True, help="JSON for the benchmark, written by rank 0")
    args = parser.parse_args()
    with Session() as session:
        torch.manual_seed(session.rank)
        batch = torch.randn(args.batch, args.width)
        managed = Loop(session.wrap(net(args.width, args.depth)), batch)
        plain = Loop(stock_ddp(net(args.width, args.depth), args.hook, args.bucket_cap_mb), batch)
        alone = Loop(net(args.width, args.depth), batch)
        session.register(optimizer=managed.optimizer)
        out = Path(args.out)
        begun = out.with_name(f"{out.name}.begun")
        result = measure(session, managed, plain, alone, args.block, args.pairs, args.warm_up, begun)
        if session.rank == 0:
            result["parameters"] = sum(p.numel() for p in alone.model.parameters())
            temporary = out.with_name(f".{out.name}")
            temporary.write_text(json.dumps(result))
            temporary.rename(out)


def measure(
    session: Session, managed: Loop, plain: Loop, alone: Loop, block: int, pairs: int, warm_up: int, begun: Path
) -> dict[str, Any]:
    """Seconds and CPU seconds of every block in order, ``managed``, ``plain`` and ``alone`` (no communication, the limit: every
    fourth pair). ``begun`` is created when the warm-up is over."""
    steps = session.steps()

    def ours(count: int) -> None:
        for _ in range(count):
            next(steps)
            session.log({"loss": managed.step()})

    def by_hand(count: int) -> None:
        for _ in range(count):
            plain.step().item()

    def computing(count: int) -> None:
        for _ in range(count):
            alone.step().item()

    ours(warm_up)
    for loop in (by_hand, computing):
        loop(WARM_UP)
    blocks: dict[str, list[tuple[float, float]]] = {"managed": [], "plain": [], "alone": []}
    fingerprints = watched_fingerprints(session)
    begun.touch()
    begin, cpu = time.monotonic(), thread_seconds()
    for pair in range(pairs):
        if pair % 4 == 0:
            blocks["alone"].append(timed(computing, block))
        for name, loop in pair_order(pair, ours, by_hand):
            blocks[name].append(timed(loop, block))
    spent = time.monotonic() - begin
    used = {name: after - cpu.get(name, 0.0) for name, after in thread_seconds().items()}
    return {"blocks": blocks, "spent": spent, "own_threads": used, "fingerprints": fingerprints}


def watched_fingerprints(session: Session) -> dict[str, list[float]]:
    """Gets the seconds of each step's fingerprint from now on, as the loop's thread has them; and before each, those of an empty
    tensor of 5 KB. After a step, the first request for so much memory makes the C library sort what the step has freed. Without
    this tensor that request would be the fingerprint's (a copy of torch's generator), and without a fingerprint the next step's
    first tensor."""
    proof, seconds, empty = session._runtime.proof, list[float](), list[float]()
    assert proof is not None
    make = proof.record_step

    def boundary(step: int, data: Any, batches_taken: int) -> None:
        before = time.perf_counter()
        torch.empty(5056, dtype=torch.uint8)
        begin = time.perf_counter()
        make(step, data, batches_taken)
        seconds.append(time.perf_counter() - begin)
        empty.append(begin - before)

    proof.record_step = boundary  # type: ignore[method-assign]
    return {"made": seconds, "empty": empty}


def pair_order(
    pair: int, ours: Callable[[int], None], by_hand: Callable[[int], None]
) -> Iterator[tuple[str, Callable[[int], None]]]:
    """M P, P M, then P M, M P, and so on: either loop is as often first, and as often behind itself."""
    order = [("managed", ours), ("plain", by_hand)]
    yield from order if pair % 4 in (0, 3) else reversed(order)


def thread_seconds() -> dict[str, float]:
    """CPU seconds so far of the threads that Ratchet has in this process, by name."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ratchet"):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            found[thread.name] = (int(fields[11]) + int(fields[12])) / tick
    return found


if __name__ == "__main__":
    main()
