"""What a spec looks like to others than the ranks: the values of the variables that it calls secret are masked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

MASK: Final = "********"
"""In the place of a value; refused as one (``spec``), so that a spec that was read back is never run with it."""


def masked(env: Mapping[str, str], secret: Collection[str]) -> dict[str, str]:
    """``env`` without the values of the names in ``secret``."""
    return {name: MASK if name in secret else value for name, value in env.items()}


def masked_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A stored spec as it may be shown. Specs from before there was ``secret_env`` have none."""
    return {**spec, "env": masked(spec.get("env", {}), spec.get("secret_env", ()))}
