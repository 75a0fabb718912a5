"""Steps of a Session that saves, timed from the loop's side: what it trained, and where it stood still. Ratchet is in it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from save_ways import Pending, World

from ratchet_worker.session.session import Session

_BUSY: Final = 4
_SMALL: Final = 384  # width of a small step's matrices, which stay in the processor's caches
_QUIET: Final = 50  # small steps without a save, before each and behind it: a machine is not always as fast
_SPIN: Final = "while True: pass"


class Step(NamedTuple):
    """``seconds`` without ``Loop.held``, ``cpu`` of all threads and children; ``done``: all ranks were, before it."""

    seconds: float
    cpu: float
    done: bool


class Loop:
    """Steps of a Session. All ranks end a step together. ``longest``: so many may pass until a save is durable; then the loop
    waits.

    ``held``: where the last step stood still for a save, in its backward pass or before ``optimizer.step()``. ``boundary`` and
    ``boundary_cpu``: the last step boundary, by the clock and by this thread's processor time.
    """

    longest: Final = 60

    def __init__(self, session: Session, world: World, batch: torch.Tensor, cycle: int) -> None:
        self._session, self._world, self._batch, self._cycle = session, world, batch, cycle
        self._agreed = torch.ones(1, dtype=torch.int64)
        self._steps = session.steps()
        next(self._steps)
        self._entered = self._in_backward = 0.0
        self._watch_backward()
        # Behind every hook that Ratchet has put before the parameters change: what passes until here is its waiting.
        world.optimizer.register_step_pre_hook(self._enter)
        self.held = self.boundary = self.boundary_cpu = 0.0

    def _watch_backward(self) -> None:
        """Ratchet waits there, too: each bucket's hook asks whether its state may change."""
        hook = self._session._runtime.state.require_wrapped()[1]
        wait = hook.before_change
        if wait is None:  # it copies everything before a step begins
            return

        def timed() -> None:
            begin = time.perf_counter()
            wait()
            self._in_backward += time.perf_counter() - begin

        hook.before_change = timed

    def _enter(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def step(self, pending: Pending | None = None, *, done: bool = True) -> Step:
        """One training step, and its boundary."""
        begin, cpu = time.perf_counter(), cpu_seconds()
        self._in_backward = 0.0
        torch.nn.functional.mse_loss(self._world.ddp(self._batch), self._batch).backward()
        self.update(pending)
        self.held += self._in_backward
        self._world.optimizer.zero_grad()
        all_done = self.agree(done)
        found = Step(time.perf_counter() - begin - self.held, cpu_seconds() - cpu, all_done)
        self.leave()
        return found

    def update(self, pending: Pending | None = None) -> None:
        begin = time.perf_counter()
        if pending is not None:
            pending.gate()
        self._world.optimizer.step()
        self.held = self._entered - begin

    def agree(self, done: bool = True) -> bool:
        """All ranks come here; are all of them done?"""
        self._agreed.fill_(int(done))
        dist.all_reduce(self._agreed, op=dist.ReduceOp.MIN)
        return bool(self._agreed.item())

    def leave(self) -> None:
        """The step boundary."""
        begin, cpu = time.perf_counter(), time.thread_time()
        next(self._steps)
        self.boundary, self.boundary_cpu = time.perf_counter() - begin, time.thread_time() - cpu

    def to_the_last_of_a_cycle(self) -> None:
        """Empty steps, until a save is due at the end of the open one."""
        while (self._session.step + 1) % self._cycle:
            self.leave()
        self.agree()


class SmallSteps:
    """Steps that take a few milliseconds of matrix products and Python and change nothing that is saved: what a save costs
    whoever trains in processor time and in waiting for Python's lock, and not what it costs a step that is as long as memory is
    slow. All ranks end a step together."""

    longest: Final = 6000

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._weight, self._x = torch.randn(_SMALL, _SMALL) / _SMALL, torch.randn(_SMALL, _SMALL)

    def quiet(self) -> list[Step]:
        """As they are without a save."""
        self.step()
        return [self.step() for _ in range(_QUIET)]

    def step(self, _: Pending | None = None, *, done: bool = True) -> Step:
        begin, cpu = time.perf_counter(), cpu_seconds()
        x, total = self._x, 0
        for _turn in range(4):
            x = torch.relu(x @ self._weight)
            for number in range(3000):
                total += number
        all_done = self._loop.agree(done)
        return Step(time.perf_counter() - begin, cpu_seconds() - cpu, all_done)


def beside_busy_cores(loop: Loop) -> list[float]:
    """How much longer a step takes while every other core computes and touches no memory: what a save's thread cannot get below
    where cores are threads of one, or are lent by a machine that others use. Ratios of neighbouring steps."""
    out = []
    for _ in range(_BUSY):
        plain = loop.step().seconds
        busy = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(len(os.sched_getaffinity(0)) - 1)]
        try:
            loop.step()  # in which they start
            out.append(loop.step().seconds / plain)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    return out


def cpu_seconds() -> float:
    """Processor time of this process and of the children that it has (DCP saves in one)."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")
