"""Convert a recorded hook state for another hook, wrapper or parameter, as a ``HookChange`` of ``compatibility`` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ratchet_hooks.algorithms.half_precision_wrapper import DTYPES
from ratchet_hooks.algorithms.powersgd.state_by_name import HYPERPARAMETERS
from ratchet_hooks.algorithms.state_version import check_data
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.specs.compatibility import HookChange, keeps_factors, keeps_residuals
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.specs.registry import is_stateful
from ratchet_hooks.state.encode import Tensors, decode, encode

_FACTORS = ("p/", "q/")
_BY_BUCKET = ("residual_padding/", *_FACTORS)  # batched_powerSGD's


def convert_state(
    tensors: Mapping[str, torch.Tensor],
    data: JsonValue,
    change: HookChange,
    old: HookSpec,
    new: HookSpec,
    parameters: Mapping[str, torch.Tensor],
) -> tuple[Tensors, JsonValue]:
    """Return the captured state of hook ``old`` in the form that hook ``new`` restores; ``change`` is their ``hook_change``.
    Raises ``HookStateError`` if it cannot be carried over."""
    checked = check_data(data, old)
    if change.state == "lost" or (change.state == "none" and is_stateful(new)):
        raise HookStateError("hook", f"{change.description}: nothing recorded can be carried over; reset the hook")
    out: Tensors = dict(tensors)
    state: JsonValue = checked["state"]
    if isinstance(old, PowerSGDSpec | BatchedPowerSGDSpec) and isinstance(new, PowerSGDSpec | BatchedPowerSGDSpec):
        out, state = _convert_low_rank(out, state, old, new)
        if old.wrapper != new.wrapper:
            owners = {
                str(i): bucket[0] for i, bucket in enumerate(checked["layout"] or [])
            }  # for a square: any parameter of its bucket
            out = {name: _cast(name, tensor, new, parameters, owners) for name, tensor in out.items()}
    elif isinstance(new, PostLocalSGDSpec):
        state = _convert_local_sgd(state, new, checked["iteration"], replicas_kept=not change.averages)
    return out, {**checked, "hook": new.name, "wrapper": new.wrapper, "state": state}


def _convert_low_rank(
    tensors: Tensors, state: JsonValue, old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec
) -> tuple[Tensors, JsonValue]:
    """Return the state of PowerSGD hook ``old`` in the form of ``new``. Residuals, P and Q may be dropped."""
    assert isinstance(state, dict)
    kept = dict(tensors)
    facts: dict[str, JsonValue] = dict(state)
    if not keeps_factors(old, new):
        facts["low_rank"] = False
        kept = {name: t for name, t in kept.items() if not name.startswith(_FACTORS)}
    if not keeps_residuals(old, new):
        facts["residuals"] = False
        kept = {name: t for name, t in kept.items() if not name.startswith("residual")}
    if old.name != new.name:
        # Nothing of the squares is kept; the content of their padding never reached a parameter.
        kept = {name: t for name, t in kept.items() if not name.startswith(_BY_BUCKET)}
        facts.pop("buckets", None)
        if isinstance(new, BatchedPowerSGDSpec):
            facts["buckets"] = []  # other squares than the recorded ones: zero padding, P and Q are drawn again
    rest = {name.removeprefix("state/"): t for name, t in kept.items() if name.startswith("state/")}
    slots: Any = decode(rest, facts.get("slots"))
    if not isinstance(slots, dict):
        raise HookStateError("state.slots", "missing from the recorded state")
    asked = {"batch_tensors_with_same_shape": False} | new.values()
    slots |= {key: asked[key] for key in HYPERPARAMETERS}
    encoded, facts["slots"] = encode(slots, root="state")
    others = {name: t for name, t in kept.items() if not name.startswith("state/")}
    return others | {f"state/{name}": t for name, t in encoded.items()}, facts


def _cast(
    name: str, tensor: torch.Tensor, new: HookSpec, parameters: Mapping[str, torch.Tensor], owners: Mapping[str, str]
) -> torch.Tensor:
    """Return a residual, its padding, P or Q in the dtype that ``new`` uses; any other tensor unchanged. ``owners``: for each
    bucket index, the name of a parameter in that bucket. Raises ``HookStateError`` if the model lacks the parameter or a value
    overflows."""
    kind, _, owner = name.partition("/")
    if kind not in ("residual", "residual_padding", "p", "q"):
        return tensor
    parameter = owner if owner in parameters else owners.get(owner, "")
    if parameter not in parameters:
        raise HookStateError(name, "recorded, but the model has no parameter for it")
    out = tensor.to(parameters[parameter].dtype if new.wrapper is None else DTYPES[new.wrapper])
    if not bool(torch.isfinite(out).all()) and bool(torch.isfinite(tensor).all()):
        raise HookStateError(
            name,
            f"its largest value, {float(tensor.abs().max()):.3g}, overflows {out.dtype}: set on_hook_mismatch: reset",
        )
    return out


def _convert_local_sgd(state: JsonValue, new: PostLocalSGDSpec, iteration: int, *, replicas_kept: bool) -> JsonValue:
    """Return the recorded state of post_localSGD with the settings of ``new``. ``iteration``: the job's iterations so far. Raises
    ``HookStateError``."""
    recorded: Any = state if isinstance(state, dict) else {}
    slots, averager = recorded.get("slots"), recorded.get("averager")
    if not isinstance(slots, dict) or not isinstance(averager, dict) or type(slots.get("iter")) is not int:
        raise HookStateError("state", "not a recorded state of post_localSGD")
    slots = slots | {
        "iter": min(iteration, new.start_localSGD_iter),  # torch stops counting at the old start
        "start_localSGD_iter": new.start_localSGD_iter,
        "post_local_gradient_allreduce": new.post_local_gradient_allreduce,
    }
    levels = new.period_group_size_dict
    warm_up = averager.get("warm_up")
    if slots["iter"] < new.start_localSGD_iter:
        warm_up = None
    elif warm_up is None:
        warm_up = averager.get("step")
    averager = averager | {
        "subgroup_size": new.subgroup_size,
        "period": new.period,
        "levels": None if levels is None else [[period, size] for period, size in sorted(levels.items())],
        "warm_up": warm_up,
    }
    # where the ranks' parameters stay as they are, a restore requires the recorded subgroups
    kept = {"subgroup": recorded["subgroup"]} if replicas_kept and "subgroup" in recorded else {}
    return {"slots": slots, "averager": averager, **kept}
