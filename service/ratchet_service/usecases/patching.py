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
    """``patch`` with a hook that can be merged over the parent's, ``parent``. A name alone stands for a mapping with that name,
    so the parent's own name changes nothing. A hook of another name takes none of the parent's parameters: they have nothing to
    do with each other."""
    hook = normalise_hook(patch.get("hook"))
    if not isinstance(hook, dict):
        return patch
    other = hook.get("name", parent["name"]) != parent["name"]
    return patch | {"hook": {key: None for key in parent if key not in hook} | hook if other else hook}
