"""Checks for models and packages that a hook cannot work with."""

from __future__ import annotations

import sys

import torch

from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.specs.hook_specs import HookSpec


def check_one_device(module: torch.nn.Module) -> None:
    """Raise ``UnsupportedModel`` if the module's parameters are on several devices."""
    first = next(module.named_parameters(), None)
    for name, parameter in module.named_parameters():
        assert first is not None
        if parameter.device != first[1].device:
            raise UnsupportedModel(
                f"{first[0]} is on {first[1].device} and {name} on {parameter.device}: a rank trains on one device; move the "
                "module to it, and use more ranks for more devices"
            )


def check_no_apex(spec: HookSpec) -> None:
    """Raise ``UnsupportedModel`` if Apex AMP is active and ``spec`` is a PowerSGD hook."""
    if spec.name not in ("powerSGD", "batched_powerSGD"):
        return
    state = getattr(sys.modules.get("apex.amp._amp_state"), "_amp_state", None)
    if getattr(getattr(state, "opt_properties", None), "enabled", False):
        raise UnsupportedModel(
            f"apex.amp is active, under which {spec.name} overflows and keeps residuals of another loss scale; use torch.amp "
            "(autocast and GradScaler) with parameters in float32"
        )
