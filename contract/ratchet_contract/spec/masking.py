"""Masks the values of the variables in ``secret_env``, in copies of a spec or an environment that may be shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

MASK: Final = "********"
"""Replaces a value; refused as the value of a variable in ``secret_env``, so that a job never gets it as a secret value."""


def masked(env: Mapping[str, str], secret: Collection[str]) -> dict[str, str]:
    """Return ``env`` with ``MASK`` as the value of every name in ``secret``."""
    return {name: MASK if name in secret else value for name, value in env.items()}


def masked_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored spec with the values of variables in ``secret_env`` masked."""
    return {**spec, "env": masked(spec.get("env", {}), spec.get("secret_env", ()))}
