"""Accelerate in a job: its ``Accelerator`` with a Session inside.

An ordinary Accelerate script, with two lines changed::

    from ratchet.accelerate import Accelerator                # in place of: from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(model, optimizer, loader, test_loader, scheduler)
    for epoch in accelerator.epochs(3):                       # in place of: range(3)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

A batch of the first DataLoader passed to ``prepare`` is a step of the job; later DataLoaders are for evaluation. Hook, DDP
settings, ranks and devices are the Session's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

try:
    import accelerate
    from accelerate.data_loader import DataLoaderShard
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, on_main_process
    from accelerate.utils import DynamoBackend, compile_regions
except ImportError as error:
    raise ImportError("Accelerate is not installed: pip install 'ratchet-train[worker,accelerate]'") from error

from ratchet_contract.errors import UserError
from ratchet_contract.phases import NoteType
from ratchet_hooks.manage.managed_ddp import close_group
from ratchet_worker.integrations import data_loader_shard
from ratchet_worker.session.mlflow_run import MlflowRun
from ratchet_worker.session.session import Session
from ratchet_worker.training.epoch_loop import EpochLoop, Pass

_DDP_ALONE: Final = ("deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's ``Accelerator`` that trains within the rank's ``Session``; takes the same arguments. Raises ``UserError`` for
    arguments that a job cannot take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.session = rank_session()
        if PartialState._shared_state and not _matches_session(self.session, PartialState()):
            AcceleratorState._reset_state(reset_partial_state=True)
        if self.session.device.type == "cpu":
            os.environ["ACCELERATE_USE_CPU"] = "true"
        super().__init__(*args, **kwargs)
        self._refuse_arguments()
        self.session.register(accelerate=_Counts(self))
        if self.scaler is not None:
            self.session.prepare(self.scaler)

    def _refuse_arguments(self) -> None:
        """Raise ``UserError`` for arguments that a job cannot take, such as those that the spec decides."""
        if self.ddp_handler is not None:
            raise UserError(
                "DistributedDataParallelKwargs: hook and DDP's settings are those of the job's spec (hook, ddp); drop it. "
                "Without a service they are Session(hook=..., ddp=...), made before the Accelerator"
            )
        if self.init_handler is not None:
            raise UserError("InitProcessGroupKwargs: the Session starts the process group (ddp.backend); drop it")
        for name in _DDP_ALONE:
            if getattr(self.state, name, None) is not None:
                raise UserError(f"{name}: not supported within a Session, which trains with DDP; drop it")
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise UserError(
                "dynamo_backend, dynamo_plugin: pass prepare a compiled model, torch.compile(model), instead"
            )
        if self.use_stateful_dataloader:
            raise UserError("use_stateful_dataloader: the Session saves and restores the position of loaders; drop it")
        check_same_ranks(self.session, self)

    @property
    def _loop(self) -> EpochLoop:
        """The loop of the Session's ``epochs``."""
        return self.session._epoch_loop

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs to do, from the restored one to ``total`` - 1, as ``Session.epochs`` does."""
        return self.session.epochs(total)

    # --- prepare -------------------------------------------------------------------------------------------------------

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare the model as Accelerate does, but with the job's DDP, if the model is to be trained."""
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepare_model(self, model, self.session.prepare, device_placement)

    @override
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare the optimizer as Accelerate does, and register it with the Session."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            self.session.prepare(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    @override
    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare the scheduler as Accelerate does, and register it with the Session."""
        if not getattr(scheduler, "_is_accelerate_prepared", False):
            self.session.prepare(scheduler)
        return super().prepare_scheduler(scheduler)

    @override
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare the DataLoader as Accelerate does. The first becomes a ``TrainingLoader``, which may raise ``UserError``."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if prepared is data_loader or self._loop.loader is not None:
            return prepared
        self._dataloaders[-1] = TrainingLoader(self._loop, prepared)
        return self._dataloaders[-1]

    @override
    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register the objects as Accelerate does, and with the Session, so that the job restores them."""
        super().register_for_checkpointing(*objects)
        others = [one for one in objects if not getattr(one, "_is_accelerate_prepared", False)]
        if others:
            self.session.prepare(*others)

    # --- the loop ------------------------------------------------------------------------------------------------------

    @override
    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do the backward pass as Accelerate does. Raises ``UserError`` if this step has taken no batch of the training's
        loader."""
        if not self.session._runtime.has_taken_batch:
            raise UserError(
                "accelerator.backward() without a batch of the training DataLoader in this step. The first DataLoader passed "
                "to prepare is that of the training: pass it first, and DataLoaders of an evaluation after it"
            )
        super().backward(loss, **kwargs)

    @override
    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported; always raises ``UserError``."""
        raise UserError(
            "join_uneven_inputs: all ranks of a job do the same steps; leave even_batches at True and drop it"
        )

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches as Accelerate does. Raises ``UserError`` for skipping in the training's DataLoader, which a resumed job
        continues by itself."""
        if isinstance(dataloader, TrainingLoader) and num_batches:
            raise UserError(
                "skip_first_batches of the training's DataLoader: a resumed job continues within its epoch by itself; drop it, "
                "and the load_state before it"
            )
        return super().skip_first_batches(dataloader, num_batches)

    @override
    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers as Accelerate does, but those of TensorBoard and MLflow log each step once, although steps are
        repeated after a kill."""
        asked: list[Any] = self.log_with  # type: ignore[has-type]
        kinds = {"tensorboard": _TensorBoard, "mlflow": _Mlflow}
        self.log_with = [
            kinds[str(one)](self.session, project_name, self.logging_dir, **(init_kwargs or {}).get(str(one), {}))
            if str(one) in kinds
            else one
            for one in asked
        ]
        super().init_trackers(project_name, config, init_kwargs)

    @override
    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log ``values`` as Accelerate does; numbers and tensors of one element also become metrics of the job while it
        trains."""
        super().log(values, step, log_kwargs or {})
        runtime = self.session._runtime
        if runtime.restored and not runtime.finished:
            numbers = {name: float(value) for name, value in values.items() if isinstance(value, Real)}  # numpy's too
            tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and v.numel() == 1}
            self.session.log(numbers | tensors)

    @override
    def end_training(self) -> None:
        """End the trackers, mark the job as done and save the final checkpoint (``Session.finish``)."""
        for tracker in self.trackers:
            tracker.finish()
        self.session.finish()

    # --- Accelerate's own checkpoints ----------------------------------------------------------------------------------

    @override
    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does. With automatic names, a step that is redone writes into its existing numbered directory."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming and self.session._runtime.launch.attempt > 1:
            folder = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
            again = folder.exists()
            self.wait_for_everyone()  # rank 0 is about to create it
            if again:
                project.automatic_checkpoint_naming = False
                try:
                    return super().save_state(str(folder), *args, **kwargs)
                finally:
                    project.automatic_checkpoint_naming = True
        return super().save_state(output_dir, *args, **kwargs)

    @override
    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load the state with which a new job begins. An attempt that starts from a checkpoint of Ratchet skips this, also at the
        start of a fork. Raises ``UserError`` once the job's state is restored."""
        runtime = self.session._runtime
        if runtime.restored:
            raise UserError("call load_state before the first step: a job continues from its own checkpoints by itself")
        if self.session.resumed:
            text = f"load_state({str(input_dir)!r}) is skipped: the job continues from its own step {self.session.step}"
        else:
            super().load_state(input_dir, *args, **kwargs)
            text = f"load_state({str(input_dir)!r}): the job begins with this state, at the first batch of epoch 0"
        if runtime.rank == 0:
            runtime.reporter.note(NoteType.LOAD_STATE, text)


class _TensorBoard(TensorBoardTracker):  # type: ignore[misc]
    """Accelerate's tracker of TensorBoard, with the writer of ``session.summary_writer``."""

    def __init__(self, session: Session, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, logging_dir, **kwargs)
        self._session = session

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Open the writer."""
        self.logging_dir = Path(self.logging_dir_param, self.run_name)
        self.writer = self._session.summary_writer(self.logging_dir, **self.init_kwargs)

    @on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters in the log itself, and in ``hparams.yml`` beside it, instead of a new directory for each
        attempt."""
        self.writer.add_hparams(values, {})
        (self.logging_dir / "hparams.yml").write_text(yaml.dump(values))


class _Mlflow(MLflowTracker):  # type: ignore[misc]
    """Accelerate's tracker of MLflow, with the metrics of ``session.mlflow_run``."""

    def __init__(self, session: Session, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._session = session
        self._run: MlflowRun | None = None

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the numbers in ``values``, except at steps that the run has already. Without
        ``step``, that is ``session.step``."""
        self._run = self._run or self._session.mlflow_run(self.active_run.info.run_id)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        # Not step 0, as MLflow would take: the run has it already, and after a resume all values would be skipped.
        self._run.log_metrics(numbers, self._session.step if step is None else step)


def rank_session(make: Callable[[], Session] = Session) -> Session:
    """Return ``make()``. If that fails because Accelerate has started a process group, close the group and call ``make``
    again."""
    try:
        return make()
    except UserError as error:
        if error.code != "group-exists" or not PartialState._shared_state:
            raise
        close_group()
        return make()


def prepare_model(
    accelerator: Any, model: nn.Module, wrap: Callable[[nn.Module], nn.Module], device_placement: bool | None = None
) -> Any:
    """Prepare ``model`` as Accelerate does, with ``wrap(model)`` in place of Accelerate's DDP. ``wrap`` is called before
    torch.compile."""
    plugin = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        prepared: Any = wrap(accelerator.prepare_model(model, device_placement, evaluation_mode=True))
    finally:
        plugin.backend = backend
    if backend != DynamoBackend.NO:
        compiled = compile_regions if plugin.use_regional_compilation else torch.compile
        prepared = compiled(prepared, **plugin.to_kwargs())
    prepared._is_accelerate_prepared = True
    return prepared


def _matches_session(session: Session, state: Any) -> bool:
    """True if Accelerate's ``state`` has the Session's number of ranks and type of device."""
    return bool(state.num_processes == session.world_size and state.device.type == session.device.type)


def check_same_ranks(session: Session, accelerator: Any) -> None:
    """Raise ``UserError`` if Accelerate's number of ranks or type of device differs from the Session's."""
    if not _matches_session(session, accelerator):
        raise UserError(
            f"Accelerate runs {accelerator.num_processes} processes on {accelerator.device.type}, the job {session.world_size} "
            f"on {session.device.type}: make the Session first, and pass cpu=session.device.type == 'cpu' to Accelerator; for a "
            "Trainer on the CPU TrainingArguments(use_cpu=True), --use_cpu"
        )


class TrainingLoader(DataLoaderShard):  # type: ignore[misc]
    """The training's DataLoader as Accelerate prepared it, whose iteration marks the job's steps. Raises ``UserError`` for a
    loader that a job cannot use."""

    def __init__(self, loop: EpochLoop, prepared: Any) -> None:
        if type(prepared) is not DataLoaderShard:
            raise UserError(
                "dispatch_batches: every rank of a job reads its own samples, not rank 0 for all. For an IterableDataset set "
                "DataLoaderConfiguration(dispatch_batches=False)"
            )
        data_loader_shard.prepare_loader(prepared)
        self.__dict__.update(vars(prepared))
        self._loop = loop
        loop.train_on(self.base_dataloader, lambda loop: _Pass(loop, self))

    @override
    def __iter__(self) -> Iterator[Any]:
        return self._loop.iterate()

    @property
    def start(self) -> int:
        """Number of the first batch of this epoch's pass: 0, except after a resume within the epoch."""
        return self._loop.start


class _Pass(Pass):
    """A pass over the training's loader that does, around each batch, what ``DataLoaderShard.__iter__`` does."""

    def __init__(self, loop: EpochLoop, loader: TrainingLoader) -> None:
        super().__init__(loop)
        self._loader = loader

    @override
    def on_begin(self) -> None:
        """Begin a pass over the loader, which may continue in the middle of an epoch."""
        data_loader_shard.begin_pass(self._loader, is_resumed=self._loader.start > 0)

    @override
    def transform(self, batch: Any, more: Callable[[], bool]) -> Any:
        """Return ``batch`` on the loader's device. Calls ``more``, which loads the next batch and returns False if there is
        none."""
        return data_loader_shard.deliver_batch(self._loader, batch, more)

    @override
    def on_end(self) -> None:
        """Count the pass and end it. Called only for a pass that was not left early."""
        self._loader.iteration += 1
        self._loader.end()

    @override
    def plain_iterator(self) -> Iterator[Any]:
        """Return the loader's own iterator, for a pass that is not training."""
        return DataLoaderShard.__iter__(self._loader)  # type: ignore[no-any-return]


class _Counts:
    """An Accelerator's counters and the flags of its last batch, as an object with state that the Session saves."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """The counters and flags, such as Accelerate's count of accumulated batches and the number of its saves."""
        one = self._accelerator
        return {
            "step": one.step,
            "sync_gradients": one.sync_gradients,
            "skipped": [optimizer.step_was_skipped for optimizer in one._optimizers],
            "iterations": [loader.iteration for loader in one._dataloaders if isinstance(loader, TrainingLoader)],
            "save_iteration": one.save_iteration,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters and flags of the Accelerator, its optimizers and loaders to the recorded ones."""
        one = self._accelerator
        one.step, one.sync_gradients = state["step"], state["sync_gradients"]
        for optimizer, skipped in zip(one._optimizers, state["skipped"], strict=True):
            optimizer._is_overflow = skipped
        for loader, iteration in zip(
            (x for x in one._dataloaders if isinstance(x, TrainingLoader)), state["iterations"], strict=True
        ):
            loader.iteration = iteration
        one.project_configuration.iteration = state["save_iteration"]
