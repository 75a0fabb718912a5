"""One rank's run: the step boundary, where state is captured and all ranks act together. The loop and a Session stand on it.

Order at the boundary after a step: the save that is due, then whatever the ranks agreed on, then an evaluation. A save comes
before an evaluation, so an evaluation that a stop cut short runs again after the resume, from the same state.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ratchet_contract.errors import CheckpointError, UserError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import Cause
from ratchet_hooks.layout import ManagedDDP
from ratchet_store.commit import mark_changed
from ratchet_worker import environment_record, group, loop_variables, replay_proof, resume, unregistered
from ratchet_worker.adopted import adopted
from ratchet_worker.agreement import FINISH, NOT_STARTED, STRIDE, Agreement, Decision, Stopped, position
from ratchet_worker.checkpointer import Checkpointer
from ratchet_worker.choice import choose
from ratchet_worker.content import Content, Contents
from ratchet_worker.counter import Stage, StepCounter
from ratchet_worker.data.epochs import endless
from ratchet_worker.environment_record import Record
from ratchet_worker.evaluation import Evaluation, undisturbed
from ratchet_worker.exchange import Abandoned, Exchange
from ratchet_worker.gather import Gatherer
from ratchet_worker.group import Clients, Identity
from ratchet_worker.job_state import JobState
from ratchet_worker.late_changes import LateChanges, before_work, sentence
from ratchet_worker.reporter import Reason, Reporter, metric
from ratchet_worker.restore import Chosen
from ratchet_worker.snapshot import Until
from ratchet_worker.thread_pools import at_work
from ratchet_worker.trial import Trial

if TYPE_CHECKING:
    from ratchet_worker.epoch_loop import EpochLoop

Item = TypeVar("Item")


class Runtime:
    """``step`` is the number of completed steps of the job, ``total`` how many there will be (None: the script knows)."""

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
        self.chosen, self.adopted = chosen, adopted(launch, chosen)
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
            lambda: agreement.ask(Cause.CHECKPOINT_ERROR),
            early=_has_none(launch, chosen),
        )
        self.proof: replay_proof.ReplayProof | None = None  # from restore on
        self.restored = self.finished = False
        self.data_digest: str | None = None
        self.environment: Record = {}
        self.provenance: Record = {}  # of rank 0, from restore on
        self.notes = resume.Notes()
        self.gathers = 0  # of the script's Sessions, of JSON values
        self.gatherer = Gatherer()
        self.trial = Trial(launch, exchange.rank)
        self.abandonable = False  # within an evaluation that a stop may cut short
        self.epoch_loop: EpochLoop | None = None  # of the script's Sessions
        self.by_epochs = False  # a step is a batch of its loader; ``total`` tells how many are expected
        self._unit = position(self.step)  # the last one begun
        self._carried = set[str]()  # variables of the script's loops that were named
        self._ended = False  # the last step is done, the final checkpoint made
        self._open = False  # between begin_step and end_step
        self._iteration = 0  # of the hook, when the open step began
        self._stepped = False  # this attempt has done a step
        self._evaluations = 0  # within the open step
        self._batches = 0  # taken in it
        self._behind = False  # checkpoint() has ended the step, and the body of its loop goes on
        self._late: LateChanges | None = None  # there, where the step is saved
        self._counts: dict[str, list[int]] = {}  # of schedulers, at the last step boundary
        self.stopped: Stopped | None = None  # raised already; a thread of the script's may have ended with it
        # Without a service: called before the attempt's first step; where none is left; with the error when the block is left.
        self.begins: Callable[[], None] | None = None
        self.nothing_is_left: Callable[[], None] | None = None
        self.given_before = WeakSet[object]()  # of earlier runs in this process, which the script may keep
        self.left: Callable[[BaseException | None], None] | None = None
        self.trainer: threading.Thread | None = None  # does the steps: the one that asked for the last, from restore on
        self._boundary = (
            threading.RLock()
        )  # another thread may end the job, but not in the middle of the last step's end

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    @property
    def open_step(self) -> int:
        """Its number; between two steps that of the one just done."""
        return self.step + self._open

    @property
    def done(self) -> bool:
        """Nothing is left to train: the checkpoint says so, unless the script asks for more steps by now, or the last step is
        behind us."""
        if self._ended or (self.had_ended and self.step == self.chosen.base.step):
            return True
        return self.total is not None and self.step >= self.total and not self.by_epochs

    @property
    def had_ended(self) -> bool:
        """Is the base the run's last checkpoint, and are no more steps asked for by now? Another job that starts from it has not
        ended."""
        return self._from_the_end and not self.goes_further

    @property
    def goes_further(self) -> bool:
        """Is the base the run's last checkpoint, and are more steps asked for by now?"""
        before = self.earlier_total
        return self._from_the_end and None not in (self.total, before) and self.total > before  # type: ignore[operator]

    @property
    def _from_the_end(self) -> bool:
        manifest = self.chosen.manifest
        return manifest is not None and manifest.finished and manifest.job_id == self.launch.job_id

    @property
    def earlier_total(self) -> int | None:
        """``total`` of the attempt that saved the base. None where it was not known, or where another number of ranks counts
        other steps."""
        manifest = self.chosen.manifest
        return manifest.total_steps if manifest is not None and manifest.world_size == self.world_size else None

    @property
    def judged(self) -> bool:
        """Is this step saved, and the checkpoint judged by a metric (``checkpoint.keep_best``)?"""
        return self.launch.spec.checkpoint.keep_best is not None and self.checkpointer.judged == self.step

    # --- before the first step -----------------------------------------------------------------------------------------

    def wrap(self, module: nn.Module, *, find_unused_parameters: bool = False) -> ManagedDDP:
        """DDP under the job's hook, on the recorded bucket layout. ``find_unused_parameters``: also where the spec does not say
        so, unless it says ``static_graph``. A collective. Raises ``UserError``."""
        if self.state.ddp is not None:
            raise UserError(
                "one model per job can be wrapped; put several networks into one module. A copy that is not trained (an average) "
                "is given to prepare behind requires_grad_(False), or registered"
            )
        options = self.launch.spec.ddp
        if find_unused_parameters and not options.static_graph:
            options = options.model_copy(update={"find_unused_parameters": True})
        ddp, hook = resume.build(self.launch, self.chosen, module.to(self.device), self.device, self.notes, options)
        self.state.wrapped(ddp, hook)
        return ddp

    def look_at_loop(self, frame: FrameType | None, *, within_epoch: bool = False) -> None:
        """Tell what the script's loop in ``frame`` carries in variables. ``within_epoch``: it goes over an epoch's batches."""
        place, names = loop_variables.carried(frame)
        new = [name for name in names if name not in self._carried]
        if not new:
            return
        self._carried.update(new)
        if self.chosen.manifest is not None:
            text = loop_variables.sentence_of_resume(place, new)
        else:
            text = loop_variables.sentence(place, new, within_epoch=within_epoch)
        if self.rank == 0:
            self.reporter.note("loop-variables", text, place=place, names=new)

    def _look_for_unregistered(self) -> None:
        """On any rank, for what acts on the training and was not given to the Session. Raises ``UserError`` under
        ``determinism: strict``."""
        state, (ddp, _) = self.state, self.state.hook_or_refuse()
        given = (
            *state.optimizers.values(),
            *state.stateful.values(),
            *state.plain.values(),
            *ddp.module.modules(),
            state.task,
        )
        mine = unregistered.found(ddp.module, state.optimizers.values(), (*given, *self.given_before))
        self.given_before.update(unregistered.untied(given))
        names = sorted({name for rank in self.exchange.gather("unregistered", mine) for name in rank})
        if not names:
            return
        text = unregistered.sentence(names)
        if self.launch.spec.determinism == "strict":
            raise UserError(text, code="unregistered-state")
        self.notes.unregistered = text
        if self.rank == 0 and self.chosen.manifest is None:
            self.reporter.note("unregistered", text)

    def restore(self, total: int | None) -> None:
        """Put back what was registered, tell how it went, and say that training begins. On every rank, once.

        Raises ``UserError`` (state that does not fit, ``determinism: strict`` and a difference) and ``CheckpointError``.
        """
        if self.restored:
            raise UserError("restore comes once, after everything is registered and before the first step")
        self.total = total
        self._look_for_unregistered()
        self.state.refuse_uncovered()
        self.state.refuse_changed()
        self.state.begin()
        self.counter.tick()
        self.proof = replay_proof.begin(self, resume.restore(self))
        self.trainer, self.restored = threading.current_thread(), True
        self.state.require_storable()
        self._set_gates()
        self.counter.stage(Stage.TRAINING)
        self.trial.begins(self._data_epoch)
        self._report_hook()

    def mark_not_exact(self) -> None:
        """Every checkpoint from here on says since which resume it has other bits than an undisturbed run's."""
        base = self.chosen.base
        self.provenance.setdefault(environment_record.NOT_EXACT, f"step {base.step}, attempt {base.epoch}")

    def _set_gates(self) -> None:
        """What changes the state behind a boundary waits for the copy that is made of it."""
        if not self.checkpointer.overlapped:  # and a hook would be traced with a compiled optimizer.step()
            return
        gate = self.checkpointer.hold
        self.state.hook_or_refuse()[1].before_change = lambda: gate(Until.BACKWARD)
        for optimizer in self.state.optimizers.values():
            optimizer.register_step_pre_hook(lambda *_: gate(Until.STEP))

    # --- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start the next step, or act on what was agreed first. Raises ``Stopped``, and ``UserError`` behind the job's end, and
        where a step is open."""
        if self.stopped is not None:  # and caught by the script
            raise self.stopped
        self.refuse_after_the_end()
        if self._open:
            raise UserError(
                "another loop over steps was begun in the middle of a step: all steps belong in one loop, steps(total of all "
                "phases), and a loop within a step has range(...). Behind a loop that was left by `break` the job has ended"
            )
        self._end_body()
        if self.trial.under_way:
            self._next_of_trial()
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins()
        self._begin(position(self.step + 1))
        self.trainer = threading.current_thread()
        self._evaluations = self._batches = 0
        self.checkpointer.resumed()
        self.state.step_begins()
        self._open, self._iteration = True, self.state.hook_or_refuse()[1].iteration
        self.counter.start_step(self.step + 1)

    def ask_for(self, total: int | None) -> None:
        """The script's loop has ``total`` steps. Where ``restore`` did not know that, they are compared here with those of the
        attempt that saved the base. Raises ``UserError`` under ``determinism: strict``."""
        unknown, self.total = self.total is None, total
        if unknown and (odd := resume.other_total(self)) is not None:
            text = f"not exact: {odd.sentence()}"
            if self.launch.spec.determinism == "strict":
                raise UserError(f"determinism is strict, and the resume is {text}", code="environment-differs")
            self.mark_not_exact()
            if self.rank == 0:
                self.reporter.note("other-total", text)

    def nothing_left(self) -> None:
        """The script's loop has no step to do. A further loop is refused, as in the run that has done the steps."""
        self._ended = True
        if self._from_the_end and self.nothing_is_left is not None:
            self.nothing_is_left()

    def refuse_after_the_end(self) -> None:
        """Raises ``UserError``. Also for a loop over no more steps than there were: its body would be left out without a word."""
        if self._ended:
            raise UserError(
                f"another step was asked for after step {self.step}, which was the last: a resume from the final checkpoint has "
                "nothing left to do and would leave it out. Ask for all steps in one loop: steps(total of all phases), or "
                "epochs(all of them)",
                code="after-the-end",
            )

    def end_step(self, *, last: bool = False) -> None:
        """The step boundary: after ``optimizer.step()`` and ``zero_grad()``. Without effect when no step is open. ``last``: the
        job ends here, whatever ``total`` says.

        A hook that averages parameters does so here, as the last act of the step: on every rank, also where a scaler skipped
        ``optimizer.step()`` on some, and before the step counts, is saved or stopped at.
        """
        if not self._open:
            self._end_body()
            return
        with self._boundary:
            self._end_open_step(last)

    def _end_open_step(self, last: bool) -> None:
        self.checkpointer.hold(Until.STEP)  # a scaler may have left the optimizer's step out
        self.state.hook_or_refuse()[1].average_parameters()
        self.exchange.hold()
        self._open = False
        self.step += 1
        self._ended = last or (self.step == self.total and not self.by_epochs)
        self._fingerprint()
        self.counter.finish_step(self.step)
        if self.trial.under_way:
            phase = self.state.hook_or_refuse()[1].summary(rank=self.rank, step=self.step, norm=False).phase
            self.trial.step_done(self.step, self._data_epoch, phase)
        self._report_progress(always=self._ended)
        if self._ended:
            self._save("end", finished=True)
        else:
            if not self._stepped:  # what appears in a first step
                self._stepped = True
                self.state.require_storable()
                self._report_unmatched()
            self.checkpointer.boundary(self.step, self.state.late, self._content)

    def _report_unmatched(self) -> None:
        if self.rank == 0 and (paths := self.state.hidden.unmatched):
            self.reporter.note("ignored-not-found", f"nothing was found at {', '.join(paths)}, which is to be ignored")

    def batches(self, data: Iterable[Item]) -> Iterator[Item]:
        """Batches of ``data``, epoch after epoch. Raises ``UserError`` for an epoch without batches, and for a batch that is
        taken where no step is open: the position in the data would belong to another step than the rest of the state."""
        return endless(data, self.taken)

    def taken(self) -> None:
        """The open step has taken a batch. Raises ``UserError`` where none is open."""
        if not self._open:
            raise UserError(
                "a batch of the training data was taken outside a step, so a checkpoint would count it to the wrong one: take "
                "batches in the body of the loop over steps, before its end is asked for, and none in advance"
            )
        self.trial.batch()
        self._batches += 1
        self.counter.tick()

    @property
    def batch_taken(self) -> bool:
        """Has this step taken a batch of the training data?"""
        return self._batches > 0

    def _fingerprint(self) -> None:
        """Before the step is counted, so that whoever finds it counted finds its fingerprint, and before it is saved."""
        assert self.proof is not None
        self.proof.boundary(self.step, self.state.data, self._batches)
        self._counts = self._scheduler_counts()
        if self._ended:
            self.proof.finish()

    def settle(self, *, last: bool = False) -> None:
        """Something is asked for in the middle of a loop's body: if the open step has done its work, it ends here."""
        if self._worked:
            self.end_step(last=last)

    @property
    def _worked(self) -> bool:
        if self.by_epochs and self._batches:  # a step may be one of several batches that are accumulated
            return self._open
        return self._open and self.gradients_reduced

    @property
    def gradients_reduced(self) -> bool:
        """Has the hook run since this step began?"""
        return self.state.hook_or_refuse()[1].iteration > self._iteration

    def checkpoint(self) -> bool:
        """Save now, unless this step is saved; every rank calls it after the same step. False: the save failed (and was told)."""
        self._look_behind()
        self.checkpointer.drain()  # a save that is under way is of the last boundary
        early = self._begun()
        if self._worked or early:
            self._behind = True
            # Before it can be saved: a kill from now on loses the rest of the body.
            self.counter.saved_within(self.step + self._worked)
        self.settle()
        error = self._save_if_new("request")
        if early and error is None:
            self._mark_changed(self.step, before_work(self.step, early))
        elif self._behind and error is None:
            self._late = LateChanges(self.state, self.device, self.step)
        return error is None

    def _begun(self) -> list[str]:
        """What the open step has changed already, where ``checkpoint()`` would save the step before it."""
        if not self._open or self._worked or self.step == self.checkpointer.last.step:
            return []
        assert self.proof is not None
        stepped = [name for name, count in self._scheduler_counts().items() if count != self._counts.get(name, count)]
        return [*self.proof.moved(self.state.data, self._batches), *stepped]

    def _scheduler_counts(self) -> dict[str, list[int]]:
        schedulers = {name: item for name, item in self.state.stateful.items() if isinstance(item, LRScheduler)}
        # A ChainedScheduler has no count of its own up to torch 2.9.
        return {
            name: [one.last_epoch for one in vars(item).get("_schedulers") or (item,)]
            for name, item in schedulers.items()
        }

    def _end_body(self) -> None:
        self._look_behind()
        if self._behind:
            self._behind = False
            self.counter.saved_within(0)

    def _look_behind(self) -> None:
        """What changes in a body behind ``checkpoint()``, which has ended its step, belongs to no step."""
        late, self._late = self._late, None
        if late is not None and (names := late.found()):
            self._mark_changed(late.step, sentence(late.step, names))

    def _mark_changed(self, step: int, text: str) -> None:
        if mark_changed(JobPaths(Path(self.launch.job_root)).checkpoint(step, self.launch.epoch), text):
            self.reporter.note("changed-behind-checkpoint", text, step=step)

    def log(self, values: dict[str, float | torch.Tensor]) -> None:
        """Metrics of the open step, or of the one just done; only rank 0's are kept."""
        if self.rank == 0:
            step, found = self.open_step, {k: metric(k, v) for k, v in values.items()}
            self.reporter.metrics(step, found)
            self.checkpointer.metric(step, found)

    def finish(self) -> None:
        """The end of the job: every rank has done its last step. The final checkpoint, if it is not there yet. Another thread
        than that of the steps waits for the last one, and raises ``RuntimeError`` where none comes any more."""
        self._await_last_step()
        with self._boundary:
            if not self.finished:
                self._finish()

    def _await_last_step(self) -> None:
        """That a loop was left by ``break`` and not by an error is known to its own thread only."""
        trainer = self.trainer
        if trainer is None or trainer is threading.current_thread():
            return
        while not (self.finished or self.done or self.stopped is not None):
            if not at_work(trainer):
                raise RuntimeError(
                    f"the thread that does the steps ended after step {self.step}, before its loop had: that is no success. An "
                    "error of its own stands in the log. A loop that it leaves by `break` ends the job if the thread then "
                    "calls the Session's finish(), or has the Session's block around the loop"
                )
            trainer.join(0.05)

    def _finish(self) -> None:
        if self.stopped is not None:
            raise self.stopped
        self.settle(last=True)
        self._end_body()
        manifest = self.chosen.manifest
        if manifest is not None and manifest.job_id != self.launch.job_id and self.step == manifest.step:
            if self.adopted is not None:
                raise UserError(
                    f"the adopted run has done all {self.step} steps, and nothing is left to train. With code that asks for "
                    f"more: `ratchet resume {self.launch.job_id} --code DIR`; with arguments that do, adopt it again with them"
                )
            raise UserError(
                f"the fork starts after step {self.step} and has nothing left to train: fork {manifest.job_id} again, with more "
                f"steps or from an earlier checkpoint (`ratchet fork {manifest.job_id} --checkpoint ID`)"
            )
        self._begin(position(self.step, FINISH))
        assert self.proof is not None
        self.proof.finish()
        self.checkpointer.drain()
        last = self.checkpointer.last
        ended = last.epoch == self.launch.epoch or (manifest is not None and manifest.finished)
        if self.step != last.step or not ended:
            self._save("end", finished=True)
        self._report_end()
        self.checkpointer.finish()  # only now: a rank that left its loop alone has not ended the job
        self.finished = self._ended = True
        self.agreement.close()

    def _report_end(self) -> None:
        """After the last save. A rank that stopped listening before every rank is here would leave one that is frozen before its
        own end waiting for an answer."""
        self._report_hook()
        self._report_trial()
        self.exchange.gather("finish", None, timeout=math.inf)

    # --- a trial -------------------------------------------------------------------------------------------------------

    def _next_of_trial(self) -> None:
        """Before the next step of a trial: its end, or a fault of its plan. Raises ``Stopped``, and ``CheckpointError``."""
        if not self.trial.over(self.step):
            self.trial.strike(self.step, self.checkpointer.drain, self.counter.start_step, self.agreement)
            return
        self._begin(position(self.step, FINISH))
        assert self.proof is not None
        self.proof.finish()
        if (error := self._save_if_new("end")) is not None:
            raise CheckpointError(error)
        self._report_progress(always=True)
        self._report_end()
        self.agreement.close()
        self._stop(Cause.COMPLETED, f"the trial ends after step {self.step}")

    def _report_trial(self) -> None:
        if self.rank != 0 or not self.trial.under_way:
            return
        steps = {
            name: int(item.last_epoch) for name, item in self.state.stateful.items() if hasattr(item, "last_epoch")
        }
        facts = self.trial.facts(self.step, self.total, steps)
        self.reporter.note("trial-ended", f"a trial ended after step {self.step}", **facts)

    # --- evaluation ----------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[Evaluation]:
        """A block that leaves no trace in the training state. On every rank, after the same step.

        Between two steps a stop cuts it short, and it runs again after the resume. Within a loop's body it belongs to the step,
        as does what a script makes of its values (a scheduler that is stepped by them): a stop comes after both.
        """
        ddp, hook = self.state.hook_or_refuse()
        cut_short = not self._in_body
        name = self._begin_evaluation()  # which may begin a save
        if cut_short:
            self.state.evaluation_begins()
        self.trial.evaluates(self.step, self.checkpointer.drain)
        self.checkpointer.hold(Until.STEP, trial=False)  # averages may be swapped for the parameters, and back
        self.abandonable = cut_short
        self.counter.stage(Stage.EVALUATING)
        evaluation = Evaluation(
            self.exchange, name, self.counter.tick, lambda: cut_short and self.agreement.stop_pending()
        )
        try:
            with (
                nullcontext() if self._late is None else self._late.evaluated(),
                undisturbed(
                    ddp, hook, self.state.data, self.device, self.state.all_optimizers,
                    broadcast=self.launch.spec.ddp.broadcast_buffers,
                ),
            ):  # fmt: skip
                yield evaluation
        except Abandoned:
            note = f"a stop left the evaluation after step {self.step}; it runs again"
            self.reporter.note("evaluation-abandoned", note)
        finally:
            self.abandonable = False
        self.counter.stage(Stage.TRAINING)

    @property
    def _in_body(self) -> bool:
        return self._open or self._behind

    def _begin_evaluation(self) -> str:
        """Its name. Between two steps it is a unit of its own, within a body it belongs to the step's."""
        if self._in_body:
            self._evaluations += 1
            return f"evaluation/{self._unit}/{self._evaluations}"
        if (self._unit + 1) % STRIDE == FINISH:
            raise UserError(f"more than {FINISH - 1} evaluations after one step")
        self._begin(self._unit + 1)
        return f"evaluation/{self._unit}"

    # --- acting together -----------------------------------------------------------------------------------------------

    def _begin(self, unit: int) -> None:
        while (decision := self.agreement.begin(unit)) is not None:
            self._act(decision)
        self._unit = unit

    def _act(self, decision: Decision) -> None:
        self.checkpointer.drain()
        if decision.stop is None:
            if self.step > self.checkpointer.last.step:
                self.checkpointer.begin(self.step, "request", self._content)
            elif self.rank == 0:
                self.reporter.note(
                    "checkpoint-not-needed", f"step {self.step} is saved already; nothing was done since"
                )
            self.agreement.resolve(decision)
            return
        if decision.target == NOT_STARTED:
            threading.Event().wait()  # the side thread is about to end the process
        if decision.stop is Cause.CHECKPOINT_ERROR:
            raise self.checkpointer.too_many_failures
        self.counter.stage(Stage.STOPPING)
        if self.proof is not None:
            self.proof.finish()
        error = self._save_if_new("stop", self._left(decision.stop))
        self._report_progress(always=True)
        self._report_hook()
        tail = f"; no new checkpoint: {error}; step {self.checkpointer.last.step} counts" if error else ""
        self._stop(decision.stop, f"stopped after step {self.step} ({decision.stop}){tail}")

    def _stop(self, cause: Cause, message: str) -> NoReturn:
        self.stopped = Stopped(cause, message)
        raise self.stopped

    def _left(self, cause: Cause) -> float:
        """Seconds until the processes of a stop are killed."""
        policy = self.launch.spec.policy
        grace = policy.stop_grace
        if cause in (Cause.SIGTERM, Cause.TIME_LIMIT) and policy.preemption_notice is not None:
            grace = min(grace, policy.preemption_notice)
        return grace - self.agreement.since_stop()

    def _save_if_new(self, reason: Reason, left: float | None = None) -> str | None:
        """What went wrong, or None."""
        self.checkpointer.drain()
        if self.step == self.checkpointer.last.step:
            self.checkpointer.settle()
            return None
        try:
            return self._save(reason, left=left)
        except CheckpointError as error:
            if reason != "stop":
                raise
            return error.detail

    def _save(self, reason: Reason, *, finished: bool = False, left: float | None = None) -> str | None:
        return self.checkpointer.save(self.step, reason, finished, self._content, left).error

    def _content(self) -> Content:
        # What is in force now: the code may have changed it since it started, and will not have so when it starts again.
        environment = {**self.environment, **environment_record.switches(self.device)}
        return self._contents.after(self.step, self.total, environment, self.provenance, self.data_digest)

    # --- telling -------------------------------------------------------------------------------------------------------

    def _report_progress(self, *, always: bool = False) -> None:
        if self.rank == 0:
            self.reporter.progress(self.step, self.total, self._data_epoch, always=always)
        if self.reporter.hook_due():
            self._report_hook()

    @property
    def _data_epoch(self) -> int | None:
        return None if self.state.data is None else self.state.data.epoch

    def _report_hook(self) -> None:
        _, hook = self.state.hook_or_refuse()
        self.reporter.hook(hook.summary(rank=self.rank, step=self.step), hook.warnings())


def join(
    launch: LaunchFile,
    identity: Identity,
    clients: Clients,
    timeout: float,
    hold: Callable[[], None],
    agreement: Agreement,
    counter: StepCounter,
    reporter: Reporter,
) -> Runtime:
    """Start the process group and agree on what to start from; on every rank. ``timeout``: seconds that a rank waits for others;
    ``hold``: see ``GroupAbort.hold``. Raises ``UserError`` and ``CheckpointError``."""
    device = group.device_of(launch, identity)
    group.join(launch, identity, clients, device, timeout)
    counter.tick()
    main, saving = (
        Exchange(c, identity.rank, identity.world_size, timeout, hold) for c in (clients.main, clients.saver)
    )
    chosen = choose(launch, main, reporter)
    counter.tick()
    return Runtime(launch, identity.local_rank, device, main, saving, agreement, counter, reporter, chosen)


def _has_none(launch: LaunchFile, chosen: Chosen) -> bool:
    """Has the job no checkpoint of its own, and may it have one before the first scheduled? Not under a service that knows no
    such save: it sends null for a job that has none."""
    own = chosen.manifest is not None and chosen.manifest.job_id == launch.job_id
    return not own and launch.save_seconds is not None
