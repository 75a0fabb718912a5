"""The wrapped model's tensors: records the keys of its ``state_dict``, and restores parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Any, Final

import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.state.encode import is_dense
from ratchet_hooks.torch_compat import state_dict_hooks
from ratchet_worker.state import module_baseline, module_extras
from ratchet_worker.state.module_walk import Walk, Walked, as_walk
from ratchet_worker.state.snapshot import Snapshot, Tensors

COMPONENT: Final = "model/keys"  # no registered object has a slash in its name
_METHODS: Final = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state"))


def capture(module: Walked, layout_key: object = None) -> dict[str, Any]:
    """Return, as JSON, what is needed to build the model's ``state_dict`` without the user's code. If calling ``state_dict``
    fails, the result has the error instead. The result may be cached: do not change it. ``layout_key``: an object that is
    replaced whenever shapes or strides change; None if there is none."""
    walk = as_walk(module)
    if not _has_default_keys(walk):
        return _capture(walk)
    known = walk.cached("state names", dict[Any, dict[str, Any]])
    forms = layout_key or tuple(None if p.is_contiguous() else (p.shape, p.stride()) for p in walk.parameters())
    if forms not in known:
        known.clear()
        known[forms] = _capture(walk)
    return known[forms]


def _has_default_keys(walk: Walk) -> bool:
    """True if no hooks and no methods of the user's can change the keys of ``state_dict``."""
    own = walk.cached("own state_dict", lambda: walk.overrides(_METHODS, parts=True))
    return not own and walk.cached("own state_dict hooks", lambda: _Hooks(walk)).is_empty()


class _Hooks:
    """The hooks, and methods set on a part itself, that ``state_dict`` would call on the parts of a module."""

    def __init__(self, walk: Walk) -> None:
        self._walk, self._seen = walk, object()
        self._hooks: list[Sized] = []
        self._methods = False

    def is_empty(self) -> bool:
        """True if no part has such hooks or methods now."""
        walk = self._walk
        if self._seen is not walk.attributes:
            parts = [part for _, part in walk.named_modules()]
            self._hooks = [hooks for part in parts for hooks in state_dict_hooks(part)]
            self._methods = not all(map(_METHODS.isdisjoint, map(vars, parts)))
            self._seen = walk.attributes
        return not self._methods and not any(self._hooks)


def _capture(module: Walk) -> dict[str, Any]:
    """Return what ``capture`` returns, without a cache; calls the user's ``state_dict``."""
    stored = {id(b): f"buffers/{name}" for name, b in module.named_buffers()}
    stored |= {id(p): f"model/{name}" for name, p in module.named_parameters()}
    strides = {n: list(p.stride()) for n, p in module.named_parameters() if not p.is_contiguous() and is_dense(p)}
    try:
        state = module.state_dict(keep_vars=True)
        keys = [[str(key), stored.get(id(value))] for key, value in state.items()]
    except Exception as error:  # in the user's state_dict: training does not depend on it
        return {"keys": None, "strides": strides, "error": f"{type(error).__name__}: {error}"[:500]}
    # Keys: pairs of a key and the stored name (None: neither parameter nor buffer), in the order of ``state_dict``.
    return {"keys": keys, "strides": strides, "error": None}


MODEL: Final = "model"
"""The component's name, and the first part of its parameters' names in a snapshot."""


def replicated_names(walk: Walk) -> Collection[str]:
    """Return the names of the parameters that the module does not ask DDP to ignore."""
    ignored = frozenset(getattr(walk.module, "_ddp_params_and_buffers_to_ignore", ()))
    known = walk.cached("replicated", dict[frozenset[str], Collection[str]])
    if ignored not in known:
        known[ignored] = frozenset(name for name, _ in walk.named_parameters() if name not in ignored)
    return known[ignored]


def model_parameters(tensors: Tensors) -> Tensors:
    """Return the model's parameters among a snapshot's tensors, by their names in the model (without ``model/``)."""
    prefix = f"{MODEL}/"
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def restore_parameters(module: nn.Module, saved: Snapshot) -> None:
    """Copy the saved parameters into those of ``module``. Raises ``StateError`` if names, shapes or dtypes differ."""
    _copy_into("parameter", dict(module.named_parameters()), model_parameters({**saved.shared, **saved.private}))


def restore_buffers(module: nn.Module, saved: Snapshot, relayout: bool) -> None:
    """Restore buffers and the modules' other state. ``relayout`` leaves ``requires_grad`` unchanged. Raises ``StateError`` if the
    saved state does not fit."""
    buffers, modules = saved.encoded("buffers")[0], saved.value("modules")
    module_baseline.make_buffers(module, modules, buffers)
    _copy_into("buffer", dict(module.named_buffers()), buffers)
    module_extras.restore(module, modules, frozen=not relayout)


def _copy_into(kind: str, live: Mapping[str, torch.Tensor], found: Tensors) -> None:
    """Copy ``found`` into the ``live`` tensors of the same names. Raises ``StateError`` if names, shapes or dtypes differ."""
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
