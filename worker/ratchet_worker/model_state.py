"""The wrapped model's tensors: which of its parameters the ranks share, and parameters and buffers back into the live ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_worker import module_origin, module_state
from ratchet_worker.snapshot import Snapshot, Tensors
from ratchet_worker.walk import Walk

MODEL: Final = "model"
"""The component's name, and the first part of its parameters' names in a snapshot."""


def replicated(walk: Walk) -> Collection[str]:
    """Parameters that DDP keeps equal: all but those that the module asks DDP to ignore."""
    ignored = frozenset(getattr(walk.module, "_ddp_params_and_buffers_to_ignore", ()))
    known = walk.derived("replicated", dict[frozenset[str], Collection[str]])
    if ignored not in known:
        known[ignored] = frozenset(name for name, _ in walk.named_parameters() if name not in ignored)
    return known[ignored]


def parameters_of(tensors: Tensors) -> Tensors:
    """The model's parameters among a snapshot's tensors, by their names in the model."""
    prefix = f"{MODEL}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def restore_parameters(module: nn.Module, saved: Snapshot) -> None:
    """Raises ``StateError`` where names, shapes or dtypes are others."""
    _copy_into("parameter", dict(module.named_parameters()), parameters_of({**saved.shared, **saved.private}))


def restore_buffers(module: nn.Module, saved: Snapshot, relayout: bool) -> None:
    """Buffers, and what else training made of the modules; ``relayout``: DDP was built for other parameters, so which are frozen
    is left alone. Raises ``StateError`` where names, shapes or dtypes are others."""
    buffers, modules = saved.encoded("buffers")[0], saved.value("modules")
    module_origin.make_buffers(module, modules, buffers)
    _copy_into("buffer", dict(module.named_buffers()), buffers)
    module_state.restore(module, modules, frozen=not relayout)


def _copy_into(kind: str, live: Mapping[str, torch.Tensor], found: Tensors) -> None:
    """Copy bit for bit into live tensors of the same names, shapes and dtypes. Raises ``StateError`` naming what differs."""
    if odd := sorted(set(live) ^ set(found)):
        side = "the model has no longer" if odd[0] in found else "the checkpoint does not have"
        raise StateError(f"{kind} {odd[0]!r}, which {side}")
    with torch.no_grad():
        for name, tensor in live.items():
            saved = found[name]
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                was, now = (f"{t.dtype} {list(t.shape)}" for t in (saved, tensor))
                raise StateError(f"{kind} {name!r} is {now}, the checkpoint has {was}")
            tensor.copy_(saved)
