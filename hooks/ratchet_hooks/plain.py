"""A captured state as torch itself would hand it out: the dict of ``__getstate__``, per bucket index, outside any process group.

For people who go on with plain PyTorch, where a state belongs to one DDP with the recorded buckets in the recorded order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ratchet_hooks import custom, powersgd
from ratchet_hooks.algorithm import Setup
from ratchet_hooks.batched_low_rank import BatchedPowerSGD
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.low_rank import LowRank, PowerSGD
from ratchet_hooks.specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.states import check_data
from ratchet_hooks.wrappers import DTYPES


def plain_state(
    spec: HookSpec,
    tensors: Mapping[str, torch.Tensor],
    data: JsonValue,
    parameters: Mapping[str, torch.Tensor],
) -> tuple[Any, dict[str, JsonValue]]:
    """``(state, rest)`` of what ``ManagedHook.capture`` gave under ``spec``.

    ``state``: for powerSGD and batched_powerSGD what ``PowerSGDState.__getstate__`` gives, for post_localSGD the slots of
    ``PostLocalSGDState`` but its groups, for a user's own what its class had saved; None for hooks without state. ``rest``: what
    is kept beside it (the averager's step). ``parameters``: of the model by name; shapes, strides and dtypes are looked at, no
    elements. Raises ``HookStateError`` for a state that is not one of ``spec`` and these parameters.
    """
    checked = check_data(data, spec)
    state = checked["state"]
    if state is None:
        return None, {}
    if isinstance(spec, PowerSGDSpec | BatchedPowerSGDSpec):
        shelf = _low_rank(spec, parameters)
        return powersgd.laid_out(shelf.state, tensors, state, checked["layout"], shelf), {}
    if isinstance(spec, PostLocalSGDSpec) and isinstance(state, dict):
        return state.get("slots"), {"averager": state.get("averager")}
    if isinstance(spec, CustomSpec) and isinstance(state, dict):
        return custom.saved_state(tensors, state), {}
    raise HookStateError("state", f"hook {spec.name} keeps none, but one is recorded")


def _low_rank(spec: PowerSGDSpec | BatchedPowerSGDSpec, parameters: Mapping[str, torch.Tensor]) -> LowRank:
    """The hook as it is before its first step, for a group that is not there."""
    cast = None if spec.wrapper is None else DTYPES[spec.wrapper]
    nobody: Any = None  # nothing is sent
    setup = Setup(nobody, parameters, torch.device("cpu"), 1, cast)
    return PowerSGD(spec, setup) if isinstance(spec, PowerSGDSpec) else BatchedPowerSGD(spec, setup)
