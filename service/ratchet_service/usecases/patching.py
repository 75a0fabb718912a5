"""A part of a spec merged over a stored one."""

from __future__ import annotations

from typing import Any

from ratchet_hooks.specs import normalise_hook


def whole_launcher(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Likewise with a launcher: one of another kind takes none of the parent's keys."""
    launcher = patch.get("launcher")
    if not isinstance(launcher, dict) or launcher.get("kind", parent["kind"]) == parent["kind"]:
        return patch
    return patch | {"launcher": {key: None for key in parent if key not in launcher} | launcher}


def whole_code(patch: dict[str, Any]) -> dict[str, Any]:
    """Likewise with the code: another directory is not what was once sent, nor of its commit."""
    code = patch.get("code")
    return patch | {"code": {"digest": None, "git": None} | code} if isinstance(code, dict) else patch


def whole_hook(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """``patch`` with a hook that can be merged over the parent's, ``parent``. A name alone stands for a mapping with that name,
    so the parent's own name changes nothing. A hook of another name takes none of the parent's parameters: they have nothing to
    do with each other."""
    hook = normalise_hook(patch.get("hook"))
    if not isinstance(hook, dict):
        return patch
    other = hook.get("name", parent["name"]) != parent["name"]
    return patch | {"hook": {key: None for key in parent if key not in hook} | hook if other else hook}
