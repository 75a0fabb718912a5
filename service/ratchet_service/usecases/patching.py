"""A part of a spec merged over a stored one."""

from __future__ import annotations

from typing import Any

from ratchet_hooks.specs import normalise_hook


def merge(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386): null removes, mappings merge, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    out = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge(out.get(key), value)
    return out


def whole_hook(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A hook of another name is not merged over the parent's: their parameters have nothing to do with each other."""
    hook = normalise_hook(patch.get("hook"))
    if not isinstance(hook, dict) or hook.get("name", parent["name"]) == parent["name"]:
        return patch
    return patch | {"hook": {key: None for key in parent if key not in hook} | hook}
