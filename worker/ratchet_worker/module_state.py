"""What a module has besides the tensors that it was built with: modes, frozen parameters, extra state, what training made of its
buffers and attributes, and gradients that were left.

Gradients are mostly none or zeros between two steps; a script that accumulates over several of its steps leaves more, and whether
an unused parameter has zeros or nothing decides if an optimizer moves it.
"""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple

import torch
from pydantic import JsonValue
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.codec import Tensors, encode
from ratchet_worker import module_origin
from ratchet_worker.module_origin import Origin
from ratchet_worker.walk import Walk, Walked, walk_of

COMPONENT: Final = "modules"
_GRADIENT: Final = attrgetter("grad")
_MODE: Final = attrgetter("training")


class Capture:
    """The state of one module, as ``ratchet_hooks.codec`` has it, from save to save: what it was, where nothing that ``capture``
    looks at can be another."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def encoded(self, walk: Walk, before: Origin) -> tuple[Tensors, JsonValue]:
        """Named tensors and JSON; the same object as long as it says the same. Raises ``HookStateError`` for what cannot be
        stored."""
        known, seen = self._known, _seen(walk)
        if known is not None and known.walk is walk and known.before is before and known.seen == seen:
            return {}, known.data
        state, self._known = capture(walk, before), None
        tensors, data = encode(state, where=COMPONENT)
        if seen is not None and not (state["made"] or state["resized"]):
            self._known = _Known(walk, before, seen, data)
        return tensors, data


class _Known(NamedTuple):
    """``seen``: all that may be another while ``walk`` is the same."""

    walk: Walk
    before: Origin
    seen: _Seen
    data: JsonValue


class _Seen(NamedTuple):
    modes: list[bool]
    trained: list[bool]
    buffers: list[tuple[int, torch.Size, torch.dtype]]


def _seen(walk: Walk) -> _Seen | None:
    """None: there is something whose elements would have to be looked at, or that the user's code tells."""
    if _with_extra_state(walk) or not all(map(is_, map(_GRADIENT, walk.all_parameters), repeat(None))):
        return None
    parts = walk.derived("parts", lambda: [part for _, part in walk.named_modules()])
    return _Seen([*map(_MODE, parts)], module_origin.trained(walk), module_origin.buffer_forms(walk))


def capture(module: Walked, before: Origin) -> dict[str, Any]:
    """A tree that ``ratchet_hooks.codec`` takes; a gradient of zeros is stored as None. ``before``: of the wrapped module."""
    gradients = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    return {
        **module_origin.changed_buffers(module, before),
        "eval": [name for name, m in module.named_modules() if not m.training],
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "extra": {name: m.get_extra_state() for name, m in _with_extra_state(module).items()},
        "gradients": {name: None if _blank(g) else g for name, g in gradients.items()},
    }


def restore(module: nn.Module, state: dict[str, Any], *, frozen: bool = True) -> None:
    """Inverse of ``capture``. ``frozen`` False leaves ``requires_grad`` alone: DDP was built for other parameters then.

    Raises ``StateError`` when the module is built of other parts than the recorded one.
    """
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
    holders = _with_extra_state(module)
    if odd := sorted(set(holders) ^ set(state["extra"])):
        raise StateError(f"extra state of {odd[0]!r} is only on one side, of the model or of the checkpoint")
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


def _blank(gradient: torch.Tensor) -> bool:
    """Zeros, and none of them negative."""
    return not bool(gradient.any()) and not bool(torch.signbit(gradient).any())


def _gradient(parameter: nn.Parameter, saved: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(parameter) if saved is None else saved.to(parameter.device, copy=True)


def _with_extra_state(module: Walked) -> dict[str, nn.Module]:
    walk = walk_of(module)
    return walk.derived("extra", lambda: _own_extra_state(walk))


def _own_extra_state(module: Walk) -> dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}
