"""Prepare a partial spec for merging over a stored one."""

from __future__ import annotations

from typing import Any

from ratchet_hooks.specs.hook_specs import normalise_hook


def complete_launcher_patch(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` ready to be merged over a stored spec whose launcher is ``parent``. If the patch has a launcher of another
    kind, all keys of ``parent`` that it does not set become null in it, so that the merged launcher inherits none of them.
    Otherwise ``patch`` is returned as it is."""
    launcher = patch.get("launcher")
    if not isinstance(launcher, dict) or launcher.get("kind", parent["kind"]) == parent["kind"]:
        return patch
    return patch | {"launcher": {key: None for key in parent if key not in launcher} | launcher}


def complete_code_patch(patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` ready to be merged over a stored spec. If the patch has ``code``, its keys ``digest`` and ``git`` become
    null unless it sets them, so that changed code inherits neither the digest of uploaded code nor the Git commit. Otherwise
    ``patch`` is returned as it is."""
    code = patch.get("code")
    return patch | {"code": {"digest": None, "git": None} | code} if isinstance(code, dict) else patch


def complete_hook_patch(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` ready to be merged over a stored spec whose hook is ``parent``. A hook that is a plain name becomes a
    mapping with that name. If the patch has a hook of another name, all keys of ``parent`` that it does not set become null in
    it, so that the new hook inherits no parameter; a hook of the same name keeps the parent's parameters. A patch without a hook
    is returned as it is."""
    hook = normalise_hook(patch.get("hook"))
    if not isinstance(hook, dict):
        return patch
    other = hook.get("name", parent["name"]) != parent["name"]
    return patch | {"hook": {key: None for key in parent if key not in hook} | hook if other else hook}
