"""Hugging Face's Trainer as a job: its loop inside of a ``Session``.

The script as it was, but for the session, the class, and the arguments that the job decides::

    from ratchet import Session
    from ratchet_worker.integrations.transformers import SessionTrainer, options
    from transformers import TrainingArguments

    with Session() as session:
        args = TrainingArguments(**options(session), per_device_train_batch_size=32, num_train_epochs=3)
        trainer = SessionTrainer(session, model=model, args=args, train_dataset=my_dataset())
        trainer.train()

A Trainer of one's own has ``SessionTrainer`` for its base, or beside it: ``class Mine(SessionTrainer, Seq2SeqTrainer)``.
Hook, DDP's settings, ranks and devices are those of the spec. ``train_dataset`` goes through a ``TrainLoader`` with the
arguments' batch size, workers and collator (or ``session.register(data=...)``, and no train_dataset). A step of the job is one
of the optimizer. It ends when the Trainer asks for the next batches: what callbacks, logs and evaluations did until then belongs
to it. Then it is counted, saved when a checkpoint is due, and stopped at when a stop was asked for. Saved are model, optimizer,
scheduler, scaler, data position, generators, buffers, hook, the Trainer's own progress, and callbacks with ``state`` and
``attributes`` (``ExportableState``). What the Trainer logs are the job's metrics.

Arguments that the job decides, or that no resume could honour, are refused by name. A stop waits for the end of an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
    from transformers.trainer_utils import TrainOutput
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise ImportError("transformers is not installed: pip install 'ratchet-train[worker,transformers]'") from error

from ratchet_contract.errors import UserError
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.integrations import accelerate
from ratchet_worker.integrations.steps import Steps, goes_on, refuse_other_epochs
from ratchet_worker.integrations.training_arguments import (
    RESUMES,
    SEARCH,
    make_generator,
    options,
    refuse,
    refuse_own_data,
)
from ratchet_worker.session import Session

if not all(hasattr(Trainer, name) for name in ("_run_epoch", "_init_training_state", "_prepare_for_training")):
    raise ImportError("a Trainer within a Session needs transformers 5: pip install 'transformers[torch]>=5'")

__all__ = ["SessionTrainer", "options"]

_PROGRESS: Final = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
)  # fmt: skip


class SessionTrainer(Trainer):
    """See the module's text. One per Session; all but ``session`` are the Trainer's own arguments. Raises ``UserError``."""

    def __init__(self, session: Session, *args: Any, **kwargs: Any) -> None:
        self._session, self._runtime = session, session._runtime
        self._progress = _Progress(self)
        self._steps = Steps(session, "the Trainer", self._progress.settle)
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, _Reporter(self))  # first: others see the epoch that it puts right

    @override
    def create_accelerator_and_postprocess(self) -> None:
        refuse(self.args, self._session)  # before the Trainer makes anything of its arguments
        refuse_own_data(type(self), (SessionTrainer, Trainer))
        super().create_accelerator_and_postprocess()

    # --- the way in ----------------------------------------------------------------------------------------------------

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """The Trainer's, once per job. Raises ``UserError`` for what cannot be honoured, and ``Stopped``."""
        if resume_from_checkpoint:
            raise UserError(f"resume_from_checkpoint: {RESUMES}")
        if trial is not None:
            raise UserError(f"trial: {SEARCH}")
        if self._runtime.restored:
            raise UserError("trainer.train() comes once per job: do all epochs in one call")
        return super().train(None, None, ignore_keys_for_eval)

    @override
    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"hyperparameter_search: {SEARCH}")

    @override
    def get_train_dataloader(self) -> Any:
        if self._runtime.state.data is None:
            self._session.register(data=self._loader())
        elif self.train_dataset is not None:
            raise UserError("train_dataset: session.register(data=...) has given the job other data already; drop one")
        return _Batches(self._runtime.state.data)

    def _loader(self) -> TrainLoader:
        dataset: Any = self.train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            raise UserError(
                "train_dataset: needs a length, and __getitem__ by index; give one, or session.register(data=TrainLoader(...))"
            )
        collate: Any = self.data_collator
        make_generator(collate, self.args.dataloader_num_workers)
        if hasattr(dataset, "column_names"):  # Hugging Face's datasets
            dataset = self._remove_unused_columns(dataset, description="Training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="Training")
        return TrainLoader(
            dataset, batch_size=self.args.train_batch_size, seed=self._session.seed, rank=self._session.rank,
            world_size=self._session.world_size, shuffle=self.args.train_sampling_strategy != "sequential", collate_fn=collate,
            num_workers=self.args.dataloader_num_workers, prefetch_factor=self.args.dataloader_prefetch_factor,
        )  # fmt: skip

    @override
    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The epoch to begin with; what is left of it is for ``_run_epoch`` to know."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        self._progress.steps_per_epoch = num_update_steps_per_epoch
        # The Trainer makes them, with the same values, behind the restore; what has state is asked for it before that.
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, device=self.args.device), 0.0
        self._globalstep_last_logged = 0
        return self._session.step // num_update_steps_per_epoch, 0

    @override
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training and self._runtime.state.ddp is None:
            return accelerate.wrap(self._session, self.accelerator, model)
        wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
        return wrapped

    @override
    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(max_steps, *args, **kwargs)  # type: ignore[no-untyped-call]
        optimizer: Any = self.optimizer
        state: dict[str, Any] = {"optimizer": optimizer.optimizer, "scheduler": self.lr_scheduler}
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        self._session.register(**state, trainer=self._progress)
        self._steps.restore(max_steps)
        return prepared

    # --- steps ---------------------------------------------------------------------------------------------------------

    @override
    def _run_epoch(self, **given: Any) -> None:  # type: ignore[override]
        """An epoch, or what is left of it: the data are there already, so the loop gets fewer steps instead of a skip."""
        if self._runtime.done or self._progress.ended:
            self.control.should_training_stop = True
            return
        epoch, batches = given["epoch"], given["steps_in_epoch"]
        self._progress.epoch = epoch, batches
        done = self.state.global_step - epoch * self._progress.steps_per_epoch
        given["num_update_steps_per_epoch"] -= done
        given["steps_in_epoch"] -= done * self.args.gradient_accumulation_steps
        super()._run_epoch(**given)  # type: ignore[no-untyped-call]
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise UserError("should_epoch_stop: an epoch that ends early has no place in the order of the job's data")

    @override
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Where a step begins, and the one before it ends. Raises ``Stopped``."""
        self._steps.next()
        self._runtime.trial.batch(num_batches)
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(samples) != num_batches:
            raise UserError("the data ended before their epoch did: steps_per_epoch promised more batches")
        return samples, items

    @override
    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The last step ends, and the final checkpoint is made."""
        self._progress.settle()
        output: TrainOutput = super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._session.finish()
        return output


class _Batches:
    """The job's data as the Trainer sees them: epochs of a fixed length."""

    def __init__(self, data: Any) -> None:
        if not hasattr(data, "steps_per_epoch"):
            raise UserError("data: the Trainer needs epochs of a known length (steps_per_epoch); use a TrainLoader")
        self._data = data

    def __len__(self) -> int:
        return int(self._data.steps_per_epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)


class _Reporter(TrainerCallback):
    """Signs of life, and metrics."""

    def __init__(self, trainer: SessionTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The Trainer has counted from where this attempt began the epoch."""
        progress = self._trainer._progress
        epoch, batches = progress.epoch
        done = (state.global_step - epoch * progress.steps_per_epoch) * args.gradient_accumulation_steps
        state.epoch = epoch + min(done, batches) / batches

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        trainer = self._trainer
        again = trainer._progress.behind_a_resume and goes_on(trainer._session)  # of a step that was told of already
        if trainer._runtime.restored and not trainer._runtime.finished and not again:
            trainer._session.log({k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))})

    def _alive(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:  # many batches, or a long evaluation, are no hang
        self._trainer._runtime.counter.tick()

    on_substep_end: Callable[..., None] = _alive

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        runtime = self._trainer._runtime
        runtime.counter.tick()
        if runtime.restored and not runtime.finished:
            runtime.trial.evaluates(runtime.step, runtime.checkpointer.drain)


class _Progress:
    """The Trainer's own state: what it has counted and logged, and its callbacks'. Without the time and the memory that
    something took."""

    def __init__(self, trainer: SessionTrainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self.steps_per_epoch = 0  # of the optimizer
        self.epoch = 0, 1  # the one that is trained, and its batches
        self.ended = False  # a callback, or the last step, had ended this job's training; a fork's goes on

    @property
    def behind_a_resume(self) -> bool:
        """No step has begun since the state was put back: what runs now is ``eval_on_start``."""
        return self._loaded is not None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: getattr(trainer.state, name) for name in _PROGRESS}
        state["log_history"] = [_lasting(entry) for entry in trainer.state.log_history]
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
        """Raises ``ValueError`` where an epoch has other steps than the recorded one."""
        now = {"steps_per_epoch": self.steps_per_epoch}
        now["gradient_accumulation_steps"] = self._trainer.args.gradient_accumulation_steps
        refuse_other_epochs(state, now)
        self._loaded, self.ended = state, state["ended"] and goes_on(self._trainer._session)
        self._put()

    def settle(self) -> None:
        """Undo what the Trainer did between the restore and the first step: counters set to 0, and ``eval_on_start``, which runs
        in every attempt, with what callbacks made of it."""
        if self._loaded is None:
            return
        self._put()
        trainer, state, self._loaded = self._trainer, self._loaded, None
        trainer._tr_loss.copy_(state["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = state["total_loss"], state["last_logged"]
        trainer.control.should_training_stop = self.ended
        trainer._initial_global_step = 0  # training_loss is the mean of all of the job's steps

    def _put(self) -> None:
        assert self._loaded is not None
        for name, value in self._loaded["state"].items():
            setattr(self._trainer.state, name, list(value) if name == "log_history" else value)
        self._trainer.current_flos = self._loaded["flos"]
        for name, callback in self._callbacks():
            for attribute, value in self._loaded["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Those with a state, by class and place among those of their class."""
        seen: dict[str, int] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                name = type(callback).__qualname__
                seen[name] = seen.get(name, -1) + 1
                yield f"{name}.{seen[name]}", callback


def _lasting(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if not k.endswith(("_runtime", "_per_second")) and "_mem_" not in k}
