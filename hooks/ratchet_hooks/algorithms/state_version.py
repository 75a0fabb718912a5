"""Validation of captured states, and their redistribution to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ratchet_hooks.algorithms import custom
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.specs.hook_specs import CustomSpec, HookSpec
from ratchet_hooks.state.encode import Tensors

STATE_VERSION = 2
_APART = "these states do not belong to one checkpoint"


def check_data(recorded: JsonValue, spec: HookSpec) -> dict[str, Any]:
    """Return a copy of a captured state's JSON part. Raises ``HookStateError`` if it is malformed, of another format version, or
    of another hook or wrapper than ``spec``."""
    version = recorded.get("version") if isinstance(recorded, dict) else None
    if not isinstance(recorded, dict) or type(version) is not int or version < 1:
        raise HookStateError("version", "not a recorded hook state")
    if version != STATE_VERSION:
        raise HookStateError(
            "version", f"recorded in format {version}; this version of ratchet_hooks reads format {STATE_VERSION}"
        )
    data: dict[str, Any] = dict(recorded)
    for key, asked in (("hook", spec.name), ("wrapper", spec.wrapper)):
        if data.get(key) != asked:
            raise HookStateError(key, f"recorded under {data.get(key)!r}, but the requested {key} is {asked!r}")
    layout = data.get("layout")
    buckets = layout if isinstance(layout, list) else []
    if layout is not None and not (buckets and all(isinstance(b, list) and b for b in buckets)):
        raise HookStateError("layout", "malformed: expected a list of non-empty lists of parameter names")
    if not isinstance(data.get("iteration"), int) or "state" not in data:
        raise HookStateError("iteration", "missing from the recorded state")
    return data


def redistribute(
    states: Sequence[tuple[Mapping[str, torch.Tensor], JsonValue]], spec: HookSpec | None = None
) -> tuple[Tensors, JsonValue]:
    """Return one captured state for every rank of a new group. ``states``: those of all ranks of the old group, in rank order.
    Residuals become their mean; everything else must be equal on all ranks. A custom hook's state is merged by its class, which
    requires ``spec``. Raises ``HookStateError`` or ``CustomHookError``."""
    if not states:
        raise HookStateError("states", "at least one rank's state is needed")
    first, data = states[0]
    if isinstance(data, dict) and data.get("hook") == "custom":
        return _redistribute_custom(states, data, spec)
    out: Tensors = {}
    for rank, (tensors, other) in enumerate(states):
        if other != data:
            raise HookStateError(f"rank {rank}", f"the JSON part differs from rank 0's; {_APART}")
        if odd := set(tensors) ^ set(first):
            raise HookStateError(min(odd), f"not in the states of both rank 0 and rank {rank}")
    for name, tensor in first.items():
        parts = [tensors[name] for tensors, _ in states]
        if name.startswith(("residual/", "residual_padding/")):
            out[name] = torch.stack([p.double() for p in parts]).mean(0).to(tensor.dtype)
        elif all(same_bits(p, tensor) for p in parts):
            out[name] = tensor.clone()
        else:
            raise HookStateError(name, "differs between ranks, but must be equal on all of them")
    return out, data


def _redistribute_custom(
    states: Sequence[tuple[Mapping[str, torch.Tensor], JsonValue]], data: dict[str, JsonValue], spec: HookSpec | None
) -> tuple[Tensors, JsonValue]:
    """Return the merged state of a custom hook; its class merges the parts. Raises as ``redistribute`` does."""
    if not isinstance(spec, CustomSpec):
        raise HookStateError(
            "hook", "a custom state is redistributed by its class: pass the spec with which it was recorded"
        )
    parts = [(tensors, other.get("state") if isinstance(other, dict) else None) for tensors, other in states]
    for rank, (_, other) in enumerate(states):
        if not isinstance(other, dict) or {**other, "state": None} != {**data, "state": None}:
            raise HookStateError(f"rank {rank}", f"its hook or iteration differs from rank 0's; {_APART}")
    merged, state = custom.redistribute(spec, parts)
    return merged, {**data, "state": state}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the tensors have the same dtype, shape and bits: 0.0 differs from -0.0."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
