"""Captures, for a snapshot, the state that ranks may have in common: the model's parameters and the optimizers' tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ratchet_worker.state import model
from ratchet_worker.state.change_detection import Forms
from ratchet_worker.state.live_memory import LiveTensors
from ratchet_worker.state.model import MODEL
from ratchet_worker.state.module_walk import Walk
from ratchet_worker.state.optimizer import Capture, Captured
from ratchet_worker.state.snapshot import Sizes, Snapshot, Tensors, Until


class EqualState:
    """Captures parameters and optimizers' tensors for each save, reusing names and sizes while the tensors are the same."""

    def __init__(self) -> None:
        self._captures: dict[str, Capture] = {}
        self._plan: _Plan | None = None

    def capture(self, out: Snapshot, walk: Walk, optimizers: Mapping[str, Optimizer], equal: bool) -> object:
        """Add the model's parameters and the optimizers' state to ``out``, as live tensors. With ``equal``, the tensors that DDP
        keeps equal are shared and the others private; without it, all are private. Return an object that is the same only while
        the parameters' forms are the same; None if changes may go unnoticed."""
        names = walk.cached("names by id", lambda: {id(p): name for name, p in walk.named_parameters()})
        replicated = model.replicated_names(walk)
        captures = {component: self._capture_of(component, optimizer) for component, optimizer in optimizers.items()}
        found = {component: capture.capture_state(names, replicated) for component, capture in captures.items()}
        tensors, key = _list_tensors(walk, found), _key(walk, replicated, equal, found)
        plan = self._plan
        if plan is None or plan.key != key or plan.forms is None or not plan.forms.matches(tensors):
            for component, captured in found.items():
                if captured.is_reused:
                    found[component] = captures[component].capture_state(names, replicated, force=True)
            tensors, key = _list_tensors(walk, found), _key(walk, replicated, equal, found)
            plan = self._plan = _plan(key, found, tensors, optimizers.values())
        for component, captured in found.items():
            out.add(component, captured.rest)
        shared: Tensors = dict(zip(plan.names, tensors, strict=True))
        out.private |= {name: shared.pop(name).detach() for name in plan.private}
        out.shared = LiveTensors([*shared], [*shared.values()])
        out.state[MODEL] = [*plan.own]
        out.until = {**out.until, **plan.until} if out.until else plan.until
        out.known_sizes = plan.sizes
        return plan.forms

    def _capture_of(self, component: str, optimizer: Optimizer) -> Capture:
        """Return the capture of this optimizer, kept from save to save while the component has the same optimizer."""
        known = self._captures.get(component)
        if known is None or known.optimizer is not optimizer:
            known = self._captures[component] = Capture(optimizer, component)
        return known


def _list_tensors(walk: Walk, found: Mapping[str, Captured]) -> list[torch.Tensor]:
    """Return all parameters, then the tensors of all captured optimizers, in order."""
    return [*walk.all_parameters, *chain.from_iterable(captured.tensors for captured in found.values())]


def _key(walk: Walk, replicated: Collection[str], equal: bool, found: Mapping[str, Captured]) -> _Key:
    return _Key(walk, replicated, equal, {component: captured.layout_key for component, captured in found.items()})


class _Key(NamedTuple):
    """What a plan depends on, besides the tensors' forms. ``optimizers``: ``Captured.layout_key`` by component."""

    walk: Walk
    replicated: Collection[str]
    equal: bool
    optimizers: Mapping[str, object]


class _Plan(NamedTuple):
    """How the tensors of a save are stored, as it follows from their names and forms. ``forms``: the tensors' forms; None if
    changes may go unnoticed. ``private``: names of tensors that are not shared. ``own``: names of parameters that DDP does not
    keep equal."""

    key: _Key
    forms: Forms | None
    names: Sequence[str]
    private: Sequence[str]
    own: Sequence[str]
    until: Mapping[str, Until]
    sizes: Sizes


def _plan(
    key: _Key, found: Mapping[str, Captured], tensors: Sequence[torch.Tensor], optimizers: Collection[Optimizer]
) -> _Plan:
    """Return the plan for ``tensors``: the parameters, then the tensors of the optimizers ``found``."""
    parameters = {f"{MODEL}/{name}": p for name, p in key.walk.named_parameters()}
    names = [*parameters]
    for captured in found.values():
        names += captured.shared
    moved = frozenset(id(p) for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad)
    until = {name: Until.STEP for name, p in parameters.items() if id(p) in moved}
    until |= dict.fromkeys(names[len(parameters) :], Until.STEP)
    own = sorted(name for name in parameters if name.removeprefix(f"{MODEL}/") not in key.replicated)
    private = own if key.equal else names
    apart = frozenset(private)
    sizes = [(n, t.numel(), t.element_size()) for n, t in zip(names, tensors, strict=True) if n not in apart]
    forms = Forms(tensors) if all(captured.is_change_detectable for captured in found.values()) else None
    return _Plan(key, forms, names, private, own, until, sizes)
