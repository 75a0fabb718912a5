"""Loading what was saved: Ratchet's way, torch's, and plain reading of as many bytes; from the page cache and from the disk."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from save_state import CHUNK
from save_ways import World

from ratchet_contract.checkpoint.manifest import TensorEntry
from ratchet_store.read.checkpoint_reader import load
from ratchet_worker.host.cpu import rank_cores
from ratchet_worker.resume import read_checkpoint
from ratchet_worker.session.session import Session
from ratchet_worker.training import restore_state

_trim = ctypes.CDLL(None).malloc_trim  # glibc's: free memory goes back to the system
COLD = ", from the disk"
"""The end of a row's name: before it the page cache was emptied of the checkpoint."""


def measure_restore(session: Session, world: World, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of every way in every round, of this rank; all ranks begin together."""
    runtime = session._runtime
    chosen = runtime.chosen
    manifest, directory = chosen.manifest, chosen.directory
    assert manifest is not None and directory is not None
    size = sum(file.size for file in manifest.files)
    there = torch.ones(size, dtype=torch.uint8)
    held: dict[tuple[str, int], memoryview] = {}

    def place(entry: TensorEntry) -> memoryview:
        key = entry.name, entry.start
        if key not in held:
            held[key] = memoryview(torch.ones(entry.nbytes, dtype=torch.uint8).numpy())
        return held[key]

    def verified() -> None:
        """Every byte, into memory whose pages are there, by as many threads as a resume has."""
        load(directory, manifest, lambda entry: True, place, ranks=[session.rank], threads=rank_cores())

    def resumed() -> None:
        """What a resume does: read and verify before anything is built, then put in place and compare with what was saved."""
        found = read_checkpoint.read(chosen, [session.rank], verified_ranks=[session.rank])[session.rank]
        restore_state.restore_state(runtime, manifest, found)

    def torch_load() -> None:
        found = torch.load(folder / "torch.save", weights_only=True)
        world.model.load_state_dict(found["model"])
        world.optimizer.load_state_dict(found["optimizer"])

    def dcp_load() -> None:
        dcp.load(world.tensors(), checkpoint_id=folder / "dcp.save", process_group=world.group)

    def raw_read(into: torch.Tensor) -> None:
        buffer, offset = memoryview(into.numpy()), 0
        for file in manifest.files:
            offset = _read(directory / file.name, buffer, offset)

    ways: dict[str, Callable[[], None]] = {
        "raw read": lambda: raw_read(there),
        "raw read into fresh memory": lambda: raw_read(torch.empty(size, dtype=torch.uint8)),
        "Ratchet, load and verify": verified,
        "Ratchet, a resume's": resumed,
    }
    if (folder / "torch.save").exists():
        ways["torch.load, load_state_dict"] = torch_load
    if (folder / "dcp.save").exists():
        ways["dcp.load"] = dcp_load
    for name in ("raw read", "raw read into fresh memory", "Ratchet, load and verify", "Ratchet, a resume's"):
        ways[f"{name}{COLD}"] = ways[name]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first is for what is made once
        warm = {name: way for name, way in ways.items() if not name.endswith(COLD)}
        cold = {name: way for name, way in ways.items() if name.endswith(COLD)}
        raw_read(there)  # the page cache holds everything
        for name, way in [*_turned(warm, number), *_turned(cold, number)]:
            if name in cold:
                dist.barrier(world.group)
                if session.rank == 0:
                    _forget([directory / file.name for file in manifest.files])
            _trim(0)  # else what is fresh in a process that resumes were there from the way before
            dist.barrier(world.group)
            begin = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {"seconds": seconds}


def _turned(ways: dict[str, Callable[[], None]], number: int) -> list[tuple[str, Callable[[], None]]]:
    items = list(ways.items())
    shift = number % len(items)
    return items[shift:] + items[:shift]


def _forget(paths: list[Path]) -> None:
    """Nothing of these files is in the page cache any more."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not on the disk is not let go
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _read(path: Path, into: memoryview, offset: int) -> int:
    """Read all of it to ``offset`` and following; returns where it ends."""
    fd = os.open(path, os.O_RDONLY)
    try:
        while count := os.readv(fd, [into[offset : offset + CHUNK]]):
            offset += count
        return offset
    finally:
        os.close(fd)
