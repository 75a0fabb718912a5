"""One rank's run: the step boundary, where state is captured and all ranks act together. At a boundary a save comes before an
evaluation, so that an evaluation that a stop cuts short runs again from the same state."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ratchet_contract.errors import CheckpointError, UserError
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import Cause, NoteType
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_store.filesystem.durable_io import NOT_WRITTEN
from ratchet_store.format.manifest_file import mark_changed
from ratchet_worker.checkpoint.checkpoint_content import Content, Contents
from ratchet_worker.checkpoint.checkpointer import Checkpointer
from ratchet_worker.checkpoint.late_changes import LateChanges, early_checkpoint_message, late_change_message
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.coordination import process_group
from ratchet_worker.coordination.process_group import Clients, Identity
from ratchet_worker.coordination.reporter import Reason, Reporter, metric_value
from ratchet_worker.coordination.stop_agreement import (
    FINISH,
    NOT_STARTED,
    STRIDE,
    Agreement,
    Decision,
    Stopped,
    position,
)
from ratchet_worker.coordination.store_exchange import Abandoned, Exchange
from ratchet_worker.data.loader import endless
from ratchet_worker.ipc.progress_counter import Stage, StepCounter
from ratchet_worker.resume.adopted_run import find_adopted
from ratchet_worker.resume.choose_checkpoint import choose_in_background
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.state import environment as environment_record
from ratchet_worker.state import loop_variables, unregistered
from ratchet_worker.state.environment import Record
from ratchet_worker.state.snapshot import Until
from ratchet_worker.state.thread_pools import is_working
from ratchet_worker.training import replay_proof, resume
from ratchet_worker.training.all_gather import Gatherer
from ratchet_worker.training.evaluation import Evaluation, preserving_state
from ratchet_worker.training.step_times import StepClock
from ratchet_worker.training.trial import Trial

Item = TypeVar("Item")


class Runtime:
    """One rank's run of the job. ``step``: number of completed steps, including those in the restored checkpoint. ``total``:
    number of steps of the whole job, None if unknown; in a loop over epochs, only an expected number."""

    def __init__(
        self,
        launch: LaunchFile,
        local_rank: int,
        device: torch.device,
        exchange: Exchange,
        saving: Exchange,
        agreement: Agreement,
        counter: StepCounter,
        reporter: Reporter,
        chosen: Chosen,
    ) -> None:
        self.launch, self.local_rank, self.device = launch, local_rank, device
        self.exchange, self.agreement, self.counter, self.reporter = exchange, agreement, counter, reporter
        self.chosen, self.adopted = chosen, find_adopted(launch, chosen)
        self.step = chosen.base.step
        self.total: int | None = None
        code = Path(launch.code_dir or launch.workdir)
        self.state = JobState(exchange.rank, device, code=code, strict=launch.spec.determinism == "strict")
        self.state.hidden.ignored |= launch.spec.checkpoint.ignore
        self._contents = Contents(self.state, exchange.rank, exchange.world_size)
        self.checkpointer = Checkpointer(
            launch,
            exchange,
            saving,
            counter,
            reporter,
            chosen.base,
            device,
            lambda: agreement.request_stop(Cause.CHECKPOINT_ERROR),
            early=_may_save_early(launch, chosen),
        )
        self.proof: replay_proof.ReplayProof | None = None  # set by restore
        self.restored = self.finished = False
        self.data_digest: str | None = None
        self.environment: Record = {}
        self.provenance: Record = {}  # set by restore on rank 0; on others only the mark of mark_not_exact
        self.notes = resume.Notes()
        self.event_files: dict[Path, Any] = {}  # ``EventFiles`` of the script's writers, by directory
        self.gathers = 0  # number of the script's gathers of JSON values
        self.gatherer = Gatherer()
        self.trial = Trial(launch, exchange.rank)
        self._clock = StepClock()
        self.is_evaluation_abandonable = False  # within an evaluation that a stop may cut short
        self.epoch_loop: object = None  # the ``EpochLoop`` that all Sessions of the script share
        self.by_epochs = False  # a step is a batch of the loop's loader; ``total`` is the expected number of steps
        self._unit = position(self.step)  # the last unit begun
        self._reported_variables = set[str]()  # variables of the script's loops that were reported
        self._ended = False  # the last step is done and the final checkpoint saved
        self.loop_ended = False  # the loop over steps has ended by itself, neither by an error nor by ``break``
        self._step_open = False  # between begin_step and end_step
        self._iteration = 0  # the hook's iteration count when the open step began
        self._has_stepped = False  # this attempt has done a step
        self._evaluations = 0  # number of evaluations in the open step
        self._batches = 0  # number of batches taken in the open step
        self._saved_in_body = False  # checkpoint() has ended the step, but the body of its loop continues
        self._late_changes: LateChanges | None = None  # set then, if the step is saved
        self._last_scheduler_counts: dict[str, list[int]] = {}  # of schedulers, at the last step boundary
        self.stopped: Stopped | None = None  # already raised; a thread of the script may have ended with it
        # Hooks of a run without a service: ``on_begin`` is called before the attempt's first step, ``on_nothing_left`` where
        # there is none to do, ``on_exit`` with the error when the Session's block is left.
        self.on_begin: Callable[[], None] | None = None
        self.on_nothing_left: Callable[[], None] | None = None
        self.earlier_objects = WeakSet[object]()  # objects of earlier runs in this process, which the script may keep
        self.on_exit: Callable[[BaseException | None], None] | None = None
        self.trainer: threading.Thread | None = None  # the thread that requested the last step, set by restore
        self._boundary_lock = threading.RLock()  # another thread may end the job, but not while the last step is ending

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    @property
    def open_step(self) -> int:
        """Number of the open step, counted from 1; between two steps the number of the last step."""
        return self.step + self._step_open

    @property
    def done(self) -> bool:
        """True if nothing is left to train: the last step is done, in this attempt or an earlier one."""
        if self._ended or (self.is_base_last and self.step == self.chosen.base.step):
            return True
        return self.total is not None and self.step >= self.total and not self.by_epochs

    @property
    def is_base_last(self) -> bool:
        """True if this attempt starts from this job's final checkpoint, and the script is not known to request more steps."""
        return self._is_base_finished and not self.is_extended

    @property
    def is_extended(self) -> bool:
        """True if the base is this job's final checkpoint and the script is known to request more steps than before."""
        before = self.earlier_total
        return self._is_base_finished and None not in (self.total, before) and self.total > before  # type: ignore[operator]

    @property
    def _is_base_finished(self) -> bool:
        manifest = self.chosen.manifest
        return manifest is not None and manifest.finished and manifest.job_id == self.launch.job_id

    @property
    def earlier_total(self) -> int | None:
        """The ``total`` of the attempt that saved the base; None if unknown, or if the number of ranks has changed."""
        manifest = self.chosen.manifest
        return manifest.total_steps if manifest is not None and manifest.world_size == self.world_size else None

    @property
    def is_judged(self) -> bool:
        """True if the newest step is saved or being saved, and that checkpoint is judged by a metric
        (``checkpoint.keep_best``)."""
        return self.launch.spec.checkpoint.keep_best is not None and self.checkpointer.metric_step == self.step

    # --- before the first step -----------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module, *, find_unused_parameters: bool = False) -> ManagedDDP:
        """Wrap ``module`` in DDP under the job's hook, on this rank's device. A collective. Raises ``UserError`` for a second
        model, or if something does not fit."""
        if self.state.ddp is not None:
            raise UserError(
                "one model per job can be wrapped; put several networks into one module. Pass a copy that is not trained (an "
                "average) to prepare after requires_grad_(False), or register it"
            )
        options = self.launch.spec.ddp
        if find_unused_parameters and not options.static_graph:
            options = options.model_copy(update={"find_unused_parameters": True})
        ddp, hook = resume.build(self.launch, self.chosen, module.to(self.device), self.device, self.notes, options)
        self.state.set_model(ddp, hook)
        return ddp

    def check_loop_variables(self, frame: FrameType | None, *, within_epoch: bool = False) -> None:
        """Report, once each, the variables that the script's loop in ``frame`` or its callers carries: no checkpoint contains
        them."""
        place, names = loop_variables.find_carried(frame)
        new = [name for name in names if name not in self._reported_variables]
        if not new:
            return
        self._reported_variables.update(new)
        if self.chosen.manifest is not None:
            text = loop_variables.lost_message(place, new)
        else:
            text = loop_variables.carried_message(place, new, within_epoch=within_epoch)
        if self.rank == 0:
            self.reporter.note(NoteType.LOOP_VARIABLES, text, place=place, names=new)

    def _check_unregistered(self) -> None:
        """Report objects that act on the training and are not registered. A collective. Raises ``UserError`` for them under
        ``determinism: strict``."""
        state, (ddp, _) = self.state, self.state.require_wrapped()
        given = (
            *state.optimizers.values(),
            *state.stateful.values(),
            *state.plain.values(),
            *ddp.module.modules(),
            state.task,
        )
        mine = unregistered.find_unregistered(ddp.module, state.optimizers.values(), (*given, *self.earlier_objects))
        self.earlier_objects.update(unregistered.unattributable(given))
        names = sorted({name for rank in self.exchange.gather("unregistered", mine) for name in rank})
        if not names:
            return
        text = unregistered.unregistered_message(names)
        if self.launch.spec.determinism == "strict":
            raise UserError(text, code="unregistered-state")
        self.notes.unregistered = text
        if self.rank == 0 and self.chosen.manifest is None:
            self.reporter.note(NoteType.UNREGISTERED, text)

    def restore(self, total: int | None) -> None:
        """Restore what was registered, and report that training begins. A collective. ``total``: None if unknown. Raises
        ``UserError``, ``StateError`` and ``CheckpointError``."""
        if self.restored:
            raise UserError("call restore once, after everything is registered and before the first step")
        self.total = total
        self._check_unregistered()
        self.state.check_parameters_covered()
        self.state.check_parameters_unchanged()
        self.state.begin()
        self.counter.tick()
        self.proof = replay_proof.begin_proof(self, resume.restore(self))
        self.trainer, self.restored = threading.current_thread(), True
        self.state.require_storable()
        for files in self.event_files.values():  # only now: an attempt that was refused would not repeat what is cut
            files.rewind(self.chosen.base)
        self._set_gates()
        self.counter.enter_stage(Stage.TRAINING)
        self.trial.begin(self._data_epoch)
        self._report_hook()

    @property
    def is_not_exact(self) -> bool:
        """True if this attempt, or an earlier one that led to its checkpoint, was not exact. Known on rank 0, after the
        restore."""
        return environment_record.NOT_EXACT in self.provenance

    def mark_not_exact(self) -> None:
        """Make every later checkpoint record that its bits may differ from those of an undisturbed run. One rank's call
        suffices."""
        base = self.chosen.base
        self.provenance.setdefault(environment_record.NOT_EXACT, f"step {base.step}, attempt {base.attempt}")

    def _set_gates(self) -> None:
        """If saves may overlap steps, make the hook and the optimizers block, before they change state, until a save in progress
        has copied it."""
        if not self.checkpointer.is_overlapped:  # and a hook would be traced with a compiled optimizer.step()
            return
        gate = self.checkpointer.wait_until_copied
        self.state.require_wrapped()[1].before_change = lambda: gate(Until.BACKWARD)
        for optimizer in self.state.optimizers.values():
            optimizer.register_step_pre_hook(lambda *_: gate(Until.STEP))

    # --- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Act on what the ranks have agreed on, then start the next step. May block. Raises ``Stopped``, ``UserError`` and
        ``CheckpointError``."""
        if self.stopped is not None:  # and the script caught it
            raise self.stopped
        self._clock.enter_boundary()
        self.check_not_ended()
        if self._step_open:
            raise UserError(
                "another loop over steps was begun in the middle of a step: all steps belong in one loop, steps(total of all "
                "phases), and a loop within a step uses range(...). After a loop that was left by `break` the job has ended"
            )
        self._end_body()
        if self.trial.is_active:
            self._continue_trial()
        if self.on_begin is not None:
            begins, self.on_begin = self.on_begin, None
            begins()
        self._begin_unit(position(self.step + 1))
        self.trainer = threading.current_thread()
        self._evaluations = self._batches = 0
        self.checkpointer.on_step_begin()
        self.state.on_step_begin()
        self._step_open, self._iteration = True, self.state.require_wrapped()[1].iteration
        self.counter.start_step(self.step + 1)
        self._clock.leave_boundary()

    def set_total(self, total: int | None) -> None:
        """Set the number of steps of the script's loop. If no number was set before, and this number differs from that of the
        attempt that saved the base, the run is marked as inexact. Under ``determinism: strict`` this raises ``UserError``
        instead."""
        unknown, self.total = self.total is None, total
        if unknown and (odd := resume.total_difference(self)) is not None:
            text = f"not exact: {odd.sentence()}"
            if self.launch.spec.determinism == "strict":
                raise UserError(f"determinism is strict, and the resume is {text}", code="environment-differs")
            self.mark_not_exact()
            if self.rank == 0:
                self.reporter.note(NoteType.OTHER_TOTAL, text)

    def mark_nothing_left(self) -> None:
        """Record that the script's loop has no step to do, since an earlier attempt has done the last one."""
        self._ended = self.loop_ended = True
        if self._is_base_finished and self.on_nothing_left is not None:
            self.on_nothing_left()

    def check_not_ended(self) -> None:
        """Raise ``UserError`` if the job has ended: a resume would silently skip the steps of a further loop."""
        if self._ended:
            raise UserError(
                f"another step was requested after step {self.step}, which was the last: a resume from the final checkpoint has "
                "nothing left to do and would skip it. Request all steps in one loop: steps(total of all phases), or "
                "epochs(all of them)",
                code="after-the-end",
            )

    def end_step(self, *, last: bool = False) -> None:
        """End the open step, if any: count it, and begin a due save; the final save blocks. ``last``: the job ends here. Raises
        ``CheckpointError`` and ``UserError``."""
        if not self._step_open:
            self._end_body()
            return
        with self._boundary_lock:
            self._end_open_step(last)

    def _end_open_step(self, last: bool) -> None:
        self._clock.end_step(self.state.require_wrapped()[1].first_bucket_at)
        self.checkpointer.wait_until_copied(
            Until.STEP
        )  # a scaler may have skipped the optimizer's step, which would have waited
        # On every rank, also where a scaler skipped ``optimizer.step()`` on some.
        self.state.require_wrapped()[1].average_parameters()
        self.exchange.block_if_aborting()
        self.checkpointer.wait_for_copies(self.step + 1)
        self._step_open = False
        self.step += 1
        self._ended = last or (self.step == self.total and not self.by_epochs)
        # Before the step is counted or saved: a step that others see as done has its fingerprint.
        self._fingerprint()
        self.counter.finish_step(self.step)
        if self.trial.is_active:
            phase = self.state.require_wrapped()[1].summary(rank=self.rank, step=self.step, norm=False).phase
            self.trial.record_step(self.step, self._data_epoch, phase)
        self._report_progress(always=self._ended)
        if self._ended:
            self._save("end", finished=True)
            self.loop_ended = True
        else:
            if not self._has_stepped:  # state that appears only in a first step
                self._has_stepped = True
                self.state.require_storable()
                self._report_unmatched()
            # A copy from within a body would lack what the rest of the body changes; ``checkpoint()`` saves the step.
            copy = None if self._saved_in_body else self._make_copy_content
            self.checkpointer.on_step_end(self.step, self.state.step_tensors_and_size, self._make_content, copy)
        self._clock.begin_step()

    def _report_unmatched(self) -> None:
        if self.rank == 0 and (paths := self.state.hidden.unmatched):
            self.reporter.note(NoteType.IGNORED_NOT_FOUND, f"nothing was found at the ignored path {', '.join(paths)}")

    def batches(self, data: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches of ``data``, epoch after epoch. Raises ``UserError`` outside a step, and for an epoch without
        batches, except the first after a restore."""
        return endless(data, self.count_batch, restored=self.chosen.manifest is not None)

    def count_batch(self) -> None:
        """Count a batch of the training data for the open step. Raises ``UserError`` if no step is open."""
        if not self._step_open:
            raise UserError(
                "a batch of the training data was taken outside a step, so a checkpoint would count it to the wrong one: take "
                "batches in the body of the loop over steps, before its end is requested, and none in advance"
            )
        self.trial.count_batches()
        self._batches += 1
        self.counter.tick()

    @property
    def has_taken_batch(self) -> bool:
        """True if this step has taken a batch of the training data. Between two steps: if the last one had."""
        return self._batches > 0

    def loading_ahead(self) -> AbstractContextManager[None]:
        """Return a context manager for a block that may load the next step's batch, so that the time counts to that step."""
        return self._clock.loading_ahead() if self._step_open else nullcontext()

    def _fingerprint(self) -> None:
        """Record the fingerprint of the step that ends."""
        assert self.proof is not None
        self.proof.record_step(self.step, self.state.data, self._batches)
        self._last_scheduler_counts = self._scheduler_counts()
        if self._ended:
            self.proof.finish()

    def end_step_if_worked(self, *, last: bool = False) -> None:
        """End the open step if its gradients were reduced or, in a loop over epochs, it has taken a batch."""
        if self._has_worked:
            self.end_step(last=last)

    @property
    def _has_worked(self) -> bool:
        if self.by_epochs and self._batches:  # a step may be one of several batches that are accumulated
            return self._step_open
        return self._step_open and self.gradients_reduced

    @property
    def gradients_reduced(self) -> bool:
        """True if the hook has run since this step began."""
        return self.state.require_wrapped()[1].iteration > self._iteration

    def checkpoint(self) -> bool:
        """Save now, and wait for the save, unless this step is saved already. Every rank calls it after the same step. An open
        step that has done its work is ended first. Returns False if the save failed. Raises ``CheckpointError`` after the third
        failure in a row."""
        self._check_late_changes()
        self.checkpointer.drain()  # a save in progress is of the last boundary
        early = self._changed_before_work()
        if self._has_worked or early:
            self._saved_in_body = True
            # Before the step can be saved: a kill from now on loses the rest of the body.
            self.counter.set_saved_within(self.step + self._has_worked)
        self.end_step_if_worked()
        error = self._save_if_new("request")
        if early and error is None:
            self._mark_changed(self.step, early_checkpoint_message(self.step, early))
        elif self._saved_in_body and error is None:
            self._late_changes = LateChanges(self.state, self.step)
        return error is None

    def _changed_before_work(self) -> list[str]:
        """Return what the open step has changed already, if ``checkpoint()`` would save the step before it; else an empty
        list."""
        if not self._step_open or self._has_worked or self.step == self.checkpointer.last.step:
            return []
        assert self.proof is not None
        stepped = [
            name
            for name, count in self._scheduler_counts().items()
            if count != self._last_scheduler_counts.get(name, count)
        ]
        return [*self.proof.changed_since_step(self.state.data, self._batches), *stepped]

    def _scheduler_counts(self) -> dict[str, list[int]]:
        schedulers = {name: item for name, item in self.state.stateful.items() if isinstance(item, LRScheduler)}
        # A ChainedScheduler has no count of its own up to torch 2.9.
        return {
            name: [one.last_epoch for one in vars(item).get("_schedulers") or (item,)]
            for name, item in schedulers.items()
        }

    def _end_body(self) -> None:
        self._check_late_changes()
        if self._saved_in_body:
            self._saved_in_body = False
            self.counter.set_saved_within(0)

    def _check_late_changes(self) -> None:
        """If state has changed since ``checkpoint()`` ended the step within its body, mark that checkpoint as changed."""
        late, self._late_changes = self._late_changes, None
        if late is not None and (names := late.changed_components()):
            self._mark_changed(late.step, late_change_message(late.step, names))

    def _mark_changed(self, step: int, text: str) -> None:
        if mark_changed(JobPaths(Path(self.launch.job_root)).checkpoint(step, self.launch.attempt), text):
            self.reporter.note(NoteType.CHANGED_BEHIND_CHECKPOINT, text, step=step)

    def log(self, values: dict[str, float | torch.Tensor]) -> None:
        """Log metrics of the open step; between two steps, log metrics of the last step. Does nothing on ranks other than 0."""
        if self.rank == 0:
            step, found = self.open_step, {k: metric_value(k, v) for k, v in values.items()}
            self.reporter.report_metrics(step, found)
            self.checkpointer.record_metrics(step, found)

    def alert(self, title: str, text: str, level: str) -> None:
        """Send an alert in the open step; between two steps, in the last step."""
        self.reporter.alert(self.open_step, title, text, level)

    def finish(self) -> None:
        """End the job: save the final checkpoint unless it exists, and wait for all ranks. Raises ``Stopped``,
        ``CheckpointError``, ``UserError`` if, for example, a fork has done no step, and ``RuntimeError`` if the training thread
        ends early."""
        self._wait_for_last_step()
        with self._boundary_lock:
            if not self.finished:
                self._finish()

    def _wait_for_last_step(self) -> None:
        """If another thread does the steps, wait until it has done the last one or was stopped. Raises ``RuntimeError`` if that
        thread ends earlier, or is idle in a pool."""
        trainer = self.trainer
        if trainer is None or trainer is threading.current_thread():
            return
        while not (self.finished or self.done or self.stopped is not None):
            if not is_working(trainer):
                raise RuntimeError(
                    f"the thread that does the steps ended after step {self.step}, before its loop had: this is no success. If "
                    "it raised an error, see the log. A loop that it leaves by `break` ends the job if the thread then "
                    "calls the Session's finish(), or has the Session's block around the loop"
                )
            trainer.join(0.05)

    def _finish(self) -> None:
        if self.stopped is not None:
            raise self.stopped
        self.end_step_if_worked(last=True)
        self._end_body()
        manifest = self.chosen.manifest
        if manifest is not None and manifest.job_id != self.launch.job_id and self.step == manifest.step:
            if self.adopted is not None:
                raise UserError(
                    f"the adopted run has done all {self.step} steps, and nothing is left to train. With code that requests "
                    f"more: `ratchet resume {self.launch.job_id} --code DIR`; with arguments that do, adopt it again with them"
                )
            raise UserError(
                f"the fork starts after step {self.step} and has nothing left to train: fork {manifest.job_id} again, with more "
                f"steps or from an earlier checkpoint (`ratchet fork {manifest.job_id} --checkpoint ID`)"
            )
        self._begin_unit(position(self.step, FINISH))
        assert self.proof is not None
        self.proof.finish()
        self.checkpointer.drain()
        last = self.checkpointer.last
        ended = last.attempt == self.launch.attempt or (manifest is not None and manifest.finished)
        if self.step != last.step or not ended:
            self._save("end", finished=True)
        self._report_end()
        self.checkpointer.finish()  # only now: a rank that left its loop alone has not ended the job
        self.finished = self._ended = True
        self.agreement.close()

    def _report_end(self) -> None:
        """Report the hook and the trial, then wait, without a time limit, until every rank has called this."""
        self._report_hook()
        self._report_trial()
        # A rank that stopped listening earlier could leave another waiting forever for its answer in an agreement.
        self.exchange.gather("finish", None, timeout=math.inf)

    # --- a trial -------------------------------------------------------------------------------------------------------

    def _continue_trial(self) -> None:
        """End the trial if it is over, else inject a due fault. Raises ``Stopped`` at the end, ``CheckpointError`` if the save
        failed."""
        if not self.trial.is_over(self.step):
            self.trial.inject_fault(self.step, self.checkpointer.drain, self.counter.start_step, self.agreement)
            return
        self._begin_unit(position(self.step, FINISH))
        assert self.proof is not None
        self.proof.finish()
        if (error := self._save_if_new("end")) is not None:
            raise CheckpointError(error, code=NOT_WRITTEN)
        self._report_progress(always=True)
        self._report_end()
        self.agreement.close()
        self._stop(Cause.COMPLETED, f"the trial ends after step {self.step}")

    def _report_trial(self) -> None:
        if self.rank != 0 or not self.trial.is_active:
            return
        steps = {
            name: int(item.last_epoch) for name, item in self.state.stateful.items() if hasattr(item, "last_epoch")
        }
        facts = self.trial.facts(self.step, self.total, steps)
        self.reporter.note(NoteType.TRIAL_ENDED, f"a trial ended after step {self.step}", **facts)

    # --- evaluation ----------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation]:
        """Run an evaluation, which every rank enters after the same step. Between two steps, entering may raise ``Stopped``, and
        a later stop leaves the block without an exception; the evaluation then runs again after the resume."""
        ddp, hook = self.state.require_wrapped()
        cut_short = not self._in_body
        name = self._begin_evaluation()  # may begin a save
        if cut_short:
            self.state.on_evaluation_begin()
        self.trial.record_evaluation(self.step, self.checkpointer.drain)
        self.checkpointer.wait_until_copied(
            Until.STEP, ends_audit=False
        )  # averages may be swapped for the parameters, and back
        self.is_evaluation_abandonable = cut_short
        self._clock.leave_out_step()
        self.counter.enter_stage(Stage.EVALUATING)
        evaluation = Evaluation(
            self.exchange, name, self.counter.tick, lambda: cut_short and self.agreement.stop_pending()
        )
        try:
            with (
                nullcontext() if self._late_changes is None else self._late_changes.ignoring_evaluation(),
                preserving_state(
                    ddp, hook, self.state.data, self.device, self.state.all_optimizers,
                    broadcast=self.launch.spec.ddp.broadcast_buffers,
                ),
            ):  # fmt: skip
                yield evaluation
        except Abandoned:
            note = f"a stop left the evaluation after step {self.step}; it runs again"
            self.reporter.note(NoteType.EVALUATION_ABANDONED, note)
        finally:
            self.is_evaluation_abandonable = False
        self.counter.enter_stage(Stage.TRAINING)

    @property
    def _in_body(self) -> bool:
        return self._step_open or self._saved_in_body

    def _begin_evaluation(self) -> str:
        """Begin an evaluation and return its name, the same on all ranks. May raise ``Stopped``, and ``UserError`` for too
        many."""
        if self._in_body:
            self._evaluations += 1
            return f"evaluation/{self._unit}/{self._evaluations}"
        if (self._unit + 1) % STRIDE == FINISH:
            raise UserError(f"more than {FINISH - 1} evaluations after one step")
        self._begin_unit(self._unit + 1)
        return f"evaluation/{self._unit}"

    # --- acting together -----------------------------------------------------------------------------------------------

    def _begin_unit(self, unit: int) -> None:
        while (decision := self.agreement.begin(unit)) is not None:
            self._act_on(decision)
        self._unit = unit

    def _act_on(self, decision: Decision) -> None:
        self.checkpointer.drain()
        if decision.stop is None:
            if self.step > self.checkpointer.last.step:
                self.checkpointer.begin_save(self.step, "request", self._make_content)
            elif self.rank == 0:
                self.reporter.note(
                    NoteType.CHECKPOINT_NOT_NEEDED, f"step {self.step} is saved already; nothing was done since"
                )
            self.agreement.resolve(decision)
            return
        if decision.target == NOT_STARTED:
            threading.Event().wait()  # the side thread is about to end the process
        if decision.stop is Cause.CHECKPOINT_ERROR:
            raise self.checkpointer.too_many_failures
        self.counter.enter_stage(Stage.STOPPING)
        if self.proof is not None:
            self.proof.finish()
        error = self._save_if_new("stop", self._remaining_grace(decision.stop))
        self._report_progress(always=True)
        self._report_hook()
        tail = f"; no new checkpoint: {error}; step {self.checkpointer.last.step} counts" if error else ""
        self._stop(decision.stop, f"stopped after step {self.step} ({decision.stop}){tail}")

    def _stop(self, cause: Cause, message: str) -> NoReturn:
        self.stopped = Stopped(cause, message)
        raise self.stopped

    def _remaining_grace(self, cause: Cause) -> float:
        """Return the seconds left, after a stop by ``cause``, until the processes are killed; negative if they are over."""
        policy = self.launch.spec.policy
        grace = policy.stop_grace
        if cause in (Cause.SIGTERM, Cause.TIME_LIMIT) and policy.preemption_notice is not None:
            grace = min(grace, policy.preemption_notice)
        return grace - self.agreement.seconds_since_stop()

    def _save_if_new(self, reason: Reason, remaining_seconds: float | None = None) -> str | None:
        """Save this step unless it is saved already. Return the error message if the save failed, else None. Raises
        ``CheckpointError`` at the third failure in a row, except at a stop. Also raises the errors of ``Checkpointer.drain``."""
        self.checkpointer.drain()
        if self.step == self.checkpointer.last.step:
            self.checkpointer.wait_for_retention()
            return None
        try:
            return self._save(reason, remaining_seconds=remaining_seconds)
        except CheckpointError as error:
            if reason != "stop":
                raise
            return error.detail

    def _save(self, reason: Reason, *, finished: bool = False, remaining_seconds: float | None = None) -> str | None:
        return self.checkpointer.save(self.step, reason, finished, self._make_content, remaining_seconds).error

    def _make_content(self) -> Content:
        for files in self.event_files.values():  # what the script has logged is on the disk before the checkpoint
            files.store(self.step)
        return self._capture()

    def _make_copy_content(self) -> tuple[Content, dict[str, Any]]:
        """Return what a copy in memory has, and by path the entries that the agent adds to the event files' journals."""
        for files in self.event_files.values():
            files.flush()
        entries = {str(files.journal.absolute()): files.entry(self.step) for files in self.event_files.values()}
        return self._capture(), entries

    def _capture(self) -> Content:
        # The switches in force now: the code may have changed them since it started, and at its next start they will be unchanged
        # again.
        environment = {**self.environment, **environment_record.switches(self.device)}
        return self._contents.capture(self.step, self.total, environment, self.provenance, self.data_digest)

    # --- telling -------------------------------------------------------------------------------------------------------

    def _report_progress(self, *, always: bool = False) -> None:
        if self.rank == 0:
            self.reporter.report_progress(self.step, self.total, self._data_epoch, always=always)
        if self.reporter.hook_due():
            self._report_hook()

    @property
    def _data_epoch(self) -> int | None:
        return None if self.state.data is None else self.state.data.epoch

    def _report_hook(self) -> None:
        _, hook = self.state.require_wrapped()
        times = self._clock.take() if self.world_size > 1 else None
        self.reporter.report_hook(hook.summary(rank=self.rank, step=self.step), hook.warnings(), times)


def start_runtime(
    launch: LaunchFile,
    identity: Identity,
    clients: Clients,
    timeout: float,
    block_if_aborting: Callable[[], None],
    agreement: Agreement,
    counter: StepCounter,
    reporter: Reporter,
    choice: Future[Chosen] | None = None,
) -> Runtime:
    """Start the process group, agree on the checkpoint to start from, and return this rank's runtime. ``choice``: a choice of
    the checkpoint that has begun already. Raises ``UserError`` and ``CheckpointError``."""
    device = process_group.select_device(launch, identity)
    process_group.check_no_process_group()
    main, saving = (
        Exchange(c, identity.rank, identity.world_size, timeout, block_if_aborting)
        for c in (clients.main, clients.saver)
    )
    choice = choice or choose_in_background(launch, main, reporter)  # read and verified while the ranks meet
    process_group.init_group(launch, identity, clients, device, timeout)
    counter.tick()
    chosen = choice.result()
    counter.tick()
    return Runtime(launch, identity.local_rank, device, main, saving, agreement, counter, reporter, chosen)


def _may_save_early(launch: LaunchFile, chosen: Chosen) -> bool:
    """True if this attempt may save before the first scheduled checkpoint: it does not start from a checkpoint of this job."""
    return chosen.manifest is None or chosen.manifest.job_id != launch.job_id
