"""What a hook cannot work with, refused before it has cost anybody a step."""

from __future__ import annotations

import sys

import torch

from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.specs import HookSpec


def one_device(module: torch.nn.Module) -> None:
    """Raise ``UnsupportedModel`` for parameters on several devices, naming two: a rank has one."""
    first = next(module.named_parameters(), None)
    for name, parameter in module.named_parameters():
        assert first is not None
        if parameter.device != first[1].device:
            raise UnsupportedModel(
                f"{first[0]} is on {first[1].device} and {name} on {parameter.device}: a rank trains on one device; move the "
                "module to it, and take more ranks for more devices"
            )


def no_apex(spec: HookSpec) -> None:
    """Raise ``UnsupportedModel`` where Apex AMP is at work under PowerSGD: it hands the hook scaled half-precision gradients, and
    scales again behind it, past the residuals.

    ``apex.amp.initialize`` leaves its options in ``apex.amp._amp_state``; Apex need not be installed for this to look there.
    """
    if spec.name not in ("powerSGD", "batched_powerSGD"):
        return
    state = getattr(sys.modules.get("apex.amp._amp_state"), "_amp_state", None)
    if getattr(getattr(state, "opt_properties", None), "enabled", False):
        raise UnsupportedModel(
            f"apex.amp is active, under which {spec.name} overflows and keeps residuals of another loss scale; use torch.amp "
            "(autocast and GradScaler) with parameters in float32"
        )
