"""The saving thread of one rank: finishes the copies, has the rank file written, reports, and waits for the verdict; rank 0's
thread commits. The next save is written after older checkpoints have been deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.host_copy import Staging
from ratchet_worker.checkpoint.manifest_commit import Committer, Verdict, write_progress
from ratchet_worker.checkpoint.rank_file import RankPart
from ratchet_worker.checkpoint.save import Progress, Save, SaveState
from ratchet_worker.checkpoint.threads import BackgroundThread
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.state import replica_divergence
from ratchet_worker.state.live_memory import ChangedTooEarly

MAX_FAILURES: Final = 3


class Saver:
    """The thread that makes one rank's saves; the constructor starts it. ``give_up``: called in this thread, on rank 0, after too
    many failed saves in a row."""

    def __init__(
        self,
        launch: LaunchFile,
        exchange: Exchange,
        reporter: Reporter,
        committer: Committer,
        staging: Staging,
        give_up: Callable[[], None],
    ) -> None:
        # ``exchange`` has a store client of its own: a waiting client blocks every other caller
        self._launch, self._exchange, self._reporter, self._committer = launch, exchange, reporter, committer
        self._staging, self._give_up = staging, give_up
        job = JobPaths(Path(launch.job_root))
        self._part = RankPart(job, launch.attempt, exchange.rank, exchange.world_size, staging)
        self._queue: SimpleQueue[Save | int] = SimpleQueue()
        self._timeout = 2 * launch.deadlines.step + 60
        self._failures = 0
        self._published_names: list[str] = []  # names of saves whose verdicts are in the store
        self._late_error: BaseException | None = None  # an error after the loop received the verdict
        self._retention_thread = BackgroundThread("ratchet-retention") if exchange.rank == 0 else None
        self._thread = threading.Thread(target=self._run, name="ratchet-saver", daemon=True)
        self._thread.start()

    def reserve(self, nbytes: int) -> None:
        """Have the saving thread allocate a buffer of ``nbytes`` for the first save. Returns at once."""
        self._queue.put(nbytes)

    def submit(self, save: Save) -> None:
        """Hand ``save`` over to the saving thread, and return at once. ``save.is_done`` says when it has ended."""
        self._queue.put(save)

    def _run(self) -> None:
        """The thread's main loop: do the submitted work in order. An error of a save is kept in ``save.failure``."""
        while True:
            work = self._queue.get()
            if isinstance(work, int):
                with suppress(MemoryError):  # the first save reports it
                    self._staging.reserve(work)
                continue
            clearing = False
            try:
                clearing = self._save(work)
            except BaseException as error:  # must reach the loop
                if work.is_done:
                    self._late_error = error
                work.failure = error
            finally:
                _mark_done(work)
                work.drop_state()
                if not clearing:
                    work.progress.advance(SaveState.ENDED)
            del work

    def _save(self, save: Save) -> bool:
        """Do one save, and store the verdict in ``save``. Returns True if older checkpoints are still being deleted. An error in
        this rank's part of the save is not raised: it becomes the error of the verdict."""
        order, rank = save.order, self._exchange.rank
        try:
            report, listing, summary = self._part.write_part(save)
            if summary is not None:
                self._reporter.report_saved_hook(summary)
        except Exception as error:  # any error: a save may fail, training continues
            text = str(error) if isinstance(error, RatchetError | OSError | MemoryError) else repr(error)
            report = {"error": f"rank {rank}: {text}", "early": isinstance(error, ChangedTooEarly)}
            listing = ""
        save.release()
        save.wait_for_previous()
        if self._late_error is not None:
            raise self._late_error
        verdict: Verdict = {}
        if rank != 0:
            self._exchange.post(order.name, report, listing)
        else:
            self._exchange.post_locally(order.name, report, listing)
            verdict = self._committer.decide(order, save.content, lambda: save.stall)
            self._failures = 0 if verdict["error"] is None else self._failures + 1
            verdict["failures"] = self._failures
            if verdict["error"] is not None and "diverged" not in verdict:
                self._reporter.report_checkpoint_failed(order.step, verdict["error"])
        # Rank 0 may wait for the last report until the deadline.
        save.verdict = self._exchange.broadcast(
            f"{order.name}/verdict",
            verdict,
            timeout=self._timeout,
            progress=lambda: write_progress(self._part.directory(save)),
            is_recurring=True,
        )
        if "diverged" in save.verdict and save.content is not None:
            save.verdict["error"] += f". {self._likely_cause(order.name, save, save.content)}"
            if rank == 0:
                self._reporter.report_checkpoint_failed(order.step, save.verdict["error"])
        return self._retention_thread is not None and self._clean_up(save, self._retention_thread)

    def _likely_cause(self, order: str, save: Save, content: Content) -> str:
        """Return the likely cause of replicas that differ, the same text on all ranks. All ranks must call it."""
        name = save.verdict["diverged"]
        mine = replica_divergence.facts(content.snapshot, content.summary, content.start, name)
        return replica_divergence.cause(name, self._exchange.gather(f"{order}/cause", mine, timeout=self._timeout))

    def _clean_up(self, save: Save, retention_thread: BackgroundThread) -> bool:
        """Clean up after the verdict, on rank 0: delete older checkpoints, or call ``give_up`` after too many failures. True if
        checkpoints are still being deleted."""
        self._published_names.append(save.order.name)
        if save.verdict["error"] is None:
            if save.thorough:
                self._committer.retain()
            else:
                _mark_done(save)
            # all ranks are past these saves, since they have reported for this one
            for name in self._published_names[:-1]:
                self._exchange.delete(name)
                self._exchange.delete_broadcast(f"{name}/verdict")
            self._published_names = self._published_names[-1:]
            if not save.thorough:
                progress = save.progress  # not the save, whose state must not stay in memory
                retention_thread.submit(lambda: self._delete_older(progress))
                return True
        elif save.verdict["failures"] >= MAX_FAILURES and not save.verdict.get("parted"):
            self._give_up()
        return False

    def _delete_older(self, progress: Progress) -> None:
        """Call ``Committer.retain``, then end the save. An error is kept, and the next save raises it, if there is one."""
        try:
            self._committer.retain()
        except BaseException as error:  # must reach the loop
            self._late_error = error
        finally:
            progress.advance(SaveState.ENDED)


def _mark_done(save: Save) -> None:
    """Release the loop, record the duration and set the state ``RETAINING``. Only the first of two calls has an effect."""
    if not save.is_done:
        save.release()
        save.seconds = time.monotonic() - save.order.started_at
        save.progress.advance(SaveState.RETAINING)
