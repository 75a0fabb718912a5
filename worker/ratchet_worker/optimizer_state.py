"""An optimizer's state by parameter name: tensors that are equal on all ranks apart from the rest.

``Optimizer.state_dict`` numbers parameters and ``load_state_dict`` casts floating-point state to the parameter's dtype. Both are
undone here: another order of parameters is noticed, and float32 momenta of bfloat16 parameters come back as float32.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks.codec import is_dense
from ratchet_worker.snapshot import Tensors

_SHARED: Final = "ratchet:shared"
"""In format 1 the key of the mark that stands for a shared tensor; its value is the list of strides."""


def refuse_sharded(name: str, optimizer: Optimizer) -> None:
    """Raises ``UserError`` for an optimizer, or one in it, whose state is spread over the ranks in a way that is not stored."""
    # By name: importing torch.distributed.optim costs every rank a second at its start.
    kinds = {kind.__name__ for part in (optimizer, *vars(optimizer).values()) for kind in type(part).__mro__}
    if "ZeroRedundancyOptimizer" in kinds:
        raise UserError(
            f"{name}: ZeroRedundancyOptimizer keeps each part of the state on one rank only, which is not supported; use the "
            "optimizer that it wraps"
        )


def capture(
    optimizer: Optimizer, component: str, names: dict[int, str], replicated: Collection[str]
) -> tuple[Tensors, Any]:
    """``(shared tensors, the rest)``. ``names``: parameter name by ``id``; ``replicated``: names of parameters that DDP keeps
    equal. The rest is a tree that ``ratchet_hooks.codec`` takes. Its ``keys`` are JSON text, not a tree, since there is one for
    every tensor, and training waits: pairs of a parameter's name and its keys, each with a shared tensor's strides or null."""
    state = optimizer.state_dict()
    labels, replicated = list(_labels(optimizer, names)), frozenset(replicated)
    shared: Tensors = {}
    keys: list[tuple[str, list[tuple[Any, Any]]]] = []
    entries: dict[str, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    for index, values in state["state"].items():
        if not isinstance(index, int):  # not of a parameter: state_dict lets such keys pass as they are
            others[index] = values
            continue
        label = labels[index]
        if not isinstance(values, dict):
            raise StateError(f"{component}: the state of {label} is a {type(values).__name__}, not a dict")
        rest: dict[str, Any] = {}
        listed: list[tuple[Any, Any]] = []
        equal = label in replicated and all(isinstance(key, str) for key in values)
        for key, value in values.items():
            if equal and _plain(value):
                shared[f"{component}/{label}/{key}"] = value.detach()
                listed.append((key, value.stride()))
            else:
                rest[key] = value
                listed.append((key, None))
        if equal:
            keys.append((label, listed))
        if rest or not equal:
            entries[label] = rest
    groups = [{**group, "params": [labels[i] for i in group["params"]]} for group in state["param_groups"]]
    extra = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    text = json.dumps(keys, separators=(",", ":"))
    return shared, {"keys": text, "state": entries, "others": others, "param_groups": groups, "extra": extra}


def is_captured(rest: Any) -> bool:
    """Is that what ``capture`` makes, in this format or the one before, rather than some object's own state?"""
    return isinstance(rest, dict) and set(rest) - {"keys"} == {"state", "others", "param_groups", "extra"}


def restore(optimizer: Optimizer, component: str, names: dict[int, str], shared: Tensors, rest: Any) -> None:
    """Inverse of ``capture``. Raises ``StateError`` when the optimizer has other parameters or groups than the recorded one."""
    labels = list(_labels(optimizer, names))
    recorded = [label for group in rest["param_groups"] for label in group["params"]]
    if sorted(recorded) != sorted(labels):
        odd = sorted(set(recorded) ^ set(labels))
        raise StateError(
            f"{component}: it has other parameters than the recorded one: {', '.join(odd[:3]) or 'in number'}"
        )
    sizes = [[len(g["params"]) for g in groups] for groups in (rest["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1] or recorded != labels:
        raise StateError(f"{component}: its parameter groups hold other parameters than the recorded ones")
    entries = _entries(component, shared, rest)
    optimizer.load_state_dict(_numbered(entries, rest))
    _undo_casts(optimizer, labels, entries)


def as_state_dict(component: str, shared: Tensors, rest: Any) -> dict[str, Any]:
    """What ``Optimizer.state_dict`` had given, out of what ``capture`` made of it: parameters by number again."""
    return _numbered(_entries(component, shared, rest), rest)


def _numbered(entries: dict[str, dict[str, Any]], rest: Any) -> dict[str, Any]:
    index = {label: i for i, label in enumerate(label for group in rest["param_groups"] for label in group["params"])}
    groups = [{**group, "params": [index[label] for label in group["params"]]} for group in rest["param_groups"]]
    state = {index[label]: values for label, values in entries.items()} | rest["others"]
    return {"state": state, "param_groups": groups, **rest["extra"]}


def _entries(component: str, shared: Tensors, rest: Any) -> dict[str, dict[str, Any]]:
    own = rest["state"]
    if "keys" not in rest:  # format 1
        return {
            label: {k: _tensor(shared, f"{component}/{label}/{k}", v) for k, v in values.items()}
            for label, values in own.items()
        }
    equal = {
        label: {
            key: own[label][key] if stride is None else _strided(shared[f"{component}/{label}/{key}"], stride)
            for key, stride in keys
        }
        for label, keys in json.loads(rest["keys"])
    }
    return equal | {label: values for label, values in own.items() if label not in equal}


def _tensor(shared: Tensors, name: str, value: Any) -> Any:
    if not isinstance(value, dict) or list(value) != [_SHARED]:
        return value
    return _strided(shared[name], value[_SHARED])


def _strided(stored: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A shared tensor under its old strides: channels-last stays channels-last."""
    if not is_dense(torch.empty_strided(stored.shape, stride, device="meta")):
        return stored
    return torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)


def _undo_casts(optimizer: Optimizer, labels: list[str], entries: dict[str, dict[str, Any]]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for label, parameter in zip(labels, parameters, strict=True):
        for key, value in entries.get(label, {}).items():
            if key in optimizer.state[parameter]:
                optimizer.state[parameter][key] = _as_recorded(value, optimizer.state[parameter][key])


def _as_recorded(value: Any, there: Any) -> Any:
    """What ``load_state_dict`` made of ``value``, with every tensor's recorded dtype and strides, on the device it chose."""
    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
        same = (there.dtype, there.stride()) == (value.dtype, value.stride())
        return there if same else value.to(there.device, copy=True)
    if isinstance(value, dict) and isinstance(there, dict):
        return {key: _as_recorded(item, there[key]) for key, item in value.items()}
    if type(value) in (list, tuple) and isinstance(there, list | tuple):
        return type(value)(_as_recorded(item, other) for item, other in zip(value, there, strict=True))
    return there


def _labels(optimizer: Optimizer, names: dict[int, str]) -> Iterator[str]:
    """One label per parameter in the order that ``state_dict`` numbers them; those outside the model by number."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        yield names.get(id(parameter), f"#{number}")


def _plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.dtype.is_complex
    )
