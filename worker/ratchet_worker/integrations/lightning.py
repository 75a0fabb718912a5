"""Lightning's Trainer as a job: its loop inside of a ``Session``.

The script as it was, but for the session, the data and the strategy::

    from lightning import Trainer
    from ratchet_worker.data.loader import TrainLoader
    from ratchet_worker.integrations.lightning import SessionStrategy
    from ratchet_worker.session import Session

    with Session() as session:
        data = TrainLoader(my_dataset(), batch_size=32, seed=session.seed, rank=session.rank, world_size=session.world_size)
        session.register(data=data)
        strategy = SessionStrategy(session)
        trainer = Trainer(**strategy.options(), max_epochs=20)
        trainer.fit(MyModule(), data)

Hook, DDP's settings, ranks and devices are those of the spec. A step of the job is one of the optimizer, with its
``accumulate_grad_batches`` batches. It ends when the Trainer asks for the next batch: what callbacks, validation and schedulers
did until then belongs to it. Then it is counted, saved when a checkpoint is due, and stopped at when a stop was asked for, all of
it by the Session. Saved are model, optimizer, schedulers, scaler, data position, generators, buffers, hook, and the Trainer's
own progress and callbacks.

Not supported, and refused by name: manual optimization, ``ckpt_path`` (the job resumes by itself), training data that is not the
registered one, ``ReduceLROnPlateau`` per step. A stop waits for the end of a validation.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install 'ratchet-train[worker,lightning]'") from error

from ratchet_contract.errors import UserError
from ratchet_worker.integrations.steps import Steps, goes_on, refuse_other_epochs
from ratchet_worker.session import Session

_UNLIMITED: Final = -1  # as Lightning writes it


class SessionStrategy(DDPStrategy):
    """See the module's text. One per Session; ``options()`` are the Trainer's arguments that go with it."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._runtime = session._runtime
        self._steps = Steps(session, "the Trainer", self._settle)
        self._global_step = _UNLIMITED  # the Trainer's, when the open step began
        self._handler: Any = None
        self._progress: _Progress | None = None

    def options(self) -> dict[str, Any]:
        """For ``Trainer(**options, ...)``: strategy, accelerator, devices, nodes; none of Lightning's checkpoints."""
        world = self._runtime.launch.spec.world
        return {
            "strategy": self,
            "accelerator": "gpu" if self._session.device.type == "cuda" else "cpu",
            "devices": self._session.world_size // world.nodes,
            "num_nodes": world.nodes,
            "use_distributed_sampler": False,
            "enable_checkpointing": False,
        }

    # --- the way in ----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse(trainer)
        self._handler = signal.getsignal(signal.SIGTERM)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._register(trainer)
            self._steps.restore(self._total(trainer))

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._session.wrap(model)

    @override
    def _register_ddp_hooks(self) -> None:
        """The Session has done it."""

    def _register(self, trainer: pl.Trainer) -> None:
        (optimizer,) = self.optimizers
        state: dict[str, Any] = {
            "optimizer": optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        }
        for number, config in enumerate(self.lr_scheduler_configs):
            state[f"scheduler_{number}" if number else "scheduler"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        _refuse_plateau(self.lr_scheduler_configs)
        self._progress = _Progress(self._session, trainer)
        self._session.register(**state, lightning=self._progress)

    def _total(self, trainer: pl.Trainer) -> int | None:
        """Steps of the whole job, where the Trainer's limits tell."""
        data: Any = self._runtime.state.data
        batches = trainer.limit_train_batches
        per_epoch = len(_Batches(self, data))
        per_epoch = min(per_epoch, batches) if isinstance(batches, int) else int(per_epoch * batches)
        epochs = trainer.max_epochs if trainer.max_epochs is not None else _UNLIMITED
        limits = [] if epochs == _UNLIMITED else [epochs * math.ceil(per_epoch / trainer.accumulate_grad_batches)]
        limits += [] if trainer.max_steps == _UNLIMITED else [trainer.max_steps]
        return min(limits, default=None)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return _Batches(self, dataloader) if dataloader is self._runtime.state.data else dataloader

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        signal.signal(
            signal.SIGTERM, self._handler
        )  # Lightning's would end this rank alone, without the others' agreement
        loaders = self._trainer().fit_loop._combined_loader.flattened
        if not all(isinstance(loader, _Batches) for loader in loaders):
            raise UserError(
                "the Trainer trains on other data than the job's: session.register(data=TrainLoader(...)), and give the same "
                "object to trainer.fit"
            )

    # --- steps ---------------------------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """The Trainer asks for a batch: the step that is done ends, and the next one begins. Raises ``Stopped``."""
        trainer = self._trainer()
        if self._global_step != trainer.global_step:
            self._steps.next()
            self._global_step = trainer.global_step
        self._runtime.counter.tick()

    def _settle(self) -> None:
        assert self._progress is not None
        self._progress.settle()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._runtime.counter.tick()  # a long validation is no hang
        return super().validation_step(*args, **kwargs)

    @override
    def on_train_end(self) -> None:
        """Before Lightning takes the model off its device: the last step ends, the final checkpoint is made."""
        super().on_train_end()
        self._session.finish()

    # --- what is Ratchet's to do ---------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        raise UserError(
            "ckpt_path: the job resumes from its own checkpoints; drop it, or load weights into the module before fit"
        )

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


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
    """The job's data as the Trainer sees them: epochs of a fixed length, each batch within a step."""

    def __init__(self, strategy: SessionStrategy, data: Any) -> None:
        self._strategy, self._data = strategy, data

    def __len__(self) -> int:
        return int(self._data.steps_per_epoch)

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] | None = None
        while True:
            self._strategy.before_batch()
            if batches is None:  # after the data's position was put back
                batches = iter(self._data)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the Session has the position. Without it Lightning would warn that it is lost."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Progress:
    """The Trainer's own state: its loops' counters, its callbacks, and whether one of them has asked it to stop."""

    def __init__(self, session: Session, trainer: pl.Trainer) -> None:
        self._session, self._trainer = session, trainer
        self._stepped: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._epoch(),
            "fit_loop": self._trainer.fit_loop.state_dict(),
            "callbacks": call._call_callbacks_state_dict(self._trainer),
            "should_stop": self._trainer.should_stop,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` where an epoch has other steps than the recorded one."""
        refuse_other_epochs(state, self._epoch())
        self._trainer.fit_loop.load_state_dict(state["fit_loop"])
        call._call_callbacks_load_state_dict(self._trainer, {"callbacks": state["callbacks"]})
        # A checkpoint of before has no such entry.
        self._trainer.should_stop = state.get("should_stop", False) and goes_on(self._session)
        self._stepped = self._trainer.fit_loop.epoch_loop._batches_that_stepped

    def _epoch(self) -> dict[str, int]:
        data: Any = self._session._runtime.state.data
        return {"batches_per_epoch": int(data.steps_per_epoch)}

    def settle(self) -> None:
        """A Trainer that resumes where a validation would be due passes over it, and counts a batch that it did not train."""
        if self._stepped is not None:
            self._trainer.fit_loop.epoch_loop._batches_that_stepped = self._stepped


def _refuse(trainer: pl.Trainer) -> None:
    if not trainer.lightning_module.automatic_optimization:
        raise UserError(
            "manual optimization is not supported: SessionStrategy cannot tell where a step ends; use automatic optimization"
        )
    if trainer.strategy._runtime.state.data is None:  # type: ignore[attr-defined]
        raise UserError("no data is registered: session.register(data=TrainLoader(...)) before trainer.fit")


def _refuse_plateau(configs: Any) -> None:
    if any(config.reduce_on_plateau and config.interval == "step" for config in configs):
        raise UserError(
            "ReduceLROnPlateau with interval 'step' is not supported: Lightning steps it once more on a resume; use 'epoch'"
        )
