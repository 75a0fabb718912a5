"""What the ranks have in common: the model's parameters and the optimizers' tensors of them, as views for a snapshot.

The views hold the memory: code that gives a parameter other memory (``parameter.data = ...``) while a copy is made changes what
the next save has, not this one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ratchet_worker import model_state
from ratchet_worker.model_state import MODEL
from ratchet_worker.optimizer_state import Capture, Captured
from ratchet_worker.snapshot import Sizes, Snapshot, Tensors, Until
from ratchet_worker.walk import Walk


class EqualState:
    """From save to save these are mostly the very same tensors: what follows from their names and shapes is then what it was."""

    def __init__(self) -> None:
        self._captures: dict[str, Capture] = {}
        self._plan: _Plan | None = None

    def capture(self, out: Snapshot, walk: Walk, optimizers: Mapping[str, Optimizer], equal: bool) -> None:
        """Add them to ``out``: as shared tensors where the replicas are ``equal`` and DDP keeps a parameter so."""
        names = walk.derived("names by id", lambda: {id(p): name for name, p in walk.named_parameters()})
        replicated = model_state.replicated(walk)
        found = {c: self._capture_of(c, o).of(names, replicated) for c, o in optimizers.items()}
        parameters = [*walk.parameters()]
        key = _key(parameters, optimizers, replicated, found, equal)
        plan = self._plan
        if plan is None or plan.walk is not walk or plan.key != key:
            plan = self._plan = _plan(walk, key, replicated, found)
        tensors: Tensors = dict(zip(plan.parameters, parameters, strict=True))
        for component, captured in found.items():
            tensors |= captured.shared
            out.add(component, captured.rest)
        if plan.private:
            out.private |= _views({name: tensors.pop(name) for name in plan.private})
        out.shared, out.state[MODEL] = _views(tensors), [*plan.own]
        out.until |= plan.until
        out.known_sizes = plan.sizes

    def _capture_of(self, component: str, optimizer: Optimizer) -> Capture:
        known = self._captures.get(component)
        if known is None or known.optimizer is not optimizer:
            known = self._captures[component] = Capture(optimizer, component)
        return known


def _views(tensors: Tensors) -> Tensors:
    return dict(zip(tensors, map(torch.Tensor.detach, tensors.values()), strict=True))


class _Plan(NamedTuple):
    """``walk`` and ``key``: what the rest follows from. ``parameters``: their names in a snapshot; ``private``: names of all that
    the ranks do not share, ``own``: of the parameters that DDP does not keep equal; ``sizes``: of the shared tensors."""

    walk: Walk
    key: _Key
    parameters: list[str]
    private: list[str]
    own: list[str]
    until: dict[str, Until]
    sizes: Sizes


class _Key(NamedTuple):
    equal: bool
    replicated: Collection[str]
    optimizers: list[object]
    moved: list[int]
    forms: list[tuple[type, torch.dtype, torch.Size]]


def _key(
    parameters: list[nn.Parameter], optimizers: Mapping[str, Optimizer], replicated: Collection[str],
    found: Mapping[str, Captured], equal: bool,
) -> _Key:  # fmt: skip
    moved = [id(p) for o in optimizers.values() for g in o.param_groups for p in g["params"] if p.requires_grad]
    forms = [(type(p), p.dtype, p.shape) for p in parameters]
    return _Key(equal, replicated, [captured.form for captured in found.values()], moved, forms)


def _plan(walk: Walk, key: _Key, replicated: Collection[str], found: Mapping[str, Captured]) -> _Plan:
    names = {f"{MODEL}/{name}": p for name, p in walk.named_parameters()}
    moved = frozenset(key.moved)
    until = {name: Until.STEP for name, p in names.items() if id(p) in moved}
    own = sorted(name for name in names if name.removeprefix(f"{MODEL}/") not in replicated)
    tensors: dict[str, Any] = {**names}
    for captured in found.values():
        tensors |= captured.shared
        until |= dict.fromkeys(captured.shared, Until.STEP)
    private = own if key.equal else [*tensors]
    apart = frozenset(private)
    sizes = [(name, t.numel(), t.element_size()) for name, t in tensors.items() if name not in apart]
    return _Plan(walk, key, [*names], private, own, until, sizes)
