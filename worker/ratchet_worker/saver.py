"""The saving thread of one rank: copies what the loop need not wait for, writes the rank file, tells, waits for the verdict.

One save at a time. The heavy work (memory copies, XXH3, write, fsync) runs without the GIL, so that a process of its own would
gain nothing. It has a store client of its own: a waiting client blocks every other caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from ratchet_contract.errors import RatchetError
from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_hooks.summary import HookSummary
from ratchet_store.rankfile import Piece, RankWriter, Written
from ratchet_store.slices import Slice
from ratchet_worker import fingerprint
from ratchet_worker.aside import Aside, Call
from ratchet_worker.commitment import Committer, Order, Verdict, written
from ratchet_worker.content import Content
from ratchet_worker.disk import Disk
from ratchet_worker.exchange import Exchange
from ratchet_worker.reporter import Reporter
from ratchet_worker.snapshot import Until
from ratchet_worker.staging import Staged, Staging

MAX_FAILURES: Final = 3
_LET_GO: Final = 0.001
"""Seconds in which a loop that was let go takes Python's lock, before two threads of a save want it: behind them it would wait
for a switch interval, which is five times as long (``sys.getswitchinterval``)."""


@dataclass
class Save:
    """One save on one rank. ``content`` and ``staged`` None: ``error`` says why there is nothing to write. ``thorough``: the
    replicas are compared wholly, since nothing is trained meanwhile. ``stall``: seconds that the loop stood still for it."""

    order: Order
    content: Content | None
    staged: Staged | None
    error: str | None
    thorough: bool
    stall: float = 0.0
    hurry: threading.Event = field(default_factory=threading.Event)  # set: the loop waits for the tensors
    released: threading.Event = field(
        default_factory=threading.Event
    )  # set: the live tensors are not looked at any more
    done: threading.Event = field(default_factory=threading.Event)
    verdict: Verdict = field(default_factory=dict)
    failure: BaseException | None = None  # of the exchange: there is no verdict
    seconds: float = 0.0

    def hold(self, until: Until) -> float:
        """Before this kind of tensor changes: wait until it is copied, and nobody reads it. Seconds. On CUDA a save that is
        released is copied by the host's account only: until it is done the present stream waits, too."""
        if self.staged is None or self.done.is_set():
            return 0.0
        begun = time.perf_counter()
        if until is Until.STEP:
            self.hurry.set()
        self.staged.wait(until)
        if until is Until.STEP:
            self.staged.wait(Until.BACKWARD)
            self.released.wait()
        seconds = time.perf_counter() - begun
        self.stall += seconds
        return seconds

    def release(self) -> None:
        """The live tensors are not looked at any more, be they copied or not."""
        if self.staged is not None:
            self.staged.abandon()
        self.released.set()


class Saver:
    """``plan``: the shared tensors' slices by part. ``give_up`` is called (rank 0, in this thread) behind the third failure in a
    row."""

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
        self._writer = RankWriter(exchange.rank, exchange.world_size)
        self._aside = Aside("ratchet-writer")
        self._cuts = fingerprint.Cuts()
        self._job = JobPaths(Path(launch.job_root))
        self._disk = Disk(self._job.checkpoints)
        self._work: SimpleQueue[Save | int] = SimpleQueue()
        self._failures = 0
        self._told: list[str] = []  # saves whose verdicts are in the store
        self._thread = threading.Thread(target=self._run, name="ratchet-saver", daemon=True)
        self._thread.start()

    def reserve(self, nbytes: int) -> None:
        """Have room for the next copies, before they are due."""
        self._work.put(nbytes)

    def submit(self, save: Save) -> None:
        self._work.put(save)

    def directory(self, order: Order) -> Path:
        return self._job.checkpoint(order.step, self._launch.epoch)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if isinstance(work, int):
                with suppress(MemoryError):  # told by the first save
                    self._staging.reserve(work)
                continue
            try:
                self._save(work)
            except BaseException as error:  # must reach the loop
                work.failure = error
            finally:
                work.release()
                work.seconds = time.monotonic() - work.order.begun
                work.done.set()
            del work  # and with it what it holds of the state, which is not to lie here until the next

    def _save(self, save: Save) -> None:
        order, rank = save.order, self._exchange.rank
        try:
            report, listing = self._report(save)
        except (RatchetError, OSError, MemoryError) as error:
            report, listing = {"error": f"rank {rank}: {error}"}, ""
        save.release()
        self._exchange.post(order.name, report, listing)
        verdict: Verdict = {}
        if rank == 0:
            verdict = self._committer.decide(order, save.content, save.stall)
            self._failures = 0 if verdict["error"] is None else self._failures + 1
            verdict["failures"] = self._failures
            if verdict["error"] is not None:
                self._reporter.checkpoint_failed(order.step, verdict["error"])
        # Rank 0 may wait for the last report for as long as the deadline says.
        save.verdict = self._exchange.broadcast(
            f"{order.name}/verdict",
            verdict,
            timeout=2 * self._launch.deadlines.step + 60,
            progress=lambda: written(self.directory(order)),
        )
        if rank == 0:
            self._settle(save)

    def _settle(self, save: Save) -> None:
        """Rank 0, when all are told: clear away. All ranks are past the save before this one, since they have reported."""
        self._told.append(save.order.name)
        if save.verdict["error"] is None:
            self._committer.retain()
            for name in self._told[:-1]:
                self._exchange.forget(name)
                self._exchange.forget_broadcast(f"{name}/verdict")
            self._told = self._told[-1:]
        elif save.verdict["failures"] >= MAX_FAILURES and not save.verdict.get("parted"):
            self._give_up()

    def _report(self, save: Save) -> tuple[dict[str, Any], str]:
        """Copy, compare, write: what this rank tells of its part, and its list of tensors as JSON. Raises what fails only this
        save."""
        content, staged = save.content, save.staged
        if content is None or staged is None:
            return {"error": save.error}, ""
        staged.finish()
        self._disk.insist()
        plan = self._cuts.of(content.snapshot.sizes(), content.parts or 1)
        hurried = _hurried(save)
        # A loop that waits is let go first: it would wait for what the writer does in Python, too.
        writing = None if hurried else self._writing(save.order, staged, content)
        try:
            seen = self._compared(save, content, plan)
            save.released.set()
            if hurried:
                time.sleep(_LET_GO)
            writing = writing or self._writing(save.order, staged, content)
            parts = self._own_parts(content, staged, plan)
            summary = self._summary(content, staged)
            self._writer.help()
        finally:
            save.release()  # before all: the disk may hang
            written = None if writing is None else writing.result()
        assert written is not None
        self._reporter.saved_hook(summary)
        report = {
            "error": None,
            "step": save.order.step,
            "finished": save.order.finished,
            "file": written.file.model_dump(),
            "parts": parts,
            "seen": seen,
            "summary": summary.model_dump_json(),
        }
        return report, written.listing

    def _writing(self, order: Order, staged: Staged, content: Content) -> Call[Written]:
        pieces, data = staged.written()
        return self._aside.begin(lambda: self._write(order, pieces, data, content))

    def _write(self, order: Order, pieces: Sequence[Piece], data: memoryview, content: Content) -> Written:
        written = self._writer.write(self.directory(order), pieces, data, content.snapshot.state)
        self._disk.insist()
        return written

    def _compared(self, save: Save, content: Content, plan: Sequence[Sequence[Slice]]) -> dict[int, list[str]]:
        """Digests of what others write, of the live tensors, for as long as these stay as they are."""
        if not content.parts:
            return {}
        rank, world = self._exchange.rank, self._exchange.world_size
        with self._staging.beside():
            return fingerprint.compared(
                plan,
                content.snapshot.shared,
                rank,
                world,
                save.order.number,
                fingerprint.nbytes_of(content.snapshot.sizes()),
                lambda: _hurried(save),
            )

    def _own_parts(self, content: Content, staged: Staged, plan: Sequence[Sequence[Slice]]) -> list[list[str]]:
        """Digests of the slices of the parts that this rank writes, of the copies."""
        rank, world, parts = self._exchange.rank, self._exchange.world_size, content.parts
        copies = staged.copies(SHARED_PREFIX)
        own = plan[rank * parts // world : (rank + 1) * parts // world]
        return [fingerprint.copied_digests(slices, copies) for slices in own]

    def _summary(self, content: Content, staged: Staged) -> HookSummary:
        copies = staged.tensors(f"{RANK_PREFIX}{self._exchange.rank}/hook/")
        return content.summary.model_copy(update={"residual_norm": content.norm_of(copies)})


def _hurried(save: Save) -> bool:
    """Does the loop wait for the live tensors?"""
    return save.hurry.is_set() and not save.thorough
