"""Hugging Face's Trainer in a job. A script changes by one line, after the imports of transformers::

    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from ratchet.transformers import Trainer

``train()`` trains within the rank's ``Session``. A step of the job is an optimizer step, and ends when the Trainer requests the
next batches. A custom Trainer derives from this class, alone or together with another one: ``class Mine(Trainer, SFTTrainer)``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

try:
    import transformers
    from transformers import TrainerCallback
    from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
    from transformers.trainer_utils import TrainOutput, get_last_checkpoint
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise ImportError("transformers is not installed: pip install 'ratchet-train[worker,transformers]'") from error

from ratchet_contract import env_vars
from ratchet_contract.errors import UserError
from ratchet_contract.paths import RUN_DIRECTORY
from ratchet_contract.phases import NoteType
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.data.sampler_position import SamplerPosition
from ratchet_worker.integrations import accelerate
from ratchet_worker.integrations.session_steps import Steps, continues_own_job
from ratchet_worker.integrations.training_arguments import SEARCH, check_arguments, ddp_arguments, make_generator
from ratchet_worker.integrations.training_batches import TrainingBatches
from ratchet_worker.session.mlflow_run import RunModule
from ratchet_worker.session.session import Session
from ratchet_worker.training.runtime import Runtime

if not all(
    hasattr(transformers.Trainer, name) for name in ("_run_epoch", "_init_training_state", "_prepare_for_training")
):
    raise ImportError("a Trainer as a job needs transformers 5: pip install 'transformers[torch]>=5'")

if env_vars.RANK in os.environ and not torch.cuda.is_available():
    # Otherwise TrainingArguments makes each rank that torchrun starts on a CPU a separate training. In a job it is already set.
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")

__all__ = ["Seq2SeqTrainer", "Trainer"]

_PROGRESS: Final = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint", "stateful_callbacks",
)  # fmt: skip


class Trainer(transformers.Trainer):
    """Hugging Face's ``Trainer`` that trains within the rank's ``Session``. Raises ``UserError`` for arguments that a job cannot
    honour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._session: Session | None = None  # set by train()
        self._progress = _Progress(self)
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(
            0, RatchetJob(self)
        )  # first, so that others see the epoch that it corrects

    @override
    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, then create the accelerator as the original does. Raises ``UserError``."""
        check_arguments(self.args)  # before the Trainer uses its arguments
        super().create_accelerator_and_postprocess()

    @property
    def session(self) -> Session:
        """The rank's Session. Available from ``train()`` on; earlier access fails with ``AssertionError``."""
        assert self._session is not None
        return self._session

    @property
    def _runtime(self) -> Runtime:
        return self.session._runtime

    # --- the way in ----------------------------------------------------------------------------------------------------

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as the original does, once per job. ``resume_from_checkpoint`` is not loaded. Raises ``UserError`` for what a job
        cannot honour, and ``Stopped``."""
        if trial is not None:
            raise UserError(f"trial: {SEARCH}")
        directory = Path(str(self.args.output_dir), f"_{RUN_DIRECTORY}")  # push_to_hub skips names that begin with "_"
        ddp = ddp_arguments(self.args)
        self._session = accelerate.rank_session(lambda: Session._for_package(directory, ddp))
        if self._runtime.restored:
            raise UserError("call trainer.train() only once per job, for all epochs")
        self._steps = Steps(self.session, "the Trainer", self._progress.undo_trainer_changes)
        with self.session:
            if self.session.rank == 0 and self.args.ddp_timeout != TrainingArguments.ddp_timeout:
                self._runtime.reporter.note(
                    NoteType.DDP_TIMEOUT,
                    f"ddp_timeout={self.args.ddp_timeout} applies only before train(): within it the limit is "
                    "policy.step_deadline of the job, and without a service 1800 s",
                )
            self._check_start(resume_from_checkpoint)
            self._prepare_loggers()
            return super().train(None, None, ignore_keys_for_eval)

    def _prepare_loggers(self) -> None:
        """Make the callbacks for TensorBoard and MLflow (``report_to``) log each step once, although steps are repeated after a
        kill."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MLflowCallback):
                callback._ml_flow = RunModule(callback._ml_flow, self.session.mlflow_run)  # type: ignore[assignment]
            if isinstance(callback, TensorBoardCallback):
                callback._init_summary_writer = partial(self._open_writer, callback)  # type: ignore[method-assign]
                callback.on_log = partial(self._log_once, callback.on_log)  # type: ignore[method-assign]

    def _open_writer(self, callback: Any, args: TrainingArguments) -> None:
        """Give ``callback`` its writer. The default directory has the job's id in its name, in place of the time."""
        fixed = os.environ.get("TENSORBOARD_LOGGING_DIR")
        directory = fixed or Path(str(args.output_dir), "runs", self._runtime.launch.job_id)
        callback.tb_writer = self.session.summary_writer(directory)

    def _log_once(self, log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call ``log`` unless the values are of a step that was logged before."""
        if not self._is_logged_already:
            log(*args, **kwargs)

    @property
    def _is_logged_already(self) -> bool:
        """True between the restore and the first step: an earlier attempt has logged this step (``eval_on_start``)."""
        return self._progress.is_before_first_step and continues_own_job(self.session)

    def _check_start(self, checkpoint: str | bool | None) -> None:
        """Report that ``checkpoint`` is not loaded; do nothing without one. Raises ``UserError`` if this attempt starts from
        scratch and this job has not written ``checkpoint``."""
        if checkpoint is True:
            output = Path(str(self.args.output_dir))
            checkpoint = get_last_checkpoint(str(output)) if output.is_dir() else None  # type: ignore[no-untyped-call]
        if not checkpoint:
            return
        session = self.session
        if not session.resumed and not _is_written_by(Path(str(checkpoint)), self._runtime.launch):
            raise UserError(
                f"resume_from_checkpoint: {checkpoint} was not written by this job, which begins at step 0. To begin with its "
                "weights name it as the model (model_name_or_path), or in the spec's start_from; to ignore it use another "
                "output_dir"
            )
        if session.rank == 0:
            self._runtime.reporter.note(
                NoteType.RESUME_FROM_CHECKPOINT,
                f"resume_from_checkpoint: {checkpoint} is not read: the job continues from its own step {session.step}",
            )

    @override
    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported; always raises ``UserError``."""
        raise UserError(f"hyperparameter_search: {SEARCH}")

    @override
    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Prepare the Trainer's counters as the original does. Returns the epoch to begin with, and 0 as the steps to skip."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        self._progress.steps_per_epoch = num_update_steps_per_epoch
        # The Trainer sets these, to the same values, after the restore; but the state is read before that.
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, device=self.args.device), 0.0
        self._globalstep_last_logged = 0
        # ``_run_epoch`` shortens a resumed epoch, instead of skipping steps of it.
        return self.session.step // num_update_steps_per_epoch, 0

    @override
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Wrap the model in the job's DDP at the first call for training; otherwise do what the original does."""
        if not training or self._runtime.state.ddp is not None:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        accelerate.check_same_ranks(self.session, self.accelerator)
        handler: Any = self.accelerator.ddp_handler
        wrap = partial(self._runtime.wrap, find_unused_parameters=handler.find_unused_parameters)
        prepared: nn.Module = accelerate.prepare_model(self.accelerator, model, wrap)
        return prepared

    @override
    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *args: Any) -> tuple[nn.Module, Any]:
        """Prepare as the original does, and register and restore the state. Returns the model, and the loader as
        ``TrainingBatches``."""
        make_generator(self.data_collator, self.args.dataloader_num_workers)
        batches = TrainingBatches(train_dataloader)
        model, _ = super()._prepare_for_training(max_steps, batches, *args)  # type: ignore[no-untyped-call]
        optimizer: Any = self.optimizer
        state: dict[str, Any] = {"optimizer": optimizer.optimizer, "scheduler": self.lr_scheduler}
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        self.session.register(**state, data=batches.position, trainer=self._progress)
        self._steps.restore(max_steps)
        return model, batches

    # --- steps ---------------------------------------------------------------------------------------------------------

    @override
    def _run_epoch(self, **given: Any) -> None:  # type: ignore[override]
        """Train an epoch, or the rest of a resumed one; nothing if the training has ended. Raises ``UserError`` if a callback
        ends the epoch early and not the training."""
        if self._runtime.done or self._progress.ended:
            self.control.should_training_stop = True
            return
        epoch, batches = given["epoch"], given["steps_in_epoch"]
        self._progress.epoch = epoch, batches
        done = self.state.global_step - epoch * self._progress.steps_per_epoch
        # The data are already at their position: the original's loop gets fewer steps to do and skips nothing.
        given["num_update_steps_per_epoch"] -= done
        given["steps_in_epoch"] -= done * self.args.gradient_accumulation_steps
        super()._run_epoch(**given)  # type: ignore[no-untyped-call]
        data = self._runtime.state.data
        if isinstance(data, SamplerPosition) and data.epoch == epoch and not self.control.should_training_stop:
            data.end()  # it began again, on another number of ranks
        early = self.state.global_step < (epoch + 1) * self._progress.steps_per_epoch
        if early and self.control.should_epoch_stop and not self.control.should_training_stop:
            raise UserError(
                f"should_epoch_stop after step {self.state.global_step}: an epoch that ends early has no place in the order of "
                "the job's data. Set should_training_stop, or let the epoch end"
            )

    @override
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Begin a new step and return its batches with their number of items. Raises ``Stopped``, and ``UserError`` if the data
        end too early."""
        self._steps.next_step()
        self._runtime.trial.count_batches(num_batches)
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(samples) != num_batches:
            raise UserError("the data ended before their epoch did: steps_per_epoch promised more batches")
        return samples, items

    @override
    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """End the last step and save the final checkpoint, before the best model may be loaded."""
        self._progress.undo_trainer_changes()
        self.session.finish()
        output: TrainOutput = super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        return output


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """``Trainer`` in this module, with generation in evaluations, as in transformers' ``Seq2SeqTrainer``."""


def _is_written_by(checkpoint: Path, launch: LaunchFile) -> bool:
    """True if this job has, or may have, written the Trainer's ``checkpoint`` (a directory)."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    # Such as a checkpoint that a kill has left incomplete.
    except (OSError, ValueError):
        return launch.attempt > 1
    job = state.get("stateful_callbacks", {}).get(RatchetJob.__name__, {})
    return bool(job.get("attributes", {}).get("job_id") == launch.job_id)


class RatchetJob(TrainerCallback, ExportableState):
    """A callback that counts progress, corrects the Trainer's fractional epoch, and logs the Trainer's numbers as the job's
    metrics."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state(self) -> dict[str, Any]:
        """The callback's state for the Trainer's checkpoints: the id of this job."""
        return {"args": {}, "attributes": {"job_id": self._trainer._runtime.launch.job_id}}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Correct ``state.epoch``, which the Trainer computes as if a resumed epoch had begun with this attempt."""
        progress = self._trainer._progress
        epoch, batches = progress.epoch
        done = (state.global_step - epoch * progress.steps_per_epoch) * args.gradient_accumulation_steps
        state.epoch = epoch + min(done, batches) / batches

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Log the numbers in ``logs`` as the job's metrics while the Trainer trains, unless their step was logged before."""
        trainer = self._trainer
        if trainer._session is None or not (trainer.is_in_train and trainer._runtime.restored):
            return
        if not trainer._is_logged_already:
            trainer.session.log({k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))})

    def _tick(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # many batches, or a long evaluation, are no hang
        """Count progress, so that many batches in a step or a long evaluation do not look like a hang."""
        self._trainer._runtime.counter.tick()

    on_substep_end: Callable[..., None] = _tick

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count progress in an evaluation and, while the job trains, record the evaluation for a trial run (``ratchet
        prove``)."""
        if self._trainer._session is None:
            return
        runtime = self._trainer._runtime
        runtime.counter.tick()
        if runtime.restored and not runtime.finished:
            runtime.trial.record_evaluation(runtime.step, runtime.checkpointer.drain)


class _Progress:
    """The Trainer's own state as an object that the Session saves, such as its counters, log and callbacks' state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self.steps_per_epoch = 0  # optimizer steps
        self.epoch = 0, 1  # the current epoch, and its number of batches
        self.ended = False  # a callback, or the last step, had ended this job's training; a fork's continues

    @property
    def is_before_first_step(self) -> bool:
        """True from the restore of a checkpoint until the first step begins; False without a checkpoint."""
        return self._loaded is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's own state, such as its counters, log and loss, and the attributes of callbacks with a state,
        ``RatchetJob`` excepted."""
        trainer = self._trainer
        state: dict[str, Any] = {name: deepcopy(getattr(trainer.state, name)) for name in _PROGRESS}
        state["log_history"] = [_without_measurements(entry) for entry in state["log_history"]]
        state["stateful_callbacks"].pop(RatchetJob.__name__, None)  # it names this job, and a fork is another job
        return {
            "steps_per_epoch": self.steps_per_epoch,
            "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
            "ended": trainer.control.should_training_stop,
            "state": state,
            "flos": float(trainer.current_flos),
            "loss": trainer._tr_loss.clone(),
            "total_loss": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
            "callbacks": {name: one.state()["attributes"] for name, one in self._callbacks()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, and keep it for ``undo_trainer_changes``. Raises ``ValueError`` if the steps per epoch or the
        batches per step have changed."""
        now = {"steps_per_epoch": self.steps_per_epoch}
        now["gradient_accumulation_steps"] = self._trainer.args.gradient_accumulation_steps
        for name, value in now.items():
            if state[name] != value:
                raise ValueError(
                    f"{name} was {state[name]}, now it is {value}: keep the data, and the samples that a step has on all "
                    "ranks together (on half of the ranks twice per_device_train_batch_size)"
                )
        further = self._trainer._runtime.is_extended
        self._loaded, self.ended = state, state["ended"] and continues_own_job(self._trainer.session) and not further
        self._apply_loaded()

    def undo_trainer_changes(self) -> None:
        """Undo, once, what the Trainer changed in this state between the restore and the first step."""
        if self._loaded is None:
            return
        self._apply_loaded()
        # Such as counters set to 0, and effects of eval_on_start, which runs in every attempt.
        trainer, state, self._loaded = self._trainer, self._loaded, None
        trainer._tr_loss.copy_(state["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = state["total_loss"], state["last_logged"]
        trainer.control.should_training_stop = self.ended
        trainer._initial_global_step = 0  # training_loss is the mean over all of the job's steps

    def _apply_loaded(self) -> None:
        """Set the Trainer's counters, log and callbacks to copies of the loaded state."""
        assert self._loaded is not None
        state: Any = self._trainer.state
        of_this_job = state.stateful_callbacks
        for name, value in self._loaded["state"].items():
            setattr(state, name, deepcopy(value))
        state.stateful_callbacks = {**of_this_job, **state.stateful_callbacks}
        self._trainer.current_flos = self._loaded["flos"]
        for name, callback in self._callbacks():
            for attribute, value in self._loaded["callbacks"].get(name, {}).items():
                setattr(callback, attribute, deepcopy(value))

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yield the callbacks with a state, except ``RatchetJob``, with names made of class and index."""
        seen: dict[str, int] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState) and not isinstance(callback, RatchetJob):
                name = type(callback).__qualname__
                seen[name] = seen.get(name, -1) + 1
                yield f"{name}.{seen[name]}", callback


def _without_measurements(entry: dict[str, Any]) -> dict[str, Any]:
    """The log entry without measured times, speeds and memory, which differ in each run."""
    return {k: v for k, v in entry.items() if not k.endswith(("_runtime", "_per_second")) and "_mem_" not in k}
