"""Accelerate: ``save_state`` and ``load_state`` with every rank's hook state.

    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option={...})
    accelerator = Accelerator(kwargs_handlers=[handler])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    manage(accelerator, model)                       # one line; or manage(accelerator, model, "powerSGD"), and no comm_hook above

Accelerate itself saves no state of a hook. ``manage`` replaces the hook by Ratchet's implementation; ``save_state`` then also
writes ``ratchet_hook_<rank>.safetensors`` on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("Accelerate is not installed: pip install accelerate") from error

from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.integrations.rank_state import VERSION, RankFile, check_equal_replicas
from ratchet_hooks.manage.managed_hook import ManagedHook
from ratchet_hooks.manage.register import Hook, register, resolve


def manage(
    accelerator: Accelerator,
    model: nn.Module,
    hook: Hook | None = None,
    *,
    wrapper: str | Callable[..., Any] | None = None,
    redistribute: bool = False,
    **parameters: Any,
) -> ManagedHook:
    """Put a managed hook on ``model``, as ``accelerator.prepare`` returned it; ``save_state`` and ``load_state`` then include the
    hook's state. Returns the hook. After each optimizer step, parameters are averaged if the hook requires that.

    A collective, before the first forward. ``hook``, ``wrapper``, ``parameters``: as in ``ratchet_hooks.register``; ``hook``
    None: the hook of DistributedDataParallelKwargs. ``redistribute`` True: ``load_state`` accepts states of another number of
    ranks, with a warning (``rank_state.redistribute_ranks``).

    Raises the errors of ``ratchet_hooks.register``. ``load_state`` raises ``HookStateError`` if this rank's state is missing or
    does not fit.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedModel(
            f"accelerator.prepare returned a {type(model).__name__}, no DistributedDataParallel: hooks need DDP, with more than "
            "one process, and without torch.compile around it"
        )
    if accelerator.scaler is not None:
        check_equal_replicas(resolve(model, hook, wrapper=wrapper, **parameters))
    managed = register(model, hook, wrapper=wrapper, **parameters)
    optimizers = [_unwrapped(optimizer) for optimizer in accelerator._optimizers]
    keeper = _Keeper(RankFile(model, optimizers, redistribute=redistribute))
    for optimizer in keeper.file.optimizers:
        optimizer.register_step_post_hook(lambda *_: managed.average_parameters())
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: keeper.file.save(directory))
    accelerator.register_load_state_pre_hook(keeper.record_directory)
    accelerator.register_for_checkpointing(keeper)
    return managed


class _Keeper:
    """Object registered with Accelerate so that ``load_state`` restores this rank's hook state after model and optimizers."""

    def __init__(self, file: RankFile) -> None:
        self.file = file
        self._directory: str | None = None

    def record_directory(self, models: list[nn.Module], directory: str) -> None:
        """Remember the directory that ``load_state`` reads; called by Accelerate before it loads anything."""
        self._directory = directory

    def state_dict(self) -> dict[str, int]:
        return {"version": VERSION}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore this rank's state with ``RankFile.load`` from the directory of ``record_directory``. ``state`` is not used."""
        assert self._directory is not None
        self.file.load(self._directory)


def _unwrapped(optimizer: Any) -> Optimizer:
    found: Optimizer = optimizer.optimizer
    return found
