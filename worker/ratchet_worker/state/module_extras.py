"""Captures and restores a module's state besides its tensors, such as modes, frozen parameters, extra state and gradients."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple

import torch
from pydantic import JsonValue
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.state.encode import Tensors, encode
from ratchet_worker.state import module_baseline
from ratchet_worker.state.module_baseline import Origin
from ratchet_worker.state.module_walk import Walk, Walked, as_walk

COMPONENT: Final = "modules"
_GRADIENT: Final = attrgetter("grad")
_MODE: Final = attrgetter("training")


class Capture:
    """Captures, for each save, the encoded state of one module, and may reuse the previous result while nothing has changed."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def capture_encoded(self, walk: Walk, before: Origin) -> tuple[Tensors, JsonValue]:
        """Return the module's state (see ``capture``) as named tensors and JSON. Raises ``HookStateError`` for state that cannot
        be stored."""
        known, seen = self._known, _observe(walk)
        if known is not None and known.walk is walk and known.before is before and known.seen == seen:
            return {}, known.data
        state, self._known = capture(walk, before), None
        tensors, data = encode(state, root=COMPONENT)
        if seen is not None and not (state["made"] or state["resized"]):
            self._known = _Known(walk, before, seen, data)
        return tensors, data


class _Known(NamedTuple):
    """A captured state that can be reused. ``seen``: what may change while ``walk`` is the same. ``data``: the state's JSON."""

    walk: Walk
    before: Origin
    seen: _Seen
    data: JsonValue


class _Seen(NamedTuple):
    """What may change while a module's parts, parameters and buffers are the same: modes, ``requires_grad``, forms of buffers."""

    modes: list[bool]
    trained: list[bool]
    buffers: list[tuple[int, torch.Size, torch.dtype]]


def _observe(walk: Walk) -> _Seen | None:
    """Return what may change while ``walk`` is the same; None if gradients or extra state make that costly."""
    if _modules_with_extra_state(walk) or not all(map(is_, map(_GRADIENT, walk.all_parameters), repeat(None))):
        return None
    parts = walk.cached("parts", lambda: [part for _, part in walk.named_modules()])
    return _Seen([*map(_MODE, parts)], module_baseline.trained_flags(walk), module_baseline.buffer_forms(walk))


def capture(module: Walked, before: Origin) -> dict[str, Any]:
    """Return the module's state besides parameters and buffers, as a tree for ``ratchet_hooks.state.encode``, with the changes of
    buffers since ``before``."""
    gradients = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    return {
        **module_baseline.changed_buffers(module, before),
        "eval": [name for name, m in module.named_modules() if not m.training],
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "extra": {name: m.get_extra_state() for name, m in _modules_with_extra_state(module).items()},
        # Zeros (None here) differ from no gradient: an optimizer may move an unused parameter with a gradient of zeros.
        "gradients": {name: None if _is_zero(g) else g for name, g in gradients.items()},
    }


def restore(module: nn.Module, state: dict[str, Any], *, frozen: bool = True) -> None:
    """Restore what ``capture`` returned, except buffers. ``frozen`` False leaves ``requires_grad`` unchanged. Raises
    ``StateError`` if it does not fit."""
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
    holders = _modules_with_extra_state(module)
    if odd := sorted(set(holders) ^ set(state["extra"])):
        raise StateError(f"extra state of {odd[0]!r} is only in the model or only in the checkpoint")
    named = {*state["frozen"], *state["gradients"]} - set(parameters) | set(state["eval"]) - set(modules)
    if named:
        raise StateError(f"{min(named)!r}, which the model has no longer")
    for name, part in modules.items():
        part.training = name not in state["eval"]
    for name, holder in holders.items():
        holder.set_extra_state(state["extra"][name])
    for name, parameter in parameters.items():
        if frozen and parameter.requires_grad is (name in state["frozen"]):
            parameter.requires_grad_(name not in state["frozen"])
        parameter.grad = _gradient(parameter, state["gradients"][name]) if name in state["gradients"] else None


def _is_zero(gradient: torch.Tensor) -> bool:
    """True if all elements are zeros, and none is a negative zero."""
    parts = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return not bool(parts.any()) and not bool(torch.signbit(parts).any())


def _gradient(parameter: nn.Parameter, saved: torch.Tensor | None) -> torch.Tensor:
    """Return a new gradient for ``parameter``: zeros if ``saved`` is None, else a copy of ``saved``."""
    return torch.zeros_like(parameter) if saved is None else saved.to(parameter.device, copy=True)


def _modules_with_extra_state(module: Walked) -> dict[str, nn.Module]:
    """Return, by name, the parts of the module whose class has a ``get_extra_state`` of its own. Cached with the walk."""
    walk = as_walk(module)
    return walk.cached("extra", lambda: _own_extra_state(walk))


def _own_extra_state(module: Walk) -> dict[str, nn.Module]:
    """Return, by name, the parts of the module whose class has a ``get_extra_state`` of its own."""
    return {n: m for n, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}
