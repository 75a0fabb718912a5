"""Lightning: a DDP strategy whose checkpoints hold every rank's hook state.

    trainer = Trainer(strategy=RatchetDDPStrategy(hook="powerSGD"), devices=2, ...)
    trainer.fit(model, ckpt_path="last")

Lightning's own ``DDPStrategy`` saves no hook state, and registers hooks on CUDA only. This one adds the entry ``ratchet_hooks``
to the checkpoint, with a uint8 tensor per rank, which ``ratchet_hooks.files.unpack_state`` reads.

On the same number of ranks, a resume from a checkpoint at the end of an epoch is exact. A resume from a checkpoint within an
epoch is exact on two conditions: the checkpoint was taken after an optimizer step, and the data loader has ``state_dict`` and
``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install lightning") from error

from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.integrations import rank_state
from ratchet_hooks.manage.managed_hook import ManagedHook
from ratchet_hooks.manage.register import Hook, hook_of, register, resolve
from ratchet_hooks.state.files import pack_state, unpack_state

KEY: Final = "ratchet_hooks"


class RatchetDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy with one of Ratchet's hooks, whose state is in Lightning's checkpoints.

    ``hook``, ``wrapper``: as in ``ratchet_hooks.register``, except that ``hook`` None means allreduce. Lightning's
    ``ddp_comm_hook``, ``ddp_comm_state`` and ``ddp_comm_wrapper`` may be given in place of these two. ``model_averaging_period``:
    the parameter of post_localSGD with this name. ``reset_hook`` True: accept a checkpoint without hook state. ``redistribute``
    True: accept a checkpoint of another number of ranks, with a warning (``rank_state.redistribute_ranks``).

    Raises ``MisconfigurationException`` for arguments that do not fit together.
    ``Trainer.fit`` raises the errors of ``ratchet_hooks.register``, ``MisconfigurationException`` for manual optimization, and
    ``HookStateError`` for a checkpoint whose hook state is missing or does not fit.
    """

    def __init__(
        self,
        hook: Hook | None = None,
        *,
        wrapper: str | Callable[..., Any] | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        reset_hook: bool = False,
        redistribute: bool = False,
        **kwargs: Any,
    ) -> None:
        if hook is not None and ddp_comm_hook is not None:
            raise MisconfigurationException("give hook or ddp_comm_hook, not both")
        if ddp_comm_state is not None and ddp_comm_hook is None:
            raise MisconfigurationException(
                "ddp_comm_state is the state of ddp_comm_hook, which is missing: give ddp_comm_hook too and no hook, or hook "
                'with its parameters, such as hook={"name": "powerSGD", "matrix_approximation_rank": 4}'
            )
        if wrapper is not None and ddp_comm_wrapper is not None:
            raise MisconfigurationException("give wrapper or ddp_comm_wrapper, not both")
        super().__init__(**kwargs)
        self._requested_hook: Hook = hook or (
            (ddp_comm_state, ddp_comm_hook) if ddp_comm_hook is not None else "allreduce"
        )
        self._requested_wrapper = wrapper if wrapper is not None else ddp_comm_wrapper
        self._parameters = {} if model_averaging_period is None else {"model_averaging_period": model_averaging_period}
        self._reset_hook, self._redistribute = reset_hook, redistribute
        self._state_to_restore: Any = None

    @property
    def hook(self) -> ManagedHook:
        """The hook of the model that is trained. Raises ``RuntimeError`` unless Lightning has wrapped the model in DDP, as while
        ``Trainer.fit`` runs."""
        return hook_of(self._managed_ddp())

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as ``DDPStrategy`` does. Raises ``MisconfigurationException`` for a module with manual optimization."""
        module = self.lightning_module
        if module is not None and not module.automatic_optimization:
            raise MisconfigurationException(
                "RatchetDDPStrategy does not support manual optimization: Lightning then drives DDP's reducer by itself. Use "
                "automatic optimization, or ratchet_hooks.register in a loop of your own"
            )
        super().setup(trainer)

    @override
    def _register_ddp_hooks(self) -> None:
        """Register the requested hook on Lightning's DDP, on any device."""
        assert isinstance(self.model, DistributedDataParallel)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            check = rank_state.check_equal_replicas
            check(resolve(self.model, self._requested_hook, wrapper=self._requested_wrapper, **self._parameters))
        hook = register(
            self.model,
            self._requested_hook,
            wrapper=self._requested_wrapper,
            node_ranks=self.num_processes,
            **self._parameters,
        )
        if self.root_device.type != "cuda":
            rank_zero_info(
                f"RatchetDDPStrategy registered hook {hook.spec.name} on {self.root_device.type}, where Lightning's DDPStrategy "
                "would have skipped it and trained without"
            )

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take an optimizer step, then average parameters if the hook requires that. Returns ``DDPStrategy``'s result."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.hook.average_parameters()
        return output

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` as ``DDPStrategy`` does. Before that, rank 0 adds all ranks' states to it, unless the checkpoint
        has weights only or the model has no managed DDP. A collective."""
        if "optimizer_states" in checkpoint and isinstance(self.model, ManagedDDP):
            ranks = self._gather_rank_states(self.model)
            if ranks is not None:
                checkpoint[KEY] = {"version": rank_state.VERSION, "ranks": ranks}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _gather_rank_states(self, ddp: ManagedDDP) -> Any:
        """Return all ranks' packed states on rank 0, None on other ranks. A collective. Warns if the checkpoint is taken between
        two accumulated batches."""
        fit = self._fit_loop()
        accumulates = fit.epoch_loop.batch_progress.current.ready > 0 and fit._should_accumulate()
        if accumulates:
            rank_zero_warn(
                "this checkpoint is taken between two accumulated batches: Lightning saves no gradients, so a resume from it is "
                "not exact. Save after an optimizer step (every_n_train_steps) or at the end of an epoch"
            )
        state = rank_state.capture_rank(ddp, self._plain_optimizers())
        state["epoch_ended"] = fit.epoch_loop._num_ready_batches_reached()
        return rank_state.gather_bytes(pack_state(state), ddp.process_group, self.root_device)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers as ``DDPStrategy`` does, then this rank's state. Raises ``HookStateError`` if that state does
        not fit, or is missing and ``reset_hook`` is not set."""
        super().load_optimizer_state_dict(checkpoint)
        ddp = self._managed_ddp()
        if KEY not in checkpoint:
            if not self._reset_hook:
                raise HookStateError(
                    KEY, "this checkpoint holds no hook state (Lightning's own strategy wrote it, perhaps); RatchetDDPStrategy("
                    "reset_hook=True) resets the hook",
                )  # fmt: skip
            rank_zero_warn(
                f"the checkpoint holds no hook state: hook {self.hook.spec.name} keeps its initial state, which is not exact"
            )
            return
        ranks = checkpoint[KEY]["ranks"]
        if len(ranks) == self.world_size:
            state = unpack_state(ranks[self.global_rank])
        elif self._redistribute:
            state = rank_state.redistribute_ranks(ddp, [unpack_state(packed) for packed in ranks])
        else:
            raise HookStateError("world_size", rank_state.world_size_mismatch(len(ranks), self.world_size))
        rank_state.restore_rank(ddp, self._plain_optimizers(), state)
        # At the end of an epoch the next epoch's iterator is not made yet, and draws a seed; within an epoch it has drawn it.
        rank_state.restore_generators(ddp, state)
        self._state_to_restore = None if state["epoch_ended"] else state

    @override
    def on_train_start(self) -> None:
        """Restore the generators again, for a checkpoint within an epoch: making the data loader's iterator has moved them."""
        super().on_train_start()
        if self._state_to_restore is not None:
            rank_state.restore_generators(self._managed_ddp(), self._state_to_restore)
            self._state_to_restore = None

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _managed_ddp(self) -> ManagedDDP:
        """Return the managed DDP. Raises ``RuntimeError`` if there is none."""
        if not isinstance(self.model, ManagedDDP):
            raise RuntimeError("RatchetDDPStrategy has a hook only while Trainer.fit runs")
        return self.model

    def _fit_loop(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.fit_loop

    def _plain_optimizers(self) -> list[Optimizer]:
        """Return torch's optimizers, without Lightning's wrappers."""
        return [o._optimizer if isinstance(o, LightningOptimizer) else o for o in self.optimizers]
