"""One and the same training for all loops that are compared, and how blocks of its steps are timed. Only torch."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

START_ITERATION: Final = 2  # of powerSGD
WARM_UP: Final = 5  # steps of each loop before anything is timed; past START_ITERATION


def net(width: int, depth: int) -> nn.Module:
    """``depth`` square layers of ``width``."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Loop:
    """One training step after another on one model, written as anyone writes it."""

    def __init__(self, model: nn.Module, batch: torch.Tensor) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(self.batch), self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def timed(loop: Callable[[int], None], block: int) -> tuple[float, float]:
    """Seconds from a barrier to a barrier, of all ranks together; and CPU seconds of this process meanwhile.

    A step before that is not timed: it finds the caches full of the other loop's numbers."""
    loop(1)
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    loop(block)
    dist.barrier()
    return time.perf_counter() - begin, time.process_time() - cpu


def turns_parser() -> argparse.ArgumentParser:
    """What every loop that takes turns is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples per rank")
    parser.add_argument("--turns", required=True, help="Unix socket of the benchmark")
    return parser


def take_turns(turns: str, loop: Callable[[int], None]) -> None:
    """``loop(steps)`` when ``benchmarks.network`` says so, over a Unix socket, which knows nothing of network namespaces.

    Steps at the beginning of a turn are not timed: caches are full of other groups' numbers then, and reports that go by time,
    which a job that trains all the while makes once in many steps, have fallen due."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(turns)
        with channel.makefile("rw") as lines:
            for line in lines:
                before, steps = map(int, line.split())
                loop(before)
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                loop(steps)
                dist.barrier()
                lines.write(json.dumps([time.perf_counter() - begin, time.process_time() - cpu]) + "\n")
                lines.flush()
