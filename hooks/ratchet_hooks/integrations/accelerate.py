"""Accelerate: ``save_state`` and ``load_state`` with every rank's hook state, bit for bit.

    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option={...})
    accelerator = Accelerator(kwargs_handlers=[handler])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    manage(accelerator, model)                       # one line; or manage(accelerator, model, "powerSGD"), and no comm_hook above

Accelerate registers torch's hook in ``prepare`` and saves nothing of it: after ``load_state`` it starts at iteration 0, with no
residual and no warning. ``manage`` puts Ratchet's implementation in its place, with the same parameters. Beside Accelerate's
files ``save_state`` then writes ``ratchet_hook_<rank>.safetensors`` on every rank: hook, buckets, buffers, and the whole replica
under post_localSGD, whose parameters are averaged after the optimizer's steps by themselves. Accelerate saves the generators.
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
from ratchet_hooks.integrations.rank_state import VERSION, RankFile
from ratchet_hooks.managed import ManagedHook
from ratchet_hooks.registration import Hook, register


def manage(
    accelerator: Accelerator,
    model: nn.Module,
    hook: Hook | None = None,
    *,
    wrapper: str | Callable[..., Any] | None = None,
    redistribute: bool = False,
    **parameters: Any,
) -> ManagedHook:
    """Put ``model``, as ``accelerator.prepare`` returned it, under a managed hook that ``save_state`` and ``load_state`` keep.

    A collective, after ``prepare`` and before the first forward. ``hook``, ``wrapper``, ``parameters``: as in
    ``ratchet_hooks.register``; None: the comm_hook of DistributedDataParallelKwargs, taken over. ``redistribute``: ``load_state``
    takes what another number of ranks saved, with a warning (``rank_state.resized``). Raises ``UnsupportedModel`` for
    what cannot be managed; ``load_state`` raises ``HookStateError`` for a directory without this rank's state, or with another's.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedModel(
            f"accelerator.prepare gave a {type(model).__name__}, no DistributedDataParallel: hooks need DDP, with more than one "
            "process, and without torch.compile around it"
        )
    managed = register(model, hook, wrapper=wrapper, **parameters)
    if managed.replicas != "equal" and accelerator.scaler is not None:
        raise UnsupportedModel(
            f"{managed.spec.name} with float16 autocast: one rank could skip a step that the others take; use bf16"
        )
    optimizers = [_plain(optimizer) for optimizer in accelerator._optimizers]
    keeper = _Keeper(RankFile(model, optimizers, redistribute=redistribute))
    for optimizer in keeper.file.optimizers:
        optimizer.register_step_post_hook(lambda *_: managed.average_parameters())
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: keeper.file.save(directory))
    accelerator.register_load_state_pre_hook(keeper.remember)
    accelerator.register_for_checkpointing(keeper)
    return managed


class _Keeper:
    """What Accelerate calls last when it loads a state, behind model and optimizers, which it would otherwise load over ours."""

    def __init__(self, file: RankFile) -> None:
        self.file = file
        self._directory: str | None = None

    def remember(self, models: list[nn.Module], directory: str) -> None:
        self._directory = directory

    def state_dict(self) -> dict[str, int]:
        return {"version": VERSION}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert self._directory is not None
        self.file.load(self._directory)


def _plain(optimizer: Any) -> Optimizer:
    found: Optimizer = optimizer.optimizer
    return found
