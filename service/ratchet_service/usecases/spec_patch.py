"""Prepare a partial spec for merging over a stored one."""

from __future__ import annotations

from typing import Any

from ratchet_hooks.specs.hook_specs import normalise_hook


def complete_launcher_patch(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` ready to be merged over a stored spec: a launcher of another kind inherits no key of ``parent``."""
    launcher = patch.get("launcher")
    if not isinstance(launcher, dict) or launcher.get("kind", parent["kind"]) == parent["kind"]:
        return patch
    return patch | {"launcher": {key: None for key in parent if key not in launcher} | launcher}


def complete_code_patch(patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` ready to be merged over a stored spec: changed code inherits neither digest nor Git commit."""
    code = patch.get("code")
    return patch | {"code": {"digest": None, "git": None} | code} if isinstance(code, dict) else patch


def complete_hook_patch(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` ready to be merged over a stored spec: a hook of another name inherits no parameter of ``parent``."""
    hook = normalise_hook(patch.get("hook"))
    if not isinstance(hook, dict):
        return patch
    other = hook.get("name", parent["name"]) != parent["name"]
    return patch | {"hook": {key: None for key in parent if key not in hook} | hook if other else hook}
