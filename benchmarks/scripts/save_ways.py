"""Ways to save a training's state, each as its own documentation has it, and the plain system calls as their limit.

A way's ``save`` is what the training loop waits for. It returns ``Pending``: what is still to come.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from save_state import CHUNK, Copy, live_tensors, nested
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.nn.parallel import DistributedDataParallel

THREAD: Final = AsyncCheckpointerType.THREAD
PROCESS: Final = AsyncCheckpointerType.PROCESS
LIMIT: Final = "limit: copy, write in a thread"
DIRECT: Final = "limit: copy, O_DIRECT write in a thread"
LIMITS: Final = (LIMIT, DIRECT)


class Pending:
    """A save whose call has returned. ``durable``: when its bytes were on the disk (``time.perf_counter``), None until then."""

    def __init__(self, durable: float | None = None) -> None:
        self.durable = durable
        self.error: BaseException | None = None

    def gate(self) -> None:
        """Before parameters change: wait for what still reads them."""

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.durable is not None

    def at_end(self, future: Future[Any]) -> None:
        """The callback of a future."""
        self.error, self.durable = future.exception(), time.perf_counter()


class Way(Protocol):
    """``save(place)``: on every rank, into a path that is not there yet."""

    def save(self, place: Path) -> Pending: ...


class World:
    """What a way needs to know: the training's objects, and a group of its own, so that nothing crosses the training's."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        self.ddp, self.model, self.optimizer = ddp, ddp.module, optimizer
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")

    def tensors(self) -> dict[str, torch.Tensor]:
        return live_tensors(self.model, self.optimizer)


def write_synced(path: Path, data: memoryview, direct: bool = False) -> None:
    """Plain system calls: written and on the disk. ``direct``: past the page cache, and so whole pages."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o644)
    chunk, end = (4 * CHUNK, len(data) // 4096 * 4096) if direct else (CHUNK, len(data))
    try:
        for offset in range(0, end, chunk):
            os.write(fd, data[offset : min(offset + chunk, end)])
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


class TorchSave:
    """Rank 0 saves, the others wait for it. It is not synced, so that is done behind it, and counts until it is durable."""

    def __init__(self, world: World) -> None:
        self._world = world

    def save(self, place: Path) -> Pending:
        if self._world.rank == 0:
            torch.save(nested(self._world.model, self._world.optimizer), place)
        dist.barrier(self._world.group)
        return _SyncedAfter(place if self._world.rank == 0 else None)


class _SyncedAfter(Pending):
    def __init__(self, place: Path | None) -> None:
        super().__init__()
        self._place = place

    def done(self) -> bool:
        if self._place is not None:
            sync(self._place)
        self.durable = time.perf_counter()
        return True


class DcpSave:
    """``dcp.save``, which syncs its files by itself."""

    def __init__(self, world: World) -> None:
        self._world = world

    def save(self, place: Path) -> Pending:
        dcp.save(self._world.tensors(), checkpoint_id=place, process_group=self._world.group)
        return Pending(time.perf_counter())


class DcpAsync:
    """``dcp.async_save``. ``stager``: kept from save to save, which is quicker than its default (None), one for each."""

    def __init__(self, world: World, kind: AsyncCheckpointerType, stager: DefaultStager | None) -> None:
        self._world, self._kind, self._stager = world, kind, stager

    def save(self, place: Path) -> Pending:
        pending = _Staged()
        response = dcp.async_save(
            self._world.tensors(), checkpoint_id=place, process_group=self._world.group,
            async_checkpointer_type=self._kind, async_stager=self._stager,
        )  # fmt: skip
        if isinstance(response, AsyncSaveResponse):
            pending.staging = response.staging_completion
            response = response.upload_completion
        response.add_done_callback(pending.at_end)
        return pending


class _Staged(Pending):
    staging: Future[None] | None = None

    def gate(self) -> None:
        if self.staging is not None:
            self.staging.result()


def _stager(*, shared: bool = False, in_background: bool = False) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=shared,
            use_async_staging=in_background,
            use_non_blocking_copy=False,
        )
    )


class Lightning:
    """Lightning's ``AsyncCheckpointIO`` as its Trainer calls it: on rank 0, with a barrier of all ranks behind it.

    What it writes is synced in its thread, which is the only addition."""

    def __init__(self, world: World) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        class Synced(TorchCheckpointIO):
            def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
                pending = way.pending
                try:
                    super().save_checkpoint(checkpoint, path, storage_options)
                    sync(Path(path))
                except BaseException as error:
                    pending.error = error
                    raise
                pending.durable = time.perf_counter()

        way = self
        self._world, self._io, self.pending = world, AsyncCheckpointIO(Synced()), Pending()

    def save(self, place: Path) -> Pending:
        self.pending = Pending() if self._world.rank == 0 else Pending(time.perf_counter())
        if self._world.rank == 0:
            self._io.save_checkpoint(nested(self._world.model, self._world.optimizer), str(place))
        dist.barrier(self._world.group)
        return self.pending


class Limit:
    """No way to save: this rank's share is copied, a thread writes and syncs it, without a digest, a header or a commit."""

    def __init__(self, copy: Copy, direct: bool) -> None:
        self._copy, self._direct = copy, direct

    def save(self, place: Path) -> Pending:
        self._copy()
        pending = Pending()
        threading.Thread(target=self._write, args=(place, pending)).start()
        return pending

    def _write(self, place: Path, pending: Pending) -> None:
        try:
            write_synced(place.with_name(f"{place.name}-{dist.get_rank()}"), self._copy.bytes, self._direct)
        except BaseException as error:
            pending.error = error
        pending.durable = time.perf_counter()


def end_checkpoint_process() -> None:
    """DCP keeps one process per rank for all its saves. By itself it takes seconds to end, and so does a job that has it."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    if executor._CHECKPOINT_PROCESS is not None:
        executor._CHECKPOINT_PROCESS._save_process.kill()
        executor._CHECKPOINT_PROCESS._save_process.join()
        executor._CHECKPOINT_PROCESS = None


WAYS: Final[dict[str, Callable[[World, Copy], Way]]] = {
    "torch.save": lambda world, share: TorchSave(world),
    "dcp.save": lambda world, share: DcpSave(world),
    "dcp.async_save, thread, defaults": lambda world, share: DcpAsync(world, THREAD, None),
    "dcp.async_save, thread, kept stager": lambda world, share: DcpAsync(world, THREAD, _stager()),
    "dcp.async_save, thread, staged beside": lambda world, share: DcpAsync(world, THREAD, _stager(in_background=True)),
    "dcp.async_save, process, shared stager": lambda world, share: DcpAsync(world, PROCESS, _stager(shared=True)),
    "Lightning AsyncCheckpointIO": lambda world, share: Lightning(world),
    LIMIT: lambda world, share: Limit(share, direct=False),
    DIRECT: lambda world, share: Limit(share, direct=True),
}
"""Rows of the table, in the order of a round."""
