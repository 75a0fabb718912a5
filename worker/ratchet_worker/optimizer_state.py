"""An optimizer's state by parameter name: tensors that are equal on all ranks apart from the rest.

``Optimizer.state_dict`` numbers parameters and ``load_state_dict`` casts floating-point state to the parameter's dtype. Both are
undone here: another order of parameters is noticed, and float32 momenta of bfloat16 parameters come back as float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks.codec import is_dense
from ratchet_worker.snapshot import Tensors

_SHARED: Final = "ratchet:shared"
"""Key of the mark that stands for a shared tensor; its value is the list of strides."""


def refuse_sharded(name: str, optimizer: Optimizer) -> None:
    """Raises ``UserError`` for an optimizer whose state is spread over the ranks in a way that is not stored yet."""
    # By name: importing torch.distributed.optim costs every rank a second at its start.
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise UserError(f"{name}: ZeroRedundancyOptimizer is not supported yet; use the optimizer that it wraps")


def capture(
    optimizer: Optimizer, component: str, names: dict[int, str], replicated: Collection[str]
) -> tuple[Tensors, Any]:
    """``(shared tensors, the rest)``. ``names``: parameter name by ``id``; ``replicated``: names of parameters that DDP keeps
    equal. The rest is a tree that ``ratchet_hooks.codec`` takes."""
    state = optimizer.state_dict()
    labels = list(_labels(optimizer, names))
    shared: Tensors = {}
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
        for key, value in values.items():
            if label in replicated and _plain(value) and isinstance(key, str):
                shared[f"{component}/{label}/{key}"] = value.detach()
                rest[key] = {_SHARED: list(value.stride())}
            else:
                rest[key] = value
        entries[label] = rest
    groups = [{**group, "params": [labels[i] for i in group["params"]]} for group in state["param_groups"]]
    extra = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    return shared, {"state": entries, "others": others, "param_groups": groups, "extra": extra}


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
    index = {label: i for i, label in enumerate(labels)}
    entries = {
        label: {k: _tensor(shared, f"{component}/{label}/{k}", v) for k, v in values.items()}
        for label, values in rest["state"].items()
    }
    groups = [{**group, "params": [index[label] for label in group["params"]]} for group in rest["param_groups"]]
    optimizer.load_state_dict(
        {
            "state": {index[n]: v for n, v in entries.items()} | rest["others"],
            "param_groups": groups,
            **rest["extra"],
        }
    )
    _undo_casts(optimizer, labels, entries)


def _tensor(shared: Tensors, name: str, value: Any) -> Any:
    """A shared tensor under its old strides (channels-last stays channels-last), or the value itself."""
    if not isinstance(value, dict) or list(value) != [_SHARED]:
        return value
    stored, stride = shared[name], value[_SHARED]
    if not is_dense(torch.empty_strided(stored.shape, stride, device="meta")):
        return stored
    return torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)


def _undo_casts(optimizer: Optimizer, labels: list[str], entries: dict[str, dict[str, Any]]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for label, parameter in zip(labels, parameters, strict=True):
        for key, value in entries.get(label, {}).items():
            there = optimizer.state[parameter].get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(there, torch.Tensor):
                continue
            if (there.dtype, there.stride()) != (value.dtype, value.stride()):
                optimizer.state[parameter][key] = value.to(there.device, copy=True)


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
