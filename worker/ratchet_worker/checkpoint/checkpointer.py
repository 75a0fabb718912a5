"""Saving, from the loop's side: every rank writes its file in a separate thread, and rank 0's thread commits the manifest. A
failed save costs only this checkpoint; the third in a row ends the attempt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from ratchet_contract.checkpoint.manifest import SHARED_PREFIX
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_hooks.errors import HookStateError
from ratchet_store.filesystem.durable_io import NOT_WRITTEN
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.copy_sources import Audit, Lister, Sources
from ratchet_worker.checkpoint.host_copy import Staged, Staging, size_of
from ratchet_worker.checkpoint.manifest_commit import Committer, Order, write_progress
from ratchet_worker.checkpoint.memory_copies import MemoryCopies, open_copies
from ratchet_worker.checkpoint.save import Progress, Save, SaveState
from ratchet_worker.checkpoint.save_cost import expected_seconds
from ratchet_worker.checkpoint.saver_thread import MAX_FAILURES, Saver
from ratchet_worker.checkpoint.schedule import Due
from ratchet_worker.coordination.reporter import Reason, Reporter
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.host.cpu import gc_disabled, rank_cores
from ratchet_worker.ipc.memory_copies import Result
from ratchet_worker.ipc.progress_counter import Stage, StepCounter
from ratchet_worker.state.model import MODEL
from ratchet_worker.state.replica_digests import Cuts
from ratchet_worker.state.snapshot import Snapshot, Until

T = TypeVar("T")

_TICK_SECONDS: Final = 0.25  # seconds between two ticks of the step counter while waiting for a save
_RETRY_SECONDS: Final = 1.0  # seconds between two attempts to save a job's end
_RETENTION_TIMEOUT: Final = 10.0  # seconds that the end of an attempt waits for older checkpoints to be deleted


@dataclass(frozen=True)
class Outcome:
    """The result of a save that the loop has waited for. ``error``: why there is no checkpoint."""

    error: str | None = None


class Checkpointer:
    """The saves of one attempt on one rank. ``last``: this attempt's newest checkpoint, or the one that it started from.
    ``give_up``: called on rank 0, in the saving thread, after too many failures. ``early``: the job has no checkpoint yet."""

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
        self._staging, self._cuts, self._lister = Staging(device, rank_cores()), Cuts(), Lister(exchange.rank)
        self._committer = Committer(launch, saving, reporter, base)
        self._copies = open_copies(launch, exchange.rank, self._committer, counter, reporter, device)
        self._saver = Saver(launch, saving, reporter, self._committer, self._staging, give_up)
        self._due = Due(self._spec, exchange, reporter, base.step, early=early)
        self._schedule = self._due.schedule
        staging = self._spec.staging
        self._overlapped = staging == "overlapped" or (staging == "auto" and launch.spec.task is not None)
        self._first = True  # no boundary of this attempt was reached yet
        self._early_step: int | None = None  # the step saved before the first scheduled one
        self._early_seconds: float | None = None  # the expected duration of that save
        self._audit: Audit | None = None
        self._audit_done = False  # the audit is done: the state may be copied concurrently with a step
        self._save: Save | None = None
        self._last_progress: Progress | None = None  # of the last save
        self._save_count = 0
        self._stall_seconds = 0.0  # seconds that the open step waited for a save
        self._failure: str | None = None
        self._given_up_at = ""
        self.last = base

    # --- the loop's boundaries and gates -------------------------------------------------------------------------------

    def wait_for_copies(self, step: int) -> None:
        """If ``step`` is to be copied in memory, wait until all ranks have ended the copy before. Call it before a step counts as
        done: a kill then loses at most the copy's interval besides the step under way."""
        if self._copies is not None and self._copies.is_due(step):
            self._copies.wait()

    def on_step_end(
        self,
        step: int,
        capture_step_tensors: Callable[[], tuple[Snapshot, int]],
        make_content: Callable[[], Content],
        make_copy_content: Callable[[], tuple[Content, dict[str, Any]]] | None = None,
    ) -> None:
        """Process a save that has ended, and begin a save and a copy in memory if they are due. Call it after every step but the
        last. ``capture_step_tensors``: returns parameters and optimizer state, and the approximate bytes of other state.
        ``make_content``: captures everything. ``make_copy_content``: the same for a copy in memory, with the argument ``files``
        of ``MemoryCopies.begin``; None: this step is not copied. May wait for the previous save, and for other ranks' copies.
        Raises ``UserError``, and as ``drain``."""
        self._process_result()
        if self._copies is not None and make_copy_content is not None and self._copies.is_due(step):
            self._copy_in_memory(self._copies, step, make_copy_content)
        if self._schedule is not None:
            self._schedule.record_step(self._save is not None, self._stall_seconds)
        self._stall_seconds = 0.0
        if step >= self._due.next:
            # A scheduled save is not skipped because of the save before the first scheduled one.
            busy = self._save is not None and self._save.order.reason != "first"
            reason = self._due.reason_at(step, busy, self.drain, lambda: self._expected_seconds(capture_step_tensors))
            if reason is not None:
                self._early_step = step if reason == "first" else self._early_step
                self.begin_save(step, reason, make_content)
        if self._first and (self._due.next != math.inf or self._copies is not None):
            self._prepare(*capture_step_tensors())
        self._first = False

    def wait_until_copied(self, until: Until, *, ends_audit: bool = True) -> None:
        """Wait until the save in progress has copied the tensors of the kind ``until``, or has given up; they may change then.
        ``Until.STEP`` also ends the ``Audit``, unless ``ends_audit`` is False."""
        save = self._save
        if save is not None:
            self._stall_seconds += save.wait_until_copied(until)
        if self._copies is not None and self._copies.save is not None:
            self._copies.save.wait_until_copied(until)
        if ends_audit and self._audit is not None and until is Until.STEP:
            self._end_audit(self._audit)

    def on_step_begin(self) -> None:
        """Call when a step begins: the time since the previous step does not count as part of this one."""
        self._stall_seconds = 0.0
        if self._schedule is not None:
            self._schedule.restart_step_timer()

    # --- acting together -----------------------------------------------------------------------------------------------

    def begin_save(self, step: int, reason: Reason, make_content: Callable[[], Content]) -> None:
        """Wait for the previous save to end, then begin to save ``step``. Waits until the state is copied, unless it may be
        copied during the next step. Begins no save after too many failures. Raises ``UserError`` for some state that cannot be
        stored, and as ``drain``."""
        self.drain()
        if self._given_up_at:  # the same on all ranks: the stop that follows from it is being agreed on
            return
        beside = self._overlapped and self._audit_done
        self._submit_save(step, reason, False, make_content, thorough=False, concurrent=beside)
        if self._save is not None and not beside:
            self._save.wait_until_copied(Until.STEP)

    def save(
        self,
        step: int,
        reason: Reason,
        finished: bool,
        make_content: Callable[[], Content],
        remaining_seconds: float | None = None,
    ) -> Outcome:
        """Save ``step`` on every rank, wait until the save has ended, and return the outcome, which is the same on all ranks.
        ``finished``: the job ends here, so a failed save is repeated. ``remaining_seconds``: for a save at a stop, the seconds
        that are left; a save that is expected to take longer is not begun. Raises ``CheckpointError`` after too many failures,
        ``UserError``, and as ``drain``."""
        self._counter.enter_stage(Stage.CHECKPOINTING)
        self.drain()
        if self._given_up_at:
            raise self.too_many_failures
        late = self._reason_not_to_save(remaining_seconds) if reason == "stop" else None
        if late is not None:
            return Outcome(late)
        while True:
            self._submit_save(step, reason, finished, make_content, thorough=True)
            failures = self.drain()
            if failures >= MAX_FAILURES:
                raise self.too_many_failures
            if failures == 0 or not finished:
                break
            time.sleep(_RETRY_SECONDS)
        self._counter.enter_stage(Stage.TRAINING)
        return Outcome(self._failure)

    def drain(self) -> int:
        """Wait for the save in progress to end; return the number of failed saves in a row, 0 after a success or without a save.
        Raises ``CheckpointError`` if the save is stuck, ``UserError`` if the ranks have ended at, or saved, different steps, or
        the saving thread's error."""
        if self._save is None:
            return 0
        self._wait_for(self._save)
        return self._process_result()

    def wait_for_retention(self) -> None:
        """Wait, for at most ten seconds, until older checkpoints are deleted and their deletion is reported."""
        end = time.monotonic() + _RETENTION_TIMEOUT
        while (
            self._last_progress is not None
            and not self._last_progress.wait_for(SaveState.ENDED, _TICK_SECONDS)
            and time.monotonic() < end
        ):
            self._counter.tick()

    @property
    def too_many_failures(self) -> CheckpointError:
        """The error that ends the attempt after too many failed saves in a row. It is returned, not raised."""
        return CheckpointError(
            f"{MAX_FAILURES} saves in a row failed, the last at {self._given_up_at}", code=NOT_WRITTEN
        )

    @property
    def is_overlapped(self) -> bool:
        """True if saves may be copied concurrently with a step, once the audit is done (``wait_until_copied``)."""
        return self._overlapped

    @property
    def metric_step(self) -> int | None:
        """The step of the checkpoint to which metrics logged now belong; None for the save before the first scheduled one."""
        step = self.last.step if self._save is None else self._save.order.step
        return None if step == self._early_step else step

    def record_metrics(self, step: int, values: dict[str, float]) -> None:
        """Record the values that rank 0 has logged, by name, for the checkpoint of ``step`` (``checkpoint.keep_best``)."""
        self._committer.record_metrics(step, values)

    def finish(self) -> None:
        """Call ``wait_for_retention``. Then, on rank 0, mark the newest checkpoint of this attempt, if any, as the job's last.
        Raises ``CheckpointError``."""
        self.wait_for_retention()
        self._committer.finish()

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _expected_seconds(self, capture_step_tensors: Callable[[], tuple[Snapshot, int]]) -> float | None:
        """Return the expected seconds of the save before the first scheduled one; None if a save has begun already."""
        if self._save_count:
            return None
        if self._early_seconds is None:
            snapshot, private = capture_step_tensors()
            size = sum(number * width for _, number, width in snapshot.sizes()) + self._world_size * private
            scratch = JobPaths(Path(self._launch.job_root)).attempt(self._launch.attempt).root
            self._early_seconds = self._launch.save_seconds or expected_seconds(scratch, size)
        return self._early_seconds

    def _reason_not_to_save(self, remaining_seconds: float | None) -> str | None:
        """Return why a save would end too late, None if it may begin; the same on all ranks."""
        text = None
        if self._schedule is not None and remaining_seconds is not None:
            takes = self._schedule.save_seconds() or self._launch.save_seconds or None
            if takes is not None and takes > remaining_seconds:
                text = f"a save takes about {takes:.1f} s, and {max(0.0, remaining_seconds):.1f} s are left"
                self._reporter.note(NoteType.CHECKPOINT_LATE, text, seconds=takes, left=remaining_seconds)
        told: str | None = self._due.broadcast(text)
        return told

    def _submit_save(
        self,
        step: int,
        reason: Reason,
        finished: bool,
        make_content: Callable[[], Content],
        *,
        thorough: bool,
        concurrent: bool = False,
    ) -> None:
        """Capture the state, copy what must be copied at the boundary, and hand the save over. ``thorough``: the loop will wait
        for it. Raises ``UserError`` for some state that cannot be stored; most other errors fail only this save."""
        self._save_count += 1
        self._due.on_save_begin()
        order, begun = (
            Order(self._save_count, step, reason, finished, time.monotonic(), concurrent),
            time.perf_counter(),
        )

        def capture() -> tuple[Content, Staged]:
            content = make_content()
            return content, self._staging.stage(self._list_sources(content))

        captured, error = self._capture(step, "saved", capture)
        mine, staged = captured or (None, None)
        stall = time.perf_counter() - begun
        self._save = Save(order, mine, staged, error, thorough, (stall, None), previous=self._last_progress)
        self._last_progress = self._save.progress
        self._saver.submit(self._save)

    def _copy_in_memory(
        self, copies: MemoryCopies, step: int, make_content: Callable[[], tuple[Content, dict[str, Any]]]
    ) -> None:
        """Begin the copy of ``step`` in memory. Waits until the state is copied, unless that may be done during the next step.
        Raises ``UserError``; most other errors fail only this copy."""
        if Result.CHANGED in copies.wait():
            self._copy_before_steps(
                "a tensor changed before it was copied to memory (note.memory-copy-failed)", note=self._rank == 0
            )
        concurrent = self._overlapped and self._audit_done

        def capture() -> tuple[Content, Sources, dict[str, Any]]:
            content, files = make_content()
            return content, self._list_sources(content), files

        captured, error = self._capture(step, "copied", capture)
        content, sources, files = captured or (None, None, {})
        save = copies.begin(step, content, sources, files, error, concurrent=concurrent)
        if not concurrent:
            save.wait_until_copied(Until.STEP)

    def _capture(self, step: int, done: str, capture: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return what ``capture`` returns, and None; or None, and the error of this rank that fails only this save. ``done``:
        what is done with the state, for messages. Raises ``UserError`` if the hook's state cannot be captured: training
        that cannot be saved is not continued."""
        try:
            with gc_disabled():  # many small objects would trigger a garbage collection while training waits
                return capture(), None
        except HookStateError as error:  # recurs with every save
            text = f"the state of the hook cannot be {done} at step {step}: {error}"
            raise UserError(text, code="hook-state-unsupported") from error
        except UserError:
            raise
        except (RatchetError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            return None, f"rank {self._rank}: {error}"

    def _list_sources(self, content: Content) -> Sources:
        """Return what this rank copies of the captured state."""
        slices = self._cuts.plan(content.snapshot.sizes(), self._world_size)[self._rank]
        return self._lister.list_sources(content.snapshot, slices)

    def _wait_for(self, save: Save) -> None:
        """Wait until ``save`` has ended, and tick the step counter meanwhile. Raises ``CheckpointError`` if the save is stuck."""
        directory = JobPaths(Path(self._launch.job_root)).checkpoint(save.order.step, self._launch.attempt)
        limit = 3 * self._launch.deadlines.step + 120  # longer than any wait of a saving thread
        seen, deadline = (-1, 0), time.monotonic() + limit
        try:
            while not save.drain(_TICK_SECONDS):
                self._counter.tick()
                if (size := write_progress(directory)) != seen:
                    seen, deadline = size, time.monotonic() + limit
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"the save of step {save.order.step} is stuck: nothing was written for {limit:.0f} s",
                        code=NOT_WRITTEN,
                    )
        finally:  # the save is reported, and this wait must not count as a cost that every scheduled save has
            save.drained_since = None

    def _process_result(self) -> int:
        """If the save in progress has ended, process it and return the number of failed saves in a row. Otherwise return 0.
        Raises the saving thread's error, or ``UserError`` if the ranks have ended at, or saved, different steps."""
        save = self._save
        if save is None or not save.is_done:
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
            self._schedule.record_save(save.stall, save.seconds, succeeded=self._failure is None, first=first)
        if verdict.get("parted"):
            raise UserError(verdict["error"])
        if verdict["error"] is None:
            self.last = Base.model_validate(verdict["base"])
            self._due.on_save_success()
        failures: int = verdict["failures"]
        if failures >= MAX_FAILURES:
            self._given_up_at = self._given_up_at or f"step {save.order.step}: {self._failure}"
        return failures

    def _prepare(self, step_tensors: Snapshot, private: int) -> None:
        """After the first step: prepare memory for the copies and, if saves may be overlapped, begin the ``Audit``. ``private``:
        bytes besides ``step_tensors``."""
        slices = self._cuts.plan(step_tensors.sizes(), self._world_size)[self._rank]
        sources = self._lister.list_sources(step_tensors, slices)
        if self._save is None:
            self._saver.reserve(size_of(sources) + private)
        if self._overlapped:
            whole = Lister(self._rank).list_sources(step_tensors, self._cuts.plan(step_tensors.sizes(), 1)[0])
            model = f"{SHARED_PREFIX}{MODEL}/"  # all parameters: a rank compares all of them during a step, whichever it copies
            parameters = {s.name: s._replace(until=Until.STEP) for s in whole.entries if s.name.startswith(model)}
            self._audit = Audit([*parameters.values(), *(s for s in sources.entries if s.name not in parameters)])

    def _end_audit(self, audit: Audit) -> None:
        """End the audit. If a tensor has changed between two steps, copy this rank's state before each step from now on."""
        self._audit, self._audit_done = None, True
        name = audit.first_changed()
        if name is not None:
            text = f"{name} was changed between two steps, other than by optimizer.step()"
            self._copy_before_steps(f"rank {self._rank}: {text}", note=True)

    def _copy_before_steps(self, reason: str, *, note: bool) -> None:
        """From now on, copy all of this rank's state before a step begins. ``note``: report ``reason``."""
        if self._overlapped and note:
            text = (
                f"{reason}. From now on the state is copied before a step begins, not concurrently (checkpoint.staging)"
            )
            self._reporter.note(NoteType.STAGING_BLOCKING, text)
        self._overlapped = False
