"""The built-in task ``bytelm`` in blocks of steps, each when ``benchmarks.checkpoint_steps`` says so, which times them."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from save_state import Copy, buffer_for, live_tensors
from torch import nn

from ratchet_hooks.torch_compat import foreach_copy_
from ratchet_worker.checkpoint.threads import BackgroundThread, Call
from ratchet_worker.task import Parts, TaskContext
from ratchet_worker.tasks.bytelm import ByteLMTask

_PAGE: Final = 4096  # bytes; a write past the page cache is a multiple of it


class Blocks(ByteLMTask):
    """``turns``: a Unix socket. Behind ``before`` steps that are not counted come ``count`` that are; seconds and processor time
    of this rank are told then, and the next block begins with an answer. After ``blocks`` of them one step is left. ``limit``:
    behind every step begins what ``_Limit`` does; ``memory``: without a write. Other arguments: the task's."""

    def __init__(
        self, turns: str, before: int, count: int, blocks: int, limit: str | None = None, **arguments: Any
    ) -> None:
        super().__init__(steps=blocks * (before + count) + 1, **arguments)
        self._limit_of = limit
        self._limit: _Limit | None = None
        self._ranks = 1
        self._before, self._block = before, before + count
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.settimeout(300.0)
        self._turns, self._rank, self._begin = turns, 0, (0.0, 0.0)

    def build(self, ctx: TaskContext) -> Parts:
        self._rank, self._ranks = ctx.rank, ctx.world_size
        return super().build(ctx)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().before_step(model, optimizer, step)
        if self._limit_of is not None and step > 1:
            if self._limit is None:
                beside = Path(self._turns) if self._limit_of == "disk" else None
                self._limit = _Limit(live_tensors(model, optimizer), self._rank, self._ranks, beside)
            self._limit.save()
        done = (step - 1) % self._block
        now = time.perf_counter(), time.process_time()
        if done == 0:
            self._take_turns(step, now)
        if done == self._before:
            self._begin = now

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


class _Limit:
    """A thread copies the rank's share, makes one digest of it, writes and syncs it, while the next step changes what it copies:
    no checkpoint, since nothing is handed over, waited for or committed. Each is one call of C code, which runs without Python's
    lock: the thread needs the lock only between these calls. ``beside``: where it writes; None: it does not."""

    def __init__(self, live: dict[str, torch.Tensor], rank: int, ranks: int, beside: Path | None) -> None:
        tensors = list(live.values())
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._copy = Copy(tensors, buffer_for(nbytes // ranks + 1), rank, ranks)
        moved = [pair for pair in self._copy.pairs if pair[0].numel()]
        self._targets, self._origins = [to for to, _ in moved], [origin for _, origin in moved]
        self._pages = self._copy.bytes[: self._copy.nbytes // _PAGE * _PAGE]
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        places = [beside.with_name(f"limit-{rank}-{number}") for number in range(2)] if beside is not None else []
        self._files = [os.open(place, flags, 0o644) for place in places]
        self._aside = BackgroundThread("limit", quiet=True)
        self._call: Call[None] | None = None

    def save(self) -> None:
        """Behind the one before. Raises what that raised."""
        if self._call is not None:
            self._call.result()
        self._files.reverse()
        self._call = self._aside.submit(self._write)

    def _write(self) -> None:
        foreach_copy_(self._targets, self._origins)
        xxhash.xxh3_128_digest(self._copy.bytes)
        if self._files:
            if os.pwrite(self._files[0], self._pages, 0) < len(self._pages):
                raise OSError("a short write")
            os.fsync(self._files[0])
