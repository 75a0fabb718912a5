"""The saving thread of one rank: sees to the copies and the rank file, tells, waits for the verdict; rank 0's commits.

One save at a time, but for the deleting of older checkpoints: the next save is copied beside it, and written behind it. It has a
store client of its own: a waiting client blocks every other caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from ratchet_contract.errors import RatchetError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_worker import divergence
from ratchet_worker.aside import Aside
from ratchet_worker.commitment import Committer, Verdict, written
from ratchet_worker.content import Content
from ratchet_worker.exchange import Exchange
from ratchet_worker.latch import Latch
from ratchet_worker.live_memory import ChangedTooEarly
from ratchet_worker.rank_part import RankPart
from ratchet_worker.reporter import Reporter
from ratchet_worker.save import Save
from ratchet_worker.staging import Staging
from ratchet_worker.turns import take_turns_late

MAX_FAILURES: Final = 3


class Saver:
    """``give_up`` is called (rank 0, in this thread) behind the third failure in a row."""

    def __init__(
        self,
        launch: LaunchFile,
        exchange: Exchange,
        reporter: Reporter,
        committer: Committer,
        staging: Staging,
        give_up: Callable[[], None],
    ) -> None:
        self._launch, self._exchange, self._reporter, self._committer = launch, exchange, reporter, committer
        self._staging, self._give_up = staging, give_up
        job = JobPaths(Path(launch.job_root))
        self._part = RankPart(job, launch.epoch, exchange.rank, exchange.world_size, staging)
        self._work: SimpleQueue[Save | int] = SimpleQueue()
        self._patience = 2 * launch.deadlines.step + 60
        self._failures = 0
        self._told: list[str] = []  # saves whose verdicts are in the store
        self._late: BaseException | None = None  # came when the loop had been told the verdict
        self._clearing = Aside("ratchet-retention") if exchange.rank == 0 else None
        self._thread = threading.Thread(target=self._run, name="ratchet-saver", daemon=True)
        self._thread.start()

    def reserve(self, nbytes: int) -> None:
        """Have room for the next copies, before they are due."""
        self._work.put(nbytes)

    def submit(self, save: Save) -> None:
        self._work.put(save)

    def _run(self) -> None:
        take_turns_late()
        while True:
            work = self._work.get()
            if isinstance(work, int):
                with suppress(MemoryError):  # told by the first save
                    self._staging.reserve(work)
                continue
            clearing = False
            try:
                clearing = self._save(work)
            except BaseException as error:  # must reach the loop
                if work.done.is_set():
                    self._late = error
                work.failure = error
            finally:
                _end(work)
                if not clearing:
                    work.settled.set()
            del work  # and with it what it holds of the state, which is not to lie here until the next

    def _save(self, save: Save) -> bool:
        """Is something still done for it, which ``settled`` tells the end of?"""
        order, rank = save.order, self._exchange.rank
        try:
            report, listing = self._part.made(save, self._reporter)
        except Exception as error:  # whatever it is: a save may fail, the training goes on
            text = str(error) if isinstance(error, RatchetError | OSError | MemoryError) else repr(error)
            report = {"error": f"rank {rank}: {text}", "early": isinstance(error, ChangedTooEarly)}
            listing = ""
        save.release()
        save.wait_its_turn()
        if self._late is not None:
            raise self._late
        verdict: Verdict = {}
        if rank != 0:
            self._exchange.post(order.name, report, listing)
        else:
            self._exchange.keep(order.name, report, listing)
            verdict = self._committer.decide(order, save.content, save.stall)
            self._failures = 0 if verdict["error"] is None else self._failures + 1
            verdict["failures"] = self._failures
            if verdict["error"] is not None and "diverged" not in verdict:
                self._reporter.checkpoint_failed(order.step, verdict["error"])
        # Rank 0 may wait for the last report for as long as the deadline says.
        save.verdict = self._exchange.broadcast(
            f"{order.name}/verdict",
            verdict,
            timeout=self._patience,
            progress=lambda: written(self._part.directory(save)),
            recurs=True,
        )
        if "diverged" in save.verdict and save.content is not None:
            save.verdict["error"] += f". {self._likely_cause(order.name, save, save.content)}"
            if rank == 0:
                self._reporter.checkpoint_failed(order.step, save.verdict["error"])
        return self._clearing is not None and self._settle(save, self._clearing)

    def _likely_cause(self, order: str, save: Save, content: Content) -> str:
        """Of replicas that differ; the same on all ranks."""
        name = save.verdict["diverged"]
        mine = divergence.facts(content.snapshot, content.summary, content.start, name)
        return divergence.cause(name, self._exchange.gather(f"{order}/cause", mine, timeout=self._patience))

    def _settle(self, save: Save, clearing: Aside) -> bool:
        """Rank 0, when all are told: clear away. All ranks are past the save before this one, since they have reported. Who
        trains on need not wait for it, also where that begins the next save. Is it still under way?"""
        self._told.append(save.order.name)
        if save.verdict["error"] is None:
            if save.thorough:
                self._committer.retain()
            else:
                _end(save)
            for name in self._told[:-1]:
                self._exchange.forget(name)
                self._exchange.forget_broadcast(f"{name}/verdict")
            self._told = self._told[-1:]
            if not save.thorough:
                settled = save.settled
                clearing.begin(lambda: self._clear(settled))
                return True
        elif save.verdict["failures"] >= MAX_FAILURES and not save.verdict.get("parted"):
            self._give_up()
        return False

    def _clear(self, settled: Latch) -> None:
        try:
            self._committer.retain()
        except BaseException as error:  # must reach the loop
            self._late = error
        finally:
            settled.set()


def _end(save: Save) -> None:
    """The loop may know how it went. Of two calls the first counts."""
    if not save.done.is_set():
        save.release()
        save.seconds = time.monotonic() - save.order.begun
        save.done.set()
