"""Lightning's Trainer in a job: its loop inside a ``Session``. One line of a script changes::

    from ratchet.lightning import SessionStrategy

    trainer = Trainer(strategy=SessionStrategy(), devices=2, max_epochs=20, callbacks=[ModelCheckpoint(monitor="loss")])
    trainer.fit(module, datamodule=data)

A step of the job has the batches up to the next optimizer step, and ends when the Trainer requests the next batch. A resumed
Trainer begins as a new one does; its state is restored before it gets its first batch. Features that a job cannot resume are
refused with an error that names them.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

try:
    import lightning
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        GradientAccumulationScheduler,
        LearningRateFinder,
        ModelCheckpoint,
        ModelPruning,
        OnExceptionCheckpoint,
        SpikeDetection,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.cli import SaveConfigCallback
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers.launcher import _Launcher
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn

    from ratchet_worker.integrations.lightning_data import Batches
    from ratchet_worker.integrations.lightning_files import (
        CheckpointFiles,
        absolute_paths,
        csv_rows,
        mute,
        open_versions,
        relative_paths,
        rewind_csv,
        set_versions,
        unmute,
    )
    from ratchet_worker.integrations.lightning_state import (
        Additions,
        Attributes,
        has_save_hook,
        metric_states,
        restore_metrics,
        restore_results,
        result_states,
    )
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install 'ratchet-train[worker,lightning]'") from error

from ratchet_contract import env_vars as names
from ratchet_contract.errors import UserError
from ratchet_contract.paths import HomePaths, JobPaths
from ratchet_contract.phases import NoteType
from ratchet_contract.plural import pluralize
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import encode
from ratchet_worker.integrations.session_steps import Steps, check_same_epochs, continues_own_job
from ratchet_worker.session.mlflow_run import RunClient
from ratchet_worker.session.session import Session

if TYPE_CHECKING:
    from ratchet_worker.training.runtime import Runtime

_UNLIMITED: Final = -1  # Lightning's value for no limit
_COMPONENT: Final = "user:lightning"
_SETTINGS: Final = (
    "accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val", "limit_train_batches",
    "limit_val_batches", "log_every_n_steps", "val_check_batch", "val_check_interval",
)  # fmt: skip
_CONNECTOR: Final = (
    "_callback_metrics",
    "_current_fx",
    "_first_loop_iter",
    "_logged_metrics",
    "_progress_bar_metrics",
)


class SessionStrategy(DDPStrategy):
    """Lightning's strategy that trains with DDP within a ``Session``: the job's steps follow the Trainer's optimizer steps. Use
    one object per run. ``session``: a Session that the script has made; None: the strategy makes one."""

    def __init__(self, session: Session | None = None) -> None:
        started = names.RANK in os.environ
        super().__init__(cluster_environment=TorchElasticEnvironment() if started else LightningEnvironment())
        self._session = session
        self._steps: Steps | None = None
        self._files: CheckpointFiles | None = None  # on the rank that writes them
        self._rewound = False
        self._committed_step = 0  # the step up to which the files are finalised
        self._global_step = _UNLIMITED  # the Trainer's, when the open step began
        self._sigterm_handler: Any = None
        self._progress: _Progress | None = None
        self._batches: Batches | None = None
        self.is_trying_out = False  # a finder does trial steps, which are undone

    # --- ranks ---------------------------------------------------------------------------------------------------------

    @override
    def set_world_ranks(self) -> None:
        """Set the ranks of the Trainer to those of the job. Raises ``UserError`` if the Trainer's devices do not fit."""
        assert self.parallel_devices is not None
        there, here = (int(os.environ.get(name, 1)) for name in (names.WORLD_SIZE, names.LOCAL_WORLD_SIZE))
        if names.RANK not in os.environ:
            there = here = 1
        if len(self.parallel_devices) * self.num_nodes == 1 and self.parallel_devices[0].type == "cpu":
            self.parallel_devices, self.num_nodes = (
                self.parallel_devices * here,
                there // here,
            )  # devices="auto" gives one device
        if (asked := len(self.parallel_devices) * self.num_nodes) != there:
            raise UserError(
                f"the Trainer asks for {pluralize(asked, 'rank')} (devices={len(self.parallel_devices)}, "
                f"num_nodes={self.num_nodes}), and there {'is' if there == 1 else 'are'} {there}: start {asked} (`torchrun "
                f"--nproc-per-node {len(self.parallel_devices)} {Path(sys.argv[0]).name}`, `ratchet run --nproc "
                f"{len(self.parallel_devices)} {Path(sys.argv[0]).name}`, or world.ranks_per_node of the job's spec), or give "
                f"Trainer(devices={here}, num_nodes={there // here})"
            )
        super().set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        """Start no ranks: they are running already."""
        self._launcher = self._arguments = _Arguments()

    # --- the way in ----------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The Session of the script, else the strategy's own. Raises ``UserError`` while there is none."""
        if self._session is None:
            raise UserError(
                "the Session of a SessionStrategy is created by trainer.fit: use it only after trainer.fit has begun"
            )
        return self._session

    @property
    def _runtime(self) -> Runtime:
        return self.session._runtime

    @override
    def setup_distributed(self) -> None:
        """Connect the Trainer to the Session, which is made here if needed. Raises ``UserError`` if their types of devices
        differ."""
        if self._session is None:
            self._session = Session()
        device = self._session.device
        if device.type != self.root_device.type:
            raise UserError(
                f"the Trainer trains on {self.root_device.type}, and the run on {device.type}: give Trainer(accelerator="
                f"{'gpu' if device.type == 'cuda' else 'cpu'!r}), or world.device of the job's spec (without a service "
                "CUDA_VISIBLE_DEVICES= for the CPU)"
            )
        super().setup_distributed()
        trainer = self._trainer()
        for logger in trainer.loggers:
            if isinstance(logger, SessionLogger):
                logger.session = self._session
        if not (self._rewound or self._runtime.restored):
            self._rewind_files(trainer)
            self._rewound = True
        if trainer.state.fn == TrainerFn.FITTING and self._steps is None:
            self._steps = Steps(self._session, "the Trainer", lambda: None)
            if not any(isinstance(logger, SessionLogger) for logger in trainer.loggers):
                connector = trainer._logger_connector
                connector.log_metrics = partial(self._log, connector.log_metrics)

    def _rewind_files(self, trainer: Any) -> None:
        """Rewind Lightning's checkpoint files and CSV logs to the step from which this attempt starts. If the attempt's
        checkpoint has the Trainer's state, also mute the loggers until all is restored. Every rank must call it."""
        runtime, versions = self._runtime, list[Any]()
        if self.is_global_zero:
            journal = JobPaths(Path(runtime.launch.job_root)).framework_files
            self._files = CheckpointFiles(journal, lambda: runtime.open_step)
            self._files.rewind(runtime.chosen.base.step)
            versions = self._files.versions(open_versions(trainer.loggers))
        set_versions(trainer.loggers, self.broadcast(versions))
        if self.is_global_zero:
            self._set_writers(trainer.loggers)
        for callback in trainer.callbacks:
            if isinstance(callback, SaveConfigCallback) and runtime.launch.attempt > 1:
                callback.overwrite = True  # else it takes an earlier attempt's file for another run's, and raises
        if recorded := self._recorded_state():
            if self.is_global_zero:
                own = continues_own_job(self.session)
                for lost in rewind_csv(trainer.loggers, recorded.get("rows", []), own=own):
                    runtime.reporter.note(NoteType.CSV_ROWS_LOST, lost)
            # Until all is restored: values before that point have been logged.
            mute(trainer.loggers)

    def _set_writers(self, loggers: list[Any]) -> None:
        """Make loggers of TensorBoard with a local directory, and of the job's MLflow server, log each step once, although steps
        are repeated after a kill. A TensorBoardLogger that has a writer already is left as it is."""
        uri = os.environ.get(names.MLFLOW_TRACKING_URI)
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger):
                if logger._experiment is None and "://" not in logger.root_dir and find_spec("tensorboard") is not None:
                    logger._experiment = self.session.summary_writer(logger.log_dir, **logger._kwargs)
            elif isinstance(logger, MLFlowLogger) and uri is not None and logger._tracking_uri == uri:
                run = self.session.mlflow_run(logger._run_id)
                logger._run_id, logger._mlflow_client = run.run_id, RunClient(run)  # type: ignore[assignment]

    def _recorded_state(self) -> dict[str, Any]:
        """Return the Trainer's state in the checkpoint that this attempt starts from; empty without one. Call it before the
        restore."""
        if self._runtime.chosen.manifest is None:
            return {}
        held = self._runtime.chosen.loaded[-1]
        found: dict[str, Any] = held.value(_COMPONENT) if _COMPONENT in held.state else {}
        return found

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the Trainer as Lightning does. Raises ``UserError`` for a second ``fit`` and for features that are not
        supported."""
        if trainer.state.fn == TrainerFn.FITTING:
            if self._progress is not None or self._runtime.restored:
                raise UserError("call trainer.fit only once per job, for all epochs")
            _check_supported(trainer)
        self._sigterm_handler = signal.getsignal(signal.SIGTERM)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._register(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap the model in the Session's DDP."""
        return self.session.wrap(model)

    @override
    def _register_ddp_hooks(self) -> None:
        """Do nothing: the Session has registered the hook."""

    def _register(self, trainer: Any) -> None:
        """Register the Trainer's state with the Session, and prepare the Trainer for the resumed epoch."""
        state: dict[str, Any] = {}
        for number, optimizer in enumerate(self.optimizers):
            plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            state[f"optimizer_{number}" if number else "optimizer"] = plain
        for number, config in enumerate(self.lr_scheduler_configs):
            state[f"scheduler_{number}" if number else "scheduler"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        self._progress = _Progress(self.session, trainer)
        self.session.register(**state, lightning=self._progress)
        for callback in trainer.callbacks:
            if isinstance(callback, LearningRateFinder):
                callback.lr_find = partial(self._try_out, callback.lr_find)  # type: ignore[method-assign]
            elif isinstance(callback, ModelCheckpoint):
                callback._link_checkpoint = partial(self._link, callback._link_checkpoint)  # type: ignore[method-assign]
        self._note_built()
        if recorded := self._recorded_state():
            self._progress.begin_recorded_epoch(recorded)
        self._restore_if_done()

    def _note_built(self) -> None:
        """Record the current content of the objects that the script has built. Later changes are found by comparison with it."""
        self._runtime.state.note_built(undo=self.session.resumed and not self._runtime.restored)

    def _try_out(self, find: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call ``find``, a finder callback's function, while ``is_trying_out`` is True. Does nothing if this attempt resumes and
        has not restored the state yet."""
        # The restored state has the value that the finder found in an earlier attempt.
        if self.session.resumed and not self._runtime.restored:
            return
        self.is_trying_out = True
        try:
            find(*args, **kwargs)
        finally:
            self.is_trying_out = False

    def _total(self) -> int | None:
        """Return the number of steps of the whole job by the Trainer's limits; None if these do not determine it."""
        trainer = self._trainer()
        if not trainer.lightning_module.automatic_optimization or self._batches is None:
            return None
        stage = RunningStage.TRAINING
        per_epoch = _parse_num_batches(stage, len(self._batches), trainer.limit_train_batches)
        epochs = trainer.max_epochs if trainer.max_epochs is not None else _UNLIMITED
        limits = [] if trainer.max_steps == _UNLIMITED else [trainer.max_steps]
        if epochs != _UNLIMITED:
            limits.append(sum(math.ceil(per_epoch / _batches_per_step(trainer, epoch)) for epoch in range(epochs)))
        return min(limits, default=None)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return the training's loader as ``Batches``, and any other loader as it is. Raises ``UserError`` for training data
        without a length."""
        trainer = self._trainer()
        if trainer.state.fn != TrainerFn.FITTING or trainer.state.stage != RunningStage.TRAINING:
            return dataloader
        _auto_add_worker_init_fn(dataloader, self.global_rank)
        batches, before = Batches(self, dataloader, self._runtime.count_batch), self._batches
        self._batches = batches
        if before is None:
            self.session.register(data=batches.data)
        else:
            batches.replace_loader(before)
            self._runtime.state.data = batches.data
        self._note_built()
        self._restore_if_done()
        return batches

    def _restore_if_done(self) -> None:
        """Restore the state now if the training may have ended, since the Trainer may then request no batch. Finishes the job if
        the Trainer has nothing left to do. Raises ``UserError`` if the run has ended but the Trainer requests more steps."""
        if self._progress is None or self._batches is None or self._runtime.restored or self.is_trying_out:
            return
        loop, manifest = self._trainer().fit_loop, self._runtime.chosen.manifest
        ended = manifest is not None and manifest.finished
        if not ended and not loop.done:
            return
        assert self._steps is not None
        self._steps.restore(self._total())
        if loop.done:
            self.session.finish()
        elif continues_own_job(self.session) and self._runtime.is_base_last:
            raise UserError(
                f"the run has ended with step {self.session.step}, but the Trainer requests more (max_epochs, max_steps): fork "
                "the job, or begin a run in another directory"
            )

    @override
    def on_train_start(self) -> None:
        """Begin the training as Lightning does, and, except in trial steps, reinstall the SIGTERM handler that Lightning has
        replaced."""
        super().on_train_start()
        if self.is_trying_out:
            return
        signal.signal(
            signal.SIGTERM, self._sigterm_handler
        )  # Lightning's would end this rank alone, without the others' agreement

    # --- steps ---------------------------------------------------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        """True if this attempt starts without a checkpoint and has not begun to train. False while a finder does trial steps."""
        return not (self._runtime.restored or self.session.resumed or self.is_trying_out)

    @property
    def has_begun(self) -> bool:
        """True if the state is restored; False while a finder does trial steps."""
        return self._runtime.restored and not self.is_trying_out

    def restore(self) -> None:
        """Restore the state before the first batch, once. Raises ``UserError`` for data or state that a job cannot resume."""
        if self._runtime.restored:
            return
        trainer = self._trainer()
        if len(trainer.fit_loop._combined_loader.flattened) > 1:
            raise UserError(
                "the Trainer has several training loaders, and a job's steps go over one: put the data sets into one "
                "(torch.utils.data.StackDataset, ConcatDataset)"
            )
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise UserError(
                "training_step takes a dataloader_iter, and would take batches within a step: let it take a batch"
            )
        assert self._progress is not None and self._steps is not None and self._batches is not None
        self._progress.check_storable()
        self._steps.restore(self._total())
        self._batches.set_epoch(self._batches.data.epoch)

    def next_step(self) -> None:
        """End the open step and begin the next, if the Trainer's ``global_step`` has changed. Raises ``Stopped``, and
        ``UserError`` after the last step."""
        trainer = self._trainer()
        self._runtime.counter.tick()
        if self._global_step == trainer.global_step:
            return
        if trainer.accumulate_grad_batches != _batches_per_step(trainer, trainer.current_epoch):
            self._runtime.total = None  # the script changes it
        assert self._steps is not None
        self._steps.next_step()
        self._global_step = trainer.global_step
        self._finalize_files()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate a batch as Lightning does, and count progress. In training, also record the evaluation for a trial run
        (``ratchet prove``)."""
        self._runtime.counter.tick()  # a long validation is no hang
        if self._runtime.restored and not self._runtime.finished:
            self._runtime.trial.record_evaluation(self._runtime.step, self._runtime.checkpointer.drain)
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch as Lightning does, and count progress."""
        self._runtime.counter.tick()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict a batch as Lightning does, and count progress."""
        self._runtime.counter.tick()
        return super().predict_step(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Do what Lightning does, and then, except in trial steps, end the last step and save the final checkpoint."""
        super().on_train_end()
        if not self.is_trying_out:
            self.session.finish()
            self._finalize_files()
            if self._files is not None:
                self._files.record_end()

    def _log(self, log: Callable[..., None], metrics: dict[str, Any], step: int | None = None) -> None:
        """Pass ``metrics`` to ``log``, the Trainer's own function; in training, except in trial steps, also log them as the job's
        metrics."""
        log(metrics, step)
        if metrics and not self.is_trying_out:
            _log_in_training(self.session, metrics)

    # --- files ---------------------------------------------------------------------------------------------------------

    def _finalize_files(self) -> None:
        """Delete files of Lightning that were hidden or moved aside, if the job's last committed checkpoint includes their
        steps."""
        step = self._runtime.checkpointer.last.step
        if self._files is not None and step != self._committed_step:
            self._files.finalize(step)
            self._committed_step = step

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint file of Lightning. Except in trial steps, it is recorded first, so that a later attempt can rewind
        it."""
        if self._files is not None and not self.is_trying_out:
            self._files.record_write(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint file of Lightning. During training, a local file is at first only hidden, and is deleted once a
        committed checkpoint of the job includes this step. In trial steps it is removed at once."""
        hides = self._files is not None and not self.is_trying_out and not self._runtime.finished
        if not hides or self._files is None or not self._files.hide(filepath):
            super().remove_checkpoint(filepath)

    def _link(self, link: Callable[..., None], trainer: Any, filepath: str, linkpath: str) -> None:
        """Create a link to a checkpoint file of Lightning, which is recorded so that a later attempt can rewind it."""
        if self._files is not None:
            self._files.record_write(linkpath)
        link(trainer, filepath, linkpath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint as Lightning does, outside ``fit`` and in trial steps. Otherwise raise ``UserError``, except for a
        request of the Trainer itself because of an ``OnExceptionCheckpoint``: this loads nothing."""
        trainer = self._trainer()
        if self.is_trying_out or trainer.state.fn != TrainerFn.FITTING:
            return super().load_checkpoint(checkpoint_path, weights_only)
        is_own = self._arguments.ckpt_path is None and not trainer._checkpoint_connector._user_managed
        if is_own and any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.callbacks):
            return _Nothing({"pytorch-lightning_version": lightning.__version__})  # the Trainer itself requests "last"
        raise UserError(
            "ckpt_path: the job resumes from its own checkpoints; drop it, or load weights into the module before fit"
        )

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


StrategyRegistry.register("ratchet", SessionStrategy, description="DDP within Ratchet's Session", override=True)


class _Arguments(_Launcher):
    """A launcher that calls the Trainer's function in this process. ``ckpt_path``: the argument of this name in the last call;
    None if there was none."""

    is_interactive_compatible = True
    ckpt_path: Any = None

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.ckpt_path = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: no process has been started here."""


class _Nothing(dict[str, Any]):
    """A checkpoint from which Lightning loads nothing."""

    def __bool__(self) -> bool:
        return False


class SessionLogger(Logger):
    """A logger of Lightning that logs metrics as the job's metrics. Used together with ``SessionStrategy``."""

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None

    @property
    @override
    def name(self) -> str:
        """Name of the directory for checkpoint files. Lightning uses it if this is the first logger."""
        return "lightning_logs"

    @property
    @override
    def version(self) -> int:
        return 0

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters belong to the script and the spec."""

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log ``metrics`` as the job's metrics of the open step; ignore them outside training. Raises ``UserError`` without a
        ``SessionStrategy``."""
        if self.session is None:
            raise UserError("SessionLogger needs Trainer(strategy=SessionStrategy())")
        _log_in_training(self.session, metrics)


def _log_in_training(session: Session, metrics: Mapping[str, Any]) -> None:
    """Log metrics of the open step. Values logged before or after the training are ignored."""
    # Other values belong to no step: the module may have other weights there (validate, ckpt_path="best").
    if session._runtime.restored and not session._runtime.finished:
        session.log({**metrics})


class _Progress:
    """The Trainer's own state as an object that the Session saves, such as its loops' counters, logged values and callbacks."""

    def __init__(self, session: Session, trainer: Any) -> None:
        self._session, self._trainer = session, trainer
        loops = {"trainer": (trainer, _SETTINGS), "fit_loop": (trainer.fit_loop, ("max_epochs", "min_epochs"))}
        self._attributes = Attributes(loops, trainer.callbacks)
        self._left_out: set[str] = set()  # entries that an event has named

    # --- the way in ----------------------------------------------------------------------------------------------------

    def begin_recorded_epoch(self, state: dict[str, Any]) -> None:
        """Set the Trainer's counters from ``state``, which the checkpoint has recorded, so that the Trainer begins the recorded
        epoch again."""
        state, loop = self._localize_paths(state), self._trainer.fit_loop
        _load_loop(loop, state["fit_loop"])
        for tracker in (loop.epoch_progress.total, loop.epoch_progress.current):
            tracker.ready -= 1
            tracker.started -= 1
        loop.epoch_loop.val_loop.restarting = True
        for callback in self._trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging) and callback.state_key in state["callbacks"]:
                callback.load_state_dict(
                    state["callbacks"][callback.state_key]
                )  # it makes its scheduler from this state

    def check_storable(self) -> None:
        """Raise ``UserError``, naming the part, if the state cannot be stored."""
        try:
            encode(self.state_dict(), root="lightning")
        except HookStateError as error:
            raise UserError(
                f"{error.key}: {error.detail}. It is the state_dict of a callback or what on_save_checkpoint adds"
            ) from error

    # --- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with paths in the working directory made relative. Calls the hooks ``on_save_checkpoint``."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = self._checkpoint()
        callbacks = checkpoint["callbacks"]
        changes = self._call_save_hooks(checkpoint)
        loop: Any = trainer.fit_loop
        state = {
            **self._epoch_facts(),
            "fit_loop": loop.state_dict(),
            "callbacks": callbacks,
            "checkpoint": changes,
            "should_stop": trainer.should_stop,
            "fetched": 0 if loop._data_fetcher is None else loop._data_fetcher.fetched,
            "reloaded": [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch],
            "validated": loop.epoch_loop.val_loop._has_run,
            "validation_data": loop.epoch_loop.val_loop._combined_loader is not None,
            "seen": [[*one] for one in loop.epoch_loop.val_loop._seen_batches_per_dataloader.items()],
            "skip_backward": loop._skip_backward,
            "logged": {name: getattr(trainer._logger_connector, name) for name in _CONNECTOR},
            "results": [result_states(results) for results in self._results()],
            "metrics": metric_states(module),
            "attributes": self._attributes.state(),
            "rows": csv_rows(trainer.loggers),
            **({} if trainer.datamodule is None else {"datamodule": trainer.datamodule.state_dict()}),
        }
        found: dict[str, Any] = relative_paths(state, Path(self._session._runtime.launch.workdir))
        return found

    def _call_save_hooks(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Call the hooks ``on_save_checkpoint``, if any, and return what they changed in ``checkpoint``. Reports entries that
        cannot be stored."""
        trainer = self._trainer
        if not has_save_hook(trainer.lightning_module, trainer.callbacks):
            return {"put": {}, "gone": [], "parts": {}}
        additions = Additions(checkpoint)
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        changes = additions.changes()
        if new := sorted({*additions.left_out} - self._left_out):
            self._left_out.update(new)
            if trainer.is_global_zero:
                text = f"no checkpoint has what on_save_checkpoint changed in {', '.join(new)}: it cannot be stored"
                self._session._runtime.reporter.note(NoteType.CHECKPOINT_ENTRY_LEFT_OUT, text, names=new)
        return changes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, and call the hooks ``on_load_checkpoint``. Raises ``ValueError`` if the state does not fit."""
        state = self._localize_paths(state)
        trainer: Any = self._trainer
        check_same_epochs(
            state, self._epoch_facts(), "loaders whose batch_size times the number of ranks stays the same"
        )
        self._check_same_ranks(state["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"])
        self._load_hooks(state)
        _load_loop(trainer.fit_loop, state["fit_loop"])
        trainer.should_stop = state["should_stop"] and continues_own_job(self._session)
        loop, module = trainer.fit_loop, trainer.lightning_module
        if state["validation_data"] and loop.epoch_loop.val_loop._combined_loader is None:
            trainer.validating = True
            loop.epoch_loop.val_loop.setup_data()
            trainer.training = True
        if loop._data_fetcher is not None:
            loop._data_fetcher.fetched = state["fetched"]
        loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch = state["reloaded"]
        loop.epoch_loop.val_loop._has_run = state["validated"]
        loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(dict(state["seen"]))
        loop._skip_backward = state["skip_backward"]
        vars(trainer._logger_connector).update(state["logged"])
        for results, saved in zip(self._results(), state["results"], strict=True):
            restore_results(results, saved, module, trainer.strategy.reduce)
        restore_metrics(module, state["metrics"])
        self._attributes.restore(state["attributes"])
        unmute(trainer.loggers)

    def _localize_paths(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with absolute file paths in place of relative ones. They lie in this job's working directory or, at a
        fork's start, in the parent job's."""
        runtime = self._session._runtime
        workdir, manifest = Path(runtime.launch.workdir), runtime.chosen.manifest
        if manifest is not None and not continues_own_job(self._session):
            workdir = HomePaths(Path(runtime.launch.job_root).parents[1]).job(manifest.job_id).work_dir
        found: dict[str, Any] = absolute_paths(state, workdir)
        return found

    def _check_same_ranks(self, batches: int) -> None:
        """Raise ``ValueError`` if the number of ranks has changed and ``batches`` of the epoch are used."""
        manifest = self._session._runtime.chosen.manifest
        # The data would begin the epoch again, but the Trainer would continue after these batches.
        if batches and manifest is not None and manifest.world_size != self._session.world_size:
            raise ValueError(
                f"{batches} batches of the epoch are used, and the checkpoint is of {manifest.world_size} ranks, this run has "
                f"{self._session.world_size}: resume on {manifest.world_size} until an epoch ends"
            )

    def _load_hooks(self, state: dict[str, Any]) -> None:
        """Restore the data module and the callbacks, and call ``on_load_checkpoint`` with the checkpoint as
        ``on_save_checkpoint`` left it."""
        trainer = self._trainer
        if trainer.datamodule is not None and "datamodule" in state:
            trainer.datamodule.load_state_dict(state["datamodule"])
        checkpoint = {**self._checkpoint(), "callbacks": {**state["callbacks"]}}
        checkpoint["loops"]["fit_loop"] = state["fit_loop"]
        checkpoint = Additions.apply(checkpoint, state["checkpoint"])
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
        for callback in trainer.callbacks:
            # Not with Lightning's call, which copies the state: callbacks and logged values share tensors, and must share them
            # again. SpikeDetection's load_state_dict fails because of a wrong name; its attributes are restored with the others'.
            if callback.state_key in state["callbacks"] and not isinstance(callback, SpikeDetection):
                callback.load_state_dict(state["callbacks"][callback.state_key])
            if isinstance(callback, StochasticWeightAveraging) and callback.n_averaged is not None:
                callback.n_averaged.fill_(callback._init_n_averaged)

    def _checkpoint(self) -> dict[str, Any]:
        """Return a checkpoint with Lightning's entries, such as module, callbacks and optimizers, before the hooks change it."""
        trainer = self._trainer
        module = trainer.lightning_module
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": trainer.strategy.lightning_module_state_dict(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": call._call_callbacks_state_dict(trainer),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            **({module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)} if module.hparams else {}),
        }

    def _results(self) -> list[Any]:
        """Return the two collections of logged values: that of the training and that of the validation."""
        loop = self._trainer.fit_loop.epoch_loop
        return [loop._results, loop.val_loop._results]

    def _epoch_facts(self) -> dict[str, int]:
        """Return numbers by name that must be the same after a resume. The only one is the number of batches in an epoch on this
        rank."""
        data: Any = self._session._runtime.state.data
        return {"batches_per_epoch": int(data.steps_per_epoch)}


def _load_loop(loop: _Loop, state: dict[str, Any]) -> None:
    """Load the counters of a loop and of the loops inside it."""
    loop.load_state_dict(state)
    loops = [loop]
    for one in loops:
        # Clears the flag that the loop restarts, so that the Trainer does not act as if it resumed.
        one.on_iteration_done()
        loops += [part for part in vars(one).values() if isinstance(part, _Loop)]


def _batches_per_step(trainer: Any, epoch: int) -> int:
    """Return the number of batches accumulated for one optimizer step in ``epoch``; the epoch's last step may have fewer."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return int(trainer.accumulate_grad_batches)


def _check_supported(trainer: Any) -> None:
    """Raise ``UserError`` for a callback or setting that a job does not support."""
    if not trainer.lightning_module.automatic_optimization and trainer.strategy._runtime.launch.spec.ddp.static_graph:
        raise UserError(
            "automatic_optimization = False with ddp.static_graph: Lightning drives DDP's reducer by itself; drop static_graph"
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, LearningRateFinder) and vars(callback)["_early_exit"]:
            raise UserError(
                "Tuner.lr_find is a fit of its own, and a job has one: give the Trainer callbacks=[LearningRateFinder()], which "
                "finds the rate in the job's first attempt"
            )
        if isinstance(callback, BaseFinetuning):
            raise UserError(
                f"{name} is not supported: it adds parameters to the optimizer in the middle of the training. Give the optimizer "
                "all parameters in groups from the start, and keep a group's learning rate at 0 until it is to be trained: "
                "LambdaLR(optimizer, [lambda epoch: 1.0, lambda epoch: float(epoch >= 10)])"
            )
        if isinstance(callback, ModelPruning):
            raise UserError(
                f"{name} is not supported: it gives parameters other names in the middle of the training. Keep a mask for each "
                "weight in a buffer of the module, and multiply the weight by it in forward"
            )
        batch_norm = StochasticWeightAveraging.pl_module_contains_batch_norm(trainer.lightning_module)
        if isinstance(callback, StochasticWeightAveraging) and batch_norm:
            raise UserError(
                f"{name} of a model with batch norm is not supported: it runs an epoch without steps at the end. Use "
                "lightning.pytorch.callbacks.WeightAveraging, which averages the statistics, too"
            )
