"""One rank's copies of its state in memory that the agent holds (``ipc.memory_copies``). A copy is a save whose rank file is
described instead of written, and without a commit: if ranks end early, the agent makes a checkpoint of the copies."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import torch

from ratchet_contract import env_vars as names
from ratchet_contract.errors import RatchetError, UserError
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.plural import pluralize
from ratchet_contract.processes import available_memory
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_store.write.block_writer import Range
from ratchet_store.write.rank_file import Piece, Written
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.copy_sources import Sources
from ratchet_worker.checkpoint.host_copy import Staging, size_of
from ratchet_worker.checkpoint.manifest_commit import Committer, Order
from ratchet_worker.checkpoint.rank_file import RankPart
from ratchet_worker.checkpoint.save import Save, SaveState
from ratchet_worker.checkpoint.threads import BackgroundThread
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.host.cpu import rank_cores
from ratchet_worker.ipc.memory_copies import Board, Result
from ratchet_worker.ipc.progress_counter import StepCounter
from ratchet_worker.state.live_memory import ChangedTooEarly

_TICK_SECONDS: Final = 0.25  # seconds of waiting between two ticks of the step counter
_POLL_SECONDS: Final = 0.0002  # seconds between two polls for the ends of the other ranks' copies
_MARGIN: Final = 1.1
"""Times the size of the copies that must be available: less would leave nothing for the rest of the training."""


def open_copies(
    launch: LaunchFile,
    rank: int,
    committer: Committer,
    counter: StepCounter,
    reporter: Reporter,
    device: torch.device,
) -> MemoryCopies | None:
    """Return this rank's copies in memory; None if the job has none. Raises ``OSError``."""
    every, path = launch.spec.checkpoint.memory_every_steps, os.environ.get(names.COPIES_FILE)
    if every is None or path is None:
        return None
    return MemoryCopies(launch, rank, every, Board(path, rank, launch.world_size), committer, counter, reporter, device)


class MemoryCopies:
    """The copies of one attempt on one rank, made every ``every`` steps."""

    def __init__(
        self,
        launch: LaunchFile,
        rank: int,
        every: int,
        board: Board,
        committer: Committer,
        counter: StepCounter,
        reporter: Reporter,
        device: torch.device,
    ) -> None:
        self._every, self._rank, self._world_size = every, rank, launch.world_size
        self._board, self._committer, self._counter, self._reporter = board, committer, counter, reporter
        self._staging = Staging(device, rank_cores(), [board.region(0), board.region(1)])
        self._part = _DescribedPart(
            JobPaths(Path(launch.job_root)), launch.attempt, rank, launch.world_size, self._staging
        )
        self._thread = BackgroundThread("ratchet-memory")
        self._has_memory = False  # checked
        self._is_failing = False  # the newest copy has failed, and this was reported
        self.save: Save | None = None  # the newest copy, which may be in progress

    def is_due(self, step: int) -> bool:
        """True if ``step`` is copied."""
        return step % self._every == 0

    def wait(self) -> set[Result | None]:
        """Wait until all ranks have ended the newest copy, and return how. Raises the error of this rank's saving thread."""
        if self.save is None:
            return set()
        while not self.save.drain(_TICK_SECONDS):
            pass  # no tick: the deadline of a step is the limit for this rank's own work
        if self.save.failure is not None:
            raise self.save.failure
        results = self._board.results()
        ticked_at = time.monotonic()
        while None in results:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() - ticked_at >= _TICK_SECONDS:
                self._counter.tick()  # another rank is behind, and its own deadline applies
                ticked_at = time.monotonic()
            results = self._board.results()
        return set(results)

    def begin(
        self,
        step: int,
        content: Content | None,
        sources: Sources | None,
        files: dict[str, Any],
        error: str | None,
        *,
        concurrent: bool,
    ) -> Save:
        """Begin the copy of ``step``, once ``wait`` has returned. ``content``, ``sources``: the captured state; None after
        ``error``. ``files``: what the agent adds to journals of event files (``EventFiles.entry``). Raises ``UserError`` if the
        machine has too little memory."""
        self.wait()
        staged, slot = None, self._board.begin()
        if sources is not None and content is not None:
            self._require_memory(size_of(sources))
            try:
                staged = self._staging.stage(sources, slot)
            except (RatchetError, OSError, MemoryError, torch.OutOfMemoryError) as error_:
                content, error = None, f"rank {self._rank}: {error_}"
        order = Order(self._board.number, step, "memory", False, time.monotonic(), concurrent)
        save = Save(order, content, staged, error, False)
        save.loop_waits = True  # compare no more replicas than every save must: the time of each step counts
        self.save = save
        self._thread.submit(lambda: self._finish(save, files))
        return save

    def _finish(self, save: Save, files: dict[str, Any]) -> None:
        """Finish and publish a copy, in the background thread. Any error fails only this copy."""
        order, result = save.order, Result.FAILED
        try:
            report, listing, _ = self._part.write_part(save)
            error = report["error"]
            if error is None and save.content is not None:
                draft = self._committer.draft(order, save.content).model_dump_json() if self._rank == 0 else None
                facts = {"report": report, "listing": listing, "draft": draft, "files": files}
                self._board.publish(order.step, self._part.nbytes, self._part.header, facts)
                result = Result.DONE
        except Exception as error_:  # any error: a copy may fail, training continues
            error = f"rank {self._rank}: {error_ if isinstance(error_, RatchetError | OSError) else repr(error_)}"
            result = Result.CHANGED if isinstance(error_, ChangedTooEarly) else Result.FAILED
        except BaseException as error_:  # must reach the loop
            save.failure, error = error_, ""
        try:
            if result is not Result.DONE and not self._is_failing:
                text = f"step {order.step} has no copy in memory: {error}"
                self._reporter.note(NoteType.MEMORY_COPY_FAILED, text, step=order.step)
            self._is_failing = result is not Result.DONE
        finally:
            self._board.set_result(result)
            save.release()
            save.progress.advance(SaveState.ENDED)

    def _require_memory(self, nbytes: int) -> None:
        """Before the first copy, raise ``UserError`` if there is too little memory for two copies of ``nbytes`` on each rank."""
        needed = int(2 * _MARGIN * nbytes * self._world_size)
        if not self._has_memory and (free := available_memory.available()) is not None and needed > free:
            raise UserError(
                f"checkpoint.memory_every_steps: two copies of the state of {pluralize(self._world_size, 'rank')} need "
                f"{needed / 2**20:.0f} MiB of memory, and {free / 2**20:.0f} MiB are available: remove it, or give the job more "
                "memory"
            )
        self._has_memory = True


class _DescribedPart(RankPart):
    """Describes the rank file of each copy instead of writing it. ``header``: of the last file; ``nbytes``: of its data."""

    header, nbytes = b"", 0

    def _write_file(
        self, save: Save, pieces: list[Piece], data: memoryview, state: dict[str, Any], ranges: list[Range]
    ) -> Written:
        self.header, written = self._writer.describe(pieces, data, state, ranges)
        self.nbytes = len(data)
        return written
