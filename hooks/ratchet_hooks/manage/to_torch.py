"""Convert a captured state into torch's own form, for users who continue with plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ratchet_hooks.algorithms import custom
from ratchet_hooks.algorithms.base import Setup
from ratchet_hooks.algorithms.half_precision_wrapper import DTYPES
from ratchet_hooks.algorithms.powersgd.batched import BatchedPowerSGD
from ratchet_hooks.algorithms.powersgd.low_rank import LowRank
from ratchet_hooks.algorithms.powersgd.powersgd import PowerSGD
from ratchet_hooks.algorithms.state_version import check_data
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec


def plain_state(
    spec: HookSpec,
    tensors: Mapping[str, torch.Tensor],
    data: JsonValue,
    parameters: Mapping[str, torch.Tensor],
) -> tuple[Any, dict[str, JsonValue]]:
    """Convert the result of ``ManagedHook.capture`` under ``spec`` into torch's own form. Returns ``(state, rest)``.

    ``state``: what torch's state object, or the user's own, saves; None for hooks without state. ``rest``: for post_localSGD the
    averager's settings and counters under the key ``averager``, else empty. ``parameters``: of the model by name. Raises
    ``HookStateError`` for a state that is malformed or does not fit.
    """
    checked = check_data(data, spec)
    state = checked["state"]
    if state is None:
        return None, {}
    if isinstance(spec, PowerSGDSpec | BatchedPowerSGDSpec):
        return _new_low_rank(spec, parameters).to_slots(tensors, state, checked["layout"]), {}
    if isinstance(spec, PostLocalSGDSpec) and isinstance(state, dict):
        return state.get("slots"), {"averager": state.get("averager")}
    if isinstance(spec, CustomSpec) and isinstance(state, dict):
        return custom.saved_state(tensors, state), {}
    raise HookStateError("state", f"hook {spec.name} keeps none, but one is recorded")


def _new_low_rank(spec: PowerSGDSpec | BatchedPowerSGDSpec, parameters: Mapping[str, torch.Tensor]) -> LowRank:
    """Return a PowerSGD hook as it is before its first step, without a process group."""
    cast = None if spec.wrapper is None else DTYPES[spec.wrapper]
    nobody: Any = None  # nothing is sent
    setup = Setup(nobody, parameters, torch.device("cpu"), 1, cast)
    return PowerSGD(spec, setup) if isinstance(spec, PowerSGDSpec) else BatchedPowerSGD(spec, setup)
