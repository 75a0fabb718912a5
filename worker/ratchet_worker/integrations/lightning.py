"""Lightning's Trainer as a job: its loop inside of a ``Session``.

The script as it was, but for the session, the data and the strategy::

    from lightning import Trainer
    from ratchet import Session, TrainLoader
    from ratchet_worker.integrations.lightning import SessionStrategy

    with Session() as session:
        data = TrainLoader(my_dataset(), batch_size=32, seed=session.seed, rank=session.rank, world_size=session.world_size)
        session.register(data=data)
        strategy = SessionStrategy(session)
        trainer = Trainer(**strategy.options(), max_epochs=20)
        trainer.fit(MyModule(), data)

Hook, DDP's settings, ranks and devices are those of the spec. A step of the job is one of the optimizer, with its
``accumulate_grad_batches`` batches; of a module that optimizes by itself (``automatic_optimization = False``) it is all batches
up to the one in which an optimizer stepped. It ends when the Trainer asks for the next batch: what callbacks, validation and
schedulers did until then belongs to it. Then it is counted, saved when a checkpoint is due, and stopped at when a stop was asked
for, all of it by the Session. Saved are model, optimizers, schedulers, scaler, data position, generators, buffers, hook, and the
Trainer's own: its loops' counters, logged values, callbacks, and what ``on_save_checkpoint`` adds to a checkpoint.

A resumed Trainer begins as a new one does, with the hooks from ``setup`` to ``on_train_epoch_start`` of the epoch that is
resumed, and everything is put back when it asks for its first batch: where it was saved. Lightning's own way of resuming is not
taken; it leaves out hooks, schedulers' steps and logged values.

Not supported, and refused by name: ``ckpt_path`` (the job resumes by itself), ``overfit_batches``, training
data that is not the registered one, ``StochasticWeightAveraging`` of a model with batch norm, ``BaseFinetuning``,
``ModelPruning``. A stop waits for the end of a validation.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

try:
    import lightning
    import lightning.pytorch as pl
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
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.rank_zero import rank_zero_info

    from ratchet_worker.integrations.lightning_state import (
        Additions,
        Attributes,
        metrics_of,
        put_metrics,
        put_results,
        results_of,
    )
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install 'ratchet-train[worker,lightning]'") from error

from ratchet_contract.errors import UserError
from ratchet_hooks.codec import encode
from ratchet_hooks.errors import HookStateError
from ratchet_worker.data.epochs import endless
from ratchet_worker.integrations.steps import Steps, goes_on, refuse_other_epochs
from ratchet_worker.session import Session

_UNLIMITED: Final = -1  # as Lightning writes it
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
    """See the module's text. One per Session; ``options()`` are the Trainer's arguments that go with it."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._runtime = session._runtime
        self._steps = Steps(session, "the Trainer", lambda: None)
        self._global_step = _UNLIMITED  # the Trainer's, when the open step began
        self._handler: Any = None
        self._progress: _Progress | None = None
        self._batches: _Batches | None = None
        self._trial = False  # steps of a finder, which are undone

    def options(self) -> dict[str, Any]:
        """For ``Trainer(**options, ...)``: strategy, accelerator, devices, nodes."""
        world = self._runtime.launch.spec.world
        return {
            "strategy": self,
            "accelerator": "gpu" if self._session.device.type == "cuda" else "cpu",
            "devices": self._session.world_size // world.nodes,
            "num_nodes": world.nodes,
            "use_distributed_sampler": False,
        }

    # --- the way in ----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse(trainer)
            _leave_out_default(trainer)
        self._handler = signal.getsignal(signal.SIGTERM)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._register(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._session.wrap(model)

    @override
    def _register_ddp_hooks(self) -> None:
        """The Session has done it."""

    def _register(self, trainer: Any) -> None:
        state: dict[str, Any] = {}
        for number, optimizer in enumerate(self.optimizers):
            plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            state[f"optimizer_{number}" if number else "optimizer"] = plain
        for number, config in enumerate(self.lr_scheduler_configs):
            state[f"scheduler_{number}" if number else "scheduler"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        self._progress = progress = _Progress(self._session, trainer)
        self._session.register(**state, lightning=progress)
        for callback in trainer.callbacks:
            if isinstance(callback, LearningRateFinder):
                callback.lr_find = partial(self._try_out, callback.lr_find)  # type: ignore[method-assign]
        manifest = self._runtime.chosen.manifest
        if manifest is not None and manifest.finished:  # saved behind the loop
            self._steps.restore(self._total(trainer))
        elif manifest is not None:
            held = self._runtime.chosen.held[-1]
            if _COMPONENT in held.state:
                progress.begin_with(held.value(_COMPONENT))
        if not self._runtime.restored and trainer.fit_loop.done:
            self._steps.restore(self._total(trainer))

    def _try_out(self, find: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A finder trains, and undoes it. What it found before is in what is put back."""
        if self._session.resumed and not self._runtime.restored:
            return
        data: Any = self._runtime.state.data
        position = data.state_dict()
        self._trial = True
        try:
            find(*args, **kwargs)
        finally:
            self._trial = False
            data.load_state_dict(position)

    def _total(self, trainer: pl.Trainer) -> int | None:
        """Steps of the whole job, where the Trainer's limits tell; a module that optimizes by itself steps when it likes."""
        if not trainer.lightning_module.automatic_optimization:
            return None
        data: Any = self._runtime.state.data
        batches = trainer.limit_train_batches
        per_epoch = len(_Batches(self, data))
        per_epoch = min(per_epoch, batches) if isinstance(batches, int) else int(per_epoch * batches)
        epochs = trainer.max_epochs if trainer.max_epochs is not None else _UNLIMITED
        limits = [] if trainer.max_steps == _UNLIMITED else [trainer.max_steps]
        if epochs != _UNLIMITED:
            limits.append(sum(math.ceil(per_epoch / _accumulated(trainer, epoch)) for epoch in range(epochs)))
        return min(limits, default=None)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if dataloader is not self._runtime.state.data:
            return dataloader
        if self._batches is None:
            self._batches = _Batches(self, dataloader)
        return self._batches

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._trial:
            return
        signal.signal(
            signal.SIGTERM, self._handler
        )  # Lightning's would end this rank alone, without the others' agreement

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        loaders = self._trainer().fit_loop._combined_loader.flattened  # a reload makes new ones
        if not self._trial and not all(isinstance(loader, _Batches) for loader in loaders):
            raise UserError(
                "the Trainer trains on other data than the job's: session.register(data=TrainLoader(...)), and give the same "
                "object to trainer.fit"
            )

    # --- steps ---------------------------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """The Trainer asks for a batch: the step that is done ends, and the next one begins. Raises ``Stopped``."""
        trainer = self._trainer()
        self._runtime.counter.tick()
        if self._trial:
            return
        if not self._runtime.restored:
            assert self._progress is not None
            self._progress.refuse_unstorable()
            self._steps.restore(self._total(trainer))
        if self._global_step != trainer.global_step:
            if trainer.accumulate_grad_batches != _accumulated(trainer, trainer.current_epoch):
                self._runtime.total = None  # the script changes it
            self._steps.next()
            self._global_step = trainer.global_step
        self._runtime.trial.batch()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._runtime.counter.tick()  # a long validation is no hang
        if self._runtime.restored:
            self._runtime.trial.evaluates(self._runtime.step, self._runtime.checkpointer.drain)
        return super().validation_step(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Before Lightning takes the model off its device: the last step ends, the final checkpoint is made."""
        super().on_train_end()
        if not self._trial:
            self._session.finish()

    # --- what is Ratchet's to do ---------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._trial:
            return super().load_checkpoint(checkpoint_path, weights_only)
        trainer = self._trainer()
        if any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.callbacks):
            return _Nothing(
                {"pytorch-lightning_version": lightning.__version__}
            )  # the Trainer asks for "last" by itself
        raise UserError(
            "ckpt_path: the job resumes from its own checkpoints; drop it, or load weights into the module before fit"
        )

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


class _Nothing(dict[str, Any]):
    """A checkpoint from which Lightning takes nothing."""

    def __bool__(self) -> bool:
        return False


class SessionLogger(Logger):
    """What a module logs (``self.log``), as the job's metrics: ``Trainer(logger=SessionLogger(session), ...)``."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    @property
    @override
    def name(self) -> str:
        return "ratchet"

    @property
    @override
    def version(self) -> int:
        return 0

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are the script's and the spec's, which the service keeps."""

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._session.log({**metrics})  # of the step that is open, which is the one that Lightning has logged


class _Batches:
    """The job's data as the Trainer sees them, each batch within a step. The Trainer ends an epoch by the length; a shorter one
    of its own (``limit_train_batches``) does not end that of the data, which go on in their order."""

    def __init__(self, strategy: SessionStrategy, data: Any) -> None:
        self._strategy, self._data = strategy, data
        self._endless: Iterator[Any] | None = None

    def __len__(self) -> int:
        return int(self._data.steps_per_epoch)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._strategy.before_batch()
            if self._endless is None:  # after the data's position was put back
                self._endless = endless(self._data, lambda: None)
            yield next(self._endless)


class _Progress:
    """The Trainer's own state: where its loops are, what was logged, its callbacks, and whether one has asked it to stop."""

    def __init__(self, session: Session, trainer: Any) -> None:
        self._session, self._trainer = session, trainer
        loops = {"trainer": (trainer, _SETTINGS), "fit_loop": (trainer.fit_loop, ("max_epochs", "min_epochs"))}
        self._attributes = Attributes(loops, trainer.callbacks)
        self._muted: list[Logger] = []

    # --- the way in ----------------------------------------------------------------------------------------------------

    def begin_with(self, state: dict[str, Any]) -> None:
        """The Trainer is to begin the recorded epoch anew, as it did then. Its loggers wait, and no validation is tried out."""
        loop: Any = self._trainer.fit_loop
        _load(loop, state["fit_loop"])
        for tracker in (loop.epoch_progress.total, loop.epoch_progress.current):
            tracker.ready -= 1
            tracker.started -= 1
        loop.epoch_loop.val_loop.restarting = True
        self._muted = [*self._trainer.loggers]
        for logger in self._muted:
            logger.log_metrics = lambda *_, **__: None  # type: ignore[method-assign]
        for callback in self._trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging) and callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])  # it makes its scheduler from it

    def refuse_unstorable(self) -> None:
        """Raises ``UserError`` naming what a callback or the module adds to a checkpoint that cannot be stored."""
        try:
            encode(self.state_dict(), where="lightning")
        except HookStateError as error:
            raise UserError(
                f"{error.key}: {error.detail}. It is the state_dict of a callback or what on_save_checkpoint adds"
            ) from error

    # --- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = self._checkpoint()
        additions = Additions(checkpoint)
        callbacks = checkpoint["callbacks"]
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        loop: Any = trainer.fit_loop
        return {
            **self._epoch(),
            "fit_loop": loop.state_dict(),
            "callbacks": callbacks,
            "checkpoint": additions.found(),
            "should_stop": trainer.should_stop,
            "fetched": 0 if loop._data_fetcher is None else loop._data_fetcher.fetched,
            "reloaded": [loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch],
            "validated": loop.epoch_loop.val_loop._has_run,
            "skip_backward": loop._skip_backward,
            "logged": {name: getattr(trainer._logger_connector, name) for name in _CONNECTOR},
            "results": [results_of(results) for results in self._results()],
            "metrics": metrics_of(module),
            "attributes": self._attributes.state(),
            **({} if trainer.datamodule is None else {"datamodule": trainer.datamodule.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` where an epoch has other steps than the recorded one."""
        refuse_other_epochs(state, self._epoch())
        trainer: Any = self._trainer
        self._load_hooks(state)
        _load(trainer.fit_loop, state["fit_loop"])
        # A checkpoint of before has no such entries, from here on.
        trainer.should_stop = state.get("should_stop", False) and goes_on(self._session)
        loop, module = trainer.fit_loop, trainer.lightning_module
        if loop._data_fetcher is not None:
            loop._data_fetcher.fetched = state.get("fetched", loop.epoch_loop.batch_progress.current.ready)
        if "results" in state:
            loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch = state["reloaded"]
            loop.epoch_loop.val_loop._has_run = state["validated"]
            loop._skip_backward = state["skip_backward"]
            vars(trainer._logger_connector).update(state["logged"])
            for results, saved in zip(self._results(), state["results"], strict=True):
                put_results(results, saved, module, trainer.strategy.reduce)
            put_metrics(module, state["metrics"])
            self._attributes.put(state["attributes"])
        for logger in self._muted:
            del logger.log_metrics
        self._muted = []

    def _load_hooks(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        if trainer.datamodule is not None and "datamodule" in state:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if "checkpoint" in state:
            checkpoint = {**self._checkpoint(), "callbacks": {**state["callbacks"]}}
            checkpoint["loops"]["fit_loop"] = state["fit_loop"]
            checkpoint = Additions.put(checkpoint, state["checkpoint"])
            call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
            call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
        # Lightning's load_state_dict of a SpikeDetection fails by a wrong name; its attributes are put back with the others'.
        broken = [callback.state_key for callback in trainer.callbacks if isinstance(callback, SpikeDetection)]
        whole = {key: value for key, value in state["callbacks"].items() if key not in broken}
        call._call_callbacks_load_state_dict(trainer, {"callbacks": whole})
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging) and callback.n_averaged is not None:
                callback.n_averaged.fill_(callback._init_n_averaged)

    def _checkpoint(self) -> dict[str, Any]:
        """As Lightning makes one, before the hooks."""
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
        loop = self._trainer.fit_loop.epoch_loop
        return [loop._results, loop.val_loop._results]

    def _epoch(self) -> dict[str, int]:
        data: Any = self._session._runtime.state.data
        return {"batches_per_epoch": int(data.steps_per_epoch)}


def _load(loop: _Loop, state: dict[str, Any]) -> None:
    """The counters alone: the Trainer does not learn that it resumes."""
    loop.load_state_dict(state)
    loops = [loop]
    for one in loops:
        one.on_iteration_done()
        loops += [part for part in vars(one).values() if isinstance(part, _Loop)]


def _accumulated(trainer: Any, epoch: int) -> int:
    """Batches of one step in ``epoch``."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return int(trainer.accumulate_grad_batches)


def _leave_out_default(trainer: Any) -> None:
    """The callback that every Trainer gets where it is given none."""
    default = vars(ModelCheckpoint())
    for callback in trainer.checkpoint_callbacks:
        plain = type(callback) is ModelCheckpoint
        if plain and all(vars(callback)[k] == v for k, v in default.items() if k not in ("dirpath", "_fs")):
            trainer.callbacks.remove(callback)
            rank_zero_info(
                "Lightning's default ModelCheckpoint is left out, the job has its own checkpoints: give ModelCheckpoint "
                "arguments (save_top_k, monitor, ...) for files of Lightning's"
            )


def _refuse(trainer: Any) -> None:
    if not trainer.lightning_module.automatic_optimization and trainer.strategy._runtime.launch.spec.ddp.static_graph:
        raise UserError(
            "automatic_optimization = False with ddp.static_graph: Lightning drives DDP's reducer by itself; drop static_graph"
        )
    if trainer.strategy._runtime.state.data is None:
        raise UserError("no data is registered: session.register(data=TrainLoader(...)) before trainer.fit")
    if trainer.overfit_batches > 0:
        raise UserError(
            "overfit_batches: a TrainLoader goes on in its order from epoch to epoch; register one of the samples to overfit "
            "on, TrainLoader(torch.utils.data.Subset(dataset, range(64)), shuffle=False, ...), and drop it"
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
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
