"""The built-in task ``bytelm`` in blocks of steps, each when ``benchmarks.checkpoint_steps`` says so, which times them."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from save_state import Copy, buffer_for, live_tensors
from save_ways import write_synced
from torch import nn

from ratchet_worker.task import Parts, TaskContext
from ratchet_worker.tasks.bytelm import ByteLMTask


class Blocks(ByteLMTask):
    """``turns``: a Unix socket. Behind ``before`` steps that are not counted come ``count`` that are; seconds and processor time
    of this rank are told then, and the next block begins with an answer. After ``blocks`` of them one step is left. ``plain``:
    behind every step a thread begins to copy the rank's share, makes one digest of it, writes and syncs it, while the next step
    changes what it copies: no checkpoint, but what none can do without. Other arguments: the task's."""

    def __init__(self, turns: str, before: int, count: int, blocks: int, plain: bool = False, **arguments: Any) -> None:
        super().__init__(steps=blocks * (before + count) + 1, **arguments)
        self._plain = plain
        self._copy: Copy | None = None
        self._writing: threading.Thread | None = None
        self._ranks, self._saves = 1, 0
        self._before, self._block = before, before + count
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.settimeout(300.0)
        self._turns, self._rank, self._begin = turns, 0, (0.0, 0.0)

    def build(self, ctx: TaskContext) -> Parts:
        self._rank, self._ranks = ctx.rank, ctx.world_size
        return super().build(ctx)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().before_step(model, optimizer, step)
        if self._plain and step > 1:
            self._save(model, optimizer)
        done = (step - 1) % self._block
        now = time.perf_counter(), time.process_time()
        if done == 0:
            self._take_turns(step, now)
        if done == self._before:
            self._begin = now

    def _save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self._copy is None:
            tensors = list(live_tensors(model, optimizer).values())
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self._copy = Copy(tensors, buffer_for(nbytes // self._ranks + 1), self._rank, self._ranks)
        if self._writing is not None:
            self._writing.join()
        self._saves += 1
        place = Path(self._turns).with_name(f"plain-{self._rank}-{self._saves % 2}")
        self._writing = threading.Thread(target=_write, args=(self._copy, place))
        self._writing.start()

    def _take_turns(self, step: int, now: tuple[float, float]) -> None:
        """The rank that waits here holds the others up, too: within a step they wait for each other."""
        if step == 1:
            self._channel.connect(self._turns)
            told = [0.0, 0.0]
        else:
            told = [later - earlier for later, earlier in zip(now, self._begin, strict=True)]
        self._channel.sendall(json.dumps([self._rank, *told]).encode() + b"\n")
        if not self._channel.recv(1):
            raise ConnectionError("the benchmark has ended")


def _write(copy: Copy, place: Path) -> None:
    copy()
    xxhash.xxh3_128_digest(copy.bytes)
    place.unlink(missing_ok=True)
    write_synced(place, copy.bytes, direct=True)
