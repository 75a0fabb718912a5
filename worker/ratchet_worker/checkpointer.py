"""Saving, as the loop sees it: hand over at a step boundary, go on, wait only where what is not copied yet is about to change.

Every rank writes its file in a thread of its own, rank 0's commits the manifest; no collective takes part (``saver``,
``commitment``). A rank that dies or is stuck while a checkpoint is made only fails this checkpoint. What failed is told, and work
goes on; the third failure in a row ends the attempt, after the same step on all ranks, since a job that cannot save will lose
what it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.manifest import SHARED_PREFIX
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_contract.resume import Base
from ratchet_hooks.errors import HookStateError
from ratchet_worker.audit import Audit
from ratchet_worker.commitment import Committer, Order, written
from ratchet_worker.content import Content
from ratchet_worker.cores import own_cores
from ratchet_worker.counter import Stage, StepCounter
from ratchet_worker.due import Due
from ratchet_worker.exchange import Exchange
from ratchet_worker.fingerprint import Cuts
from ratchet_worker.imports import uncollected
from ratchet_worker.latch import Latch
from ratchet_worker.model_state import MODEL
from ratchet_worker.reporter import Reason, Reporter
from ratchet_worker.save import Save
from ratchet_worker.save_cost import expected_seconds
from ratchet_worker.saver import MAX_FAILURES, Saver
from ratchet_worker.snapshot import Snapshot, Until
from ratchet_worker.sources import Lister
from ratchet_worker.staging import Staging, size_of

_LOOK: Final = 0.25  # seconds between two signs of life while a save is waited for
_PAUSE: Final = 1.0  # seconds between two tries to save a job's end
_SETTLING: Final = 10.0  # seconds that an attempt's end waits for older checkpoints to be deleted


@dataclass(frozen=True)
class Outcome:
    """``error`` None: committed."""

    error: str | None = None


class Checkpointer:
    """Saves of one attempt on one rank; all methods are the loop's thread's. ``last``: the newest checkpoint of this attempt, or
    what it started from. ``give_up``: rank 0's, from the saving thread: too many saves have failed. ``early``: the job has no
    checkpoint yet, and may have one before the first scheduled (``checkpoint.first``)."""

    def __init__(
        self,
        launch: LaunchFile,
        exchange: Exchange,
        saving: Exchange,
        counter: StepCounter,
        reporter: Reporter,
        base: Base,
        device: torch.device,
        give_up: Callable[[], None],
        *,
        early: bool = False,
    ) -> None:
        self._spec, self._launch = launch.spec.checkpoint, launch
        self._exchange, self._counter, self._reporter = exchange, counter, reporter
        self._rank, self._world_size, self._device = exchange.rank, exchange.world_size, device
        self._staging, self._cuts, self._lister = Staging(device, own_cores()), Cuts(), Lister(exchange.rank)
        self._committer = Committer(launch, saving, reporter, base)
        self._saver = Saver(launch, saving, reporter, self._committer, self._staging, give_up)
        self._due = Due(self._spec, exchange, reporter, base.step, early=early)
        self._schedule = self._due.schedule
        staging = self._spec.staging
        self._overlapped = staging == "overlapped" or (staging == "auto" and launch.spec.task is not None)
        self._first = True  # no boundary of this attempt yet
        self._early_step: int | None = None  # saved before the first scheduled one
        self._early_seconds: float | None = None  # that it is expected to take
        self._audit: Audit | None = None
        self._tried = False  # in full, what may be copied beside a step
        self._save: Save | None = None
        self._settled: Latch | None = None  # of the last save
        self._numbers = 0
        self._stall = 0.0  # of the open step
        self._failure: str | None = None
        self._given_up = ""
        self.last = base

    # --- the loop's boundaries and gates -------------------------------------------------------------------------------

    def boundary(self, step: int, late: Callable[[], tuple[Snapshot, int]], content: Callable[[], Content]) -> None:
        """After every step but the last: begin a save if one is due. ``late``: the parameters and the optimizer's tensors, and
        about how many bytes a rank saves beside them.

        Raises ``UserError`` for a hook's state that cannot be stored, ``CheckpointError`` where a save is stuck.
        """
        self._look()
        if self._schedule is not None:
            self._schedule.boundary(self._save is not None, self._stall)
        self._stall = 0.0
        if step >= self._due.next:
            # A scheduled save is not left out for the one before the first.
            busy = self._save is not None and self._save.order.reason != "first"
            reason = self._due.at(step, busy, self.drain, lambda: self._expected(late))
            if reason is not None:
                self._early_step = step if reason == "first" else self._early_step
                self.begin(step, reason, content)
        if self._first and self._due.next != math.inf:
            self._prepare(*late())
        self._first = False

    def hold(self, until: Until, *, trial: bool = True) -> None:
        """Before this kind of tensor changes: wait for its copy, if one is being made. Any thread of a backward pass, too.
        ``trial`` False: what changes comes back as it was, so that the trial of the step goes on behind it."""
        save = self._save
        if save is not None:
            self._stall += save.hold(until)
        if trial and self._audit is not None and until is Until.STEP:
            self._end_audit(self._audit)

    def resumed(self) -> None:
        """A step begins; what was between it and the one before is not its time."""
        self._stall = 0.0
        if self._schedule is not None:
            self._schedule.resumed()

    # --- acting together -----------------------------------------------------------------------------------------------

    def begin(self, step: int, reason: Reason, content: Callable[[], Content]) -> None:
        """Begin to save ``step``, behind the save before; how it goes is told later, and nobody waits for it. It is copied before
        the next step where that is asked for, or no trial was made."""
        self.drain()
        if self._given_up:  # the same on all ranks: the stop that follows from it is being agreed on
            return
        beside = self._overlapped and self._tried
        self._begin(step, reason, False, content, thorough=False, beside=beside)
        if self._save is not None and not beside:
            self._save.hold(Until.STEP)

    def save(
        self, step: int, reason: Reason, finished: bool, content: Callable[[], Content], left: float | None = None
    ) -> Outcome:
        """Save ``step`` on every rank and wait for it; the outcome is the same on all. ``left``: seconds until the processes are
        killed; a save that takes longer is not begun. Raises ``CheckpointError`` for the third failure in a row (``finished``:
        tried three times), ``UserError`` for a hook's state that cannot be stored and where only some ranks have ``finished``."""
        self._counter.stage(Stage.CHECKPOINTING)
        self.drain()
        if self._given_up:
            raise self.too_many_failures
        late = self._too_late(left) if reason == "stop" else None
        if late is not None:
            return Outcome(late)
        while True:
            self._begin(step, reason, finished, content, thorough=True)
            failures = self.drain()
            if failures >= MAX_FAILURES:
                raise self.too_many_failures
            if failures == 0 or not finished:
                break
            time.sleep(_PAUSE)
        self._counter.stage(Stage.TRAINING)
        return Outcome(self._failure)

    def drain(self) -> int:
        """Wait for the save that is under way, if any; returns how many have failed in a row by then."""
        if self._save is None:
            return 0
        self._await(self._save)
        return self._look()

    def settle(self) -> None:
        """At the end: wait until older checkpoints are deleted, and that is told. Not for long: what is left is the service's."""
        end = time.monotonic() + _SETTLING
        while self._settled is not None and not self._settled.wait(_LOOK) and time.monotonic() < end:
            self._counter.tick()

    @property
    def too_many_failures(self) -> CheckpointError:
        return CheckpointError(f"{MAX_FAILURES} saves in a row failed, the last at {self._given_up}")

    @property
    def overlapped(self) -> bool:
        """May something be copied beside a step? Else no save is begun without being copied."""
        return self._overlapped

    @property
    def judged(self) -> int | None:
        """Step of the save that is under way, or of the last one that was committed; None for the one before the first
        scheduled, which is kept by no metric."""
        step = self.last.step if self._save is None else self._save.order.step
        return None if step == self._early_step else step

    def metric(self, step: int, values: dict[str, float]) -> None:
        """What rank 0 logged at ``step``: the best checkpoints are kept by it."""
        self._committer.metric(step, values)

    def finish(self) -> None:
        """The newest checkpoint of this attempt was the job's last. Raises ``CheckpointError``."""
        self.settle()
        self._committer.finish()

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _expected(self, late: Callable[[], tuple[Snapshot, int]]) -> float | None:
        """Rank 0's: seconds that the save before the first scheduled one is expected to take, by what saves of this job took, or
        by the disk's speed. None: something was saved, so that it is not wanted any more."""
        if self._numbers:
            return None
        if self._early_seconds is None:
            snapshot, private = late()
            size = sum(number * width for _, number, width in snapshot.sizes()) + self._world_size * private
            scratch = JobPaths(Path(self._launch.job_root)).attempt(self._launch.epoch).root
            self._early_seconds = self._launch.save_seconds or expected_seconds(scratch, size)
        return self._early_seconds

    def _too_late(self, left: float | None) -> str | None:
        """Why a save is not begun; the same on all ranks."""
        text = None
        if self._schedule is not None and left is not None:
            takes = self._schedule.save_seconds() or self._launch.save_seconds or None
            if takes is not None and takes > left:
                text = f"a save takes about {takes:.1f} s, and {max(0.0, left):.1f} s are left"
                self._reporter.note("checkpoint-late", text, seconds=takes, left=left)
        told: str | None = self._due.told(text)
        return told

    def _begin(
        self,
        step: int,
        reason: Reason,
        finished: bool,
        content: Callable[[], Content],
        *,
        thorough: bool,
        beside: bool = False,
    ) -> None:
        self._numbers += 1
        self._due.save_begins()
        order, begun = Order(self._numbers, step, reason, finished, time.monotonic(), beside), time.perf_counter()
        mine = staged = error = None
        try:
            with uncollected():  # so many small objects would bring a pass about, and training waits
                mine = content()
                slices = self._cuts.of(mine.snapshot.sizes(), self._world_size)[self._rank]
                staged = self._staging.stage(self._lister.of(mine.snapshot, slices))
        except HookStateError as error_:  # comes again with every save: nothing more is trained that cannot be kept
            text = f"the state of the hook cannot be saved at step {step}: {error_}"
            raise UserError(text, code="hook-state-unsupported") from error_
        except UserError:
            raise
        except (RatchetError, OSError, MemoryError) as error_:
            mine, error = None, f"rank {self._rank}: {error_}"
        stall = time.perf_counter() - begun
        self._save = Save(order, mine, staged, error, thorough, (stall, None), behind=self._settled)
        self._settled = self._save.settled
        self._saver.submit(self._save)

    def _await(self, save: Save) -> None:
        """Until the save has ended, with a sign of life as long as it may still get on. Raises ``CheckpointError``."""
        directory = JobPaths(Path(self._launch.job_root)).checkpoint(save.order.step, self._launch.epoch)
        limit = 3 * self._launch.deadlines.step + 120  # longer than any wait of a saving thread
        seen, deadline = (-1, 0), time.monotonic() + limit
        save.attention.set()
        while not save.done.wait(_LOOK):
            self._counter.tick()
            if (size := written(directory)) != seen:
                seen, deadline = size, time.monotonic() + limit
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the save of step {save.order.step} is stuck: nothing was written for {limit:.0f} s"
                )

    def _look(self) -> int:
        """Take note of a save that has ended; returns how many have failed in a row by then."""
        save = self._save
        if save is None or not save.done.is_set():
            return 0
        self._save = None
        if save.failure is not None:
            raise save.failure
        verdict = save.verdict
        self._failure = verdict["error"]
        if verdict.get("early"):
            self._copy_before_steps(f"the save of step {save.order.step} failed: {self._failure}", note=self._rank == 0)
        if self._schedule is not None:
            first = save.order.reason == "first"
            self._schedule.saved(save.stall, save.seconds, well=self._failure is None, first=first)
        if verdict.get("parted"):
            raise UserError(verdict["error"])
        if verdict["error"] is None:
            self.last = Base.model_validate(verdict["base"])
            self._due.save_succeeded()
        failures: int = verdict["failures"]
        if failures >= MAX_FAILURES:
            self._given_up = self._given_up or f"step {save.order.step}: {self._failure}"
        return failures

    def _prepare(self, late: Snapshot, private: int) -> None:
        """Behind the attempt's first step: pages for the copies, and the trial of what may be copied beside a step."""
        slices = self._cuts.of(late.sizes(), self._world_size)[self._rank]
        sources = self._lister.of(late, slices)
        if self._save is None:
            self._saver.reserve(size_of(sources) + private)
        if self._overlapped:
            whole = Lister(self._rank).of(late, self._cuts.of(late.sizes(), 1)[0])
            model = f"{SHARED_PREFIX}{MODEL}/"  # of which it compares all beside a step, whatever it copies there
            parameters = {s.name: s._replace(until=Until.STEP) for s in whole.each if s.name.startswith(model)}
            self._audit = Audit([*parameters.values(), *(s for s in sources.each if s.name not in parameters)])

    def _end_audit(self, audit: Audit) -> None:
        self._audit, self._tried = None, True
        name = audit.changed()
        if name is not None:
            text = f"{name} was changed between two steps by something else than optimizer.step()"
            self._copy_before_steps(f"rank {self._rank}: {text}", note=True)

    def _copy_before_steps(self, reason: str, *, note: bool) -> None:
        """From now on this attempt copies all of this rank's state before a step begins."""
        if self._overlapped and note:
            text = f"{reason}. From now on the state is copied before a step begins, not beside it (checkpoint.staging)"
            self._reporter.note("staging-blocking", text)
        self._overlapped = False
