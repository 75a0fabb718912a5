"""One rank's part of a save: its file, its report, and digests of parts of its replica that other ranks write. Threads of low
priority do a part of the work during training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from ratchet_contract.checkpoint.manifest import HOOK_SUMMARY, RANK_PREFIX, SHARED_PREFIX
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import JobPaths
from ratchet_hooks.summary import HookSummary
from ratchet_store.filesystem.durable_io import NOT_WRITTEN
from ratchet_store.format.shard_slices import Slice
from ratchet_store.write.block_writer import Range
from ratchet_store.write.rank_file import Piece, RankWriter, Written
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.host_copy import Staged, Staging
from ratchet_worker.checkpoint.save import Save, SaveState
from ratchet_worker.checkpoint.threads import BackgroundThread, Call
from ratchet_worker.state import replica_digests
from ratchet_worker.state.environment import NOT_EXACT
from ratchet_worker.state.live_memory import SafeReader


class Disk:
    """Detects that ``directory`` has moved to another file system, for example after ``umount -l``. The file system is
    recorded when this object is created or, after an error, at the first successful check."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._device: int | None = None
        with suppress(OSError):  # ``check_same_device`` tries again
            self._device = device_number(directory)

    def check_same_device(self) -> None:
        """Raise ``CheckpointError`` if the directory is on another file system now, ``OSError`` if the file system cannot be
        determined."""
        found = device_number(self._directory)
        if self._device is None:
            self._device = found
        elif found != self._device:
            raise CheckpointError(
                f"{self._directory} is on another file system than when the attempt began: that one was unmounted, or "
                "another was mounted over it. Mount it again, and start the job again; older checkpoints are on it",
                code=NOT_WRITTEN,
            )


def device_number(path: Path) -> int:
    """Return the device number of ``path``, or, if it does not exist, of its nearest existing parent. Raises ``OSError``."""
    while True:
        try:
            return path.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            if path == path.parent:
                raise
            path = path.parent


_GIL_RELEASE_SECONDS: Final = 0.001
"""Seconds in which a released loop takes the GIL before two threads of a save want it: after them, it would wait for a switch
interval, which is five times as long (``sys.getswitchinterval``)."""
_QUIET_WRITE_SECONDS: Final = 1.0
"""Seconds, during training, after which a file that is still being written is not left to the quiet threads alone any more: on a
machine whose processors are all busy they might never finish."""


class _Looked(NamedTuple):
    """Digests of parts that other ranks write, by part number, and the hook's summary."""

    digests: dict[int, list[str]]
    summary: HookSummary


class _Own(NamedTuple):
    """The parts that this rank writes, and the byte ranges of their slices in the data of its file."""

    layout_key: object
    plan: object
    parts: Sequence[Sequence[Slice]]
    ranges: list[Range]

    def by_part(self, digests: Sequence[str]) -> list[list[str]]:
        """Return ``digests``, one per slice, as a list per part."""
        left = iter(digests)
        return [[*islice(left, len(slices))] for slices in self.parts]


class RankPart:
    """One rank's part of each save: finishing the copy, digests for comparing replicas, and the rank's file."""

    def __init__(self, job: JobPaths, attempt: int, rank: int, world_size: int, staging: Staging) -> None:
        self._job, self._attempt, self._rank, self._world_size = job, attempt, rank, world_size
        self._staging, self._cuts = staging, replica_digests.Cuts()
        self._writer, self._reader = RankWriter(rank, world_size), SafeReader()
        self._disk = Disk(job.checkpoints)
        self._prompt_thread = BackgroundThread("ratchet-writer")
        self._quiet_threads = (
            BackgroundThread("ratchet-quiet-writer", quiet=True),
            BackgroundThread("ratchet-quiet-digests", quiet=True),
        )
        self._own: _Own | None = None

    def directory(self, save: Save) -> Path:
        """Return the directory of the checkpoint that ``save`` makes."""
        return self._job.checkpoint(save.order.step, self._attempt)

    def write_part(self, save: Save) -> tuple[dict[str, Any], str, HookSummary | None]:
        """Finish the copy, write this rank's file, and compute digests for comparing replicas. Returns this rank's report for
        rank 0, the list of its tensors as JSON text, and the hook's summary. If ``save`` has nothing to write, the report has
        only ``save.error``. Blocks until the file is on the disk. Raises any error of these steps."""
        content, staged = save.content, save.staged
        if content is None or staged is None:
            return {"error": save.error}, "", None
        staged.finish()
        seen = None
        if save.is_hurried:  # release the loop first: else it would also wait for other threads' Python code
            seen = self._compare(save, content)
            save.progress.advance(SaveState.WRITING)
            time.sleep(_GIL_RELEASE_SECONDS)
        own = self._own_parts(content, staged)
        writing = self._begin_write(save, staged, content, own)
        try:
            if save.thorough:
                looked = self._compare_and_summarize(save, content, staged, seen)
            else:
                call = self._quiet_threads[1].submit(lambda: self._compare_and_summarize(save, content, staged, seen))
                save.wait_for_previous()
                save.wait_until_awaited_or_written(_QUIET_WRITE_SECONDS)
                self._writer.help()
                looked = call.result()
            self._writer.help()
        finally:
            save.release()  # before the result: the disk may hang
            written = writing.result()
        save.require_intact()
        report = {
            "error": None,
            "step": save.order.step,
            "finished": save.order.finished,
            "file": written.file.model_dump(),
            "parts": own.by_part(written.digests),
            "seen": looked.digests,
            "summary": HOOK_SUMMARY.dump_json(looked.summary).decode(),
            "not_exact": {key: mark for key, mark in content.environment.items() if key == NOT_EXACT},
        }
        return report, written.tensors_json, looked.summary

    def _begin_write(self, save: Save, staged: Staged, content: Content, own: _Own) -> Call[Written]:
        """Begin to write this rank's file in another thread, after the previous save's deletions, and return the call."""
        pieces, data = staged.data_to_write()

        def write() -> Written:
            """Write the file and return what was written. Calls ``save.set_file_written``, also after an error."""
            try:
                save.wait_for_previous()
                return self._write_file(save, pieces, data, content.snapshot.state, own.ranges)
            finally:
                save.set_file_written()

        return (self._prompt_thread if save.thorough else self._quiet_threads[0]).submit(write)

    def _write_file(
        self, save: Save, pieces: list[Piece], data: memoryview, state: dict[str, Any], ranges: list[Range]
    ) -> Written:
        """Write this rank's file. Arguments and result as those of ``RankWriter.write``, which raises."""
        self._disk.check_same_device()
        written = self._writer.write(self.directory(save), pieces, data, state, ranges)
        self._disk.check_same_device()
        return written

    def _compare_and_summarize(
        self, save: Save, content: Content, staged: Staged, digests: dict[int, list[str]] | None
    ) -> _Looked:
        """Return digests of the parts that other ranks write, and the hook's summary. ``digests``: those computed before; None:
        compute them now. The save goes on to ``WRITING`` when no live tensor is needed any more, also after an error."""
        try:
            digests = self._compare(save, content) if digests is None else digests
        finally:
            save.progress.advance(SaveState.WRITING)
        return _Looked(digests, self._summary(content, staged))

    def _compare(self, save: Save, content: Content) -> dict[int, list[str]]:
        """Return digests of the parts that other ranks write, by part number, computed from the live tensors. Some parts may be
        left out if ``save.is_hurried``."""
        if not content.parts:
            return {}
        sizes = content.snapshot.sizes()
        with self._staging.reading_context():
            return replica_digests.compare_parts(
                self._plan(content), content.snapshot.shared, self._rank, self._world_size, save.order.number,
                replica_digests.total_bytes(sizes), lambda: save.is_hurried, self._reader,
            )  # fmt: skip

    def _own_parts(self, content: Content, staged: Staged) -> _Own:
        """Return the parts that this rank writes. The result is the same object as before while layout and plan are the same
        objects."""
        rank, world, parts, plan = self._rank, self._world_size, content.parts, self._plan(content)
        if self._own is None or self._own.layout_key is not staged.layout_key or self._own.plan is not plan:
            own = plan[rank * parts // world : (rank + 1) * parts // world]
            ranges = staged.ranges(SHARED_PREFIX, chain.from_iterable(own))
            self._own = _Own(staged.layout_key, plan, own, ranges)
        return self._own

    def _plan(self, content: Content) -> Sequence[Sequence[Slice]]:
        """Return the slices of the shared tensors, by part, in which replicas are compared."""
        return self._cuts.plan(content.snapshot.sizes(), content.parts or 1)

    def _summary(self, content: Content, staged: Staged) -> HookSummary:
        """Return the hook's summary with the norm of the residuals, computed from the copies of the hook's tensors."""
        copies = staged.tensors(f"{RANK_PREFIX}{self._rank}/hook/")
        return replace(content.summary, residual_norm=content.norm_of(copies))
