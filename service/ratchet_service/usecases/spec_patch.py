"""Prepare a partial spec for merging over a stored one."""

from __future__ import annotations

from typing import Any

from ratchet_hooks.specs.hook_specs import normalise_hook


def complete_launcher_patch(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` with nulls for the keys of the parent's launcher, ``parent``, if the patch has a launcher of another kind.
    Merged over the parent's spec, such a launcher inherits none of these keys."""
    launcher = patch.get("launcher")
    if not isinstance(launcher, dict) or launcher.get("kind", parent["kind"]) == parent["kind"]:
        return patch
    return patch | {"launcher": {key: None for key in parent if key not in launcher} | launcher}


def complete_code_patch(patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` with nulls for digest and Git commit in its ``code``, if it has ``code`` that does not set them. Merged
    over the parent's spec, changed code then inherits neither the digest of uploaded code nor the Git commit."""
    code = patch.get("code")
    return patch | {"code": {"digest": None, "git": None} | code} if isinstance(code, dict) else patch


def complete_hook_patch(parent: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return ``patch`` with a hook that can be merged over the parent's hook, ``parent``; a patch without a hook is returned as
    it is. A plain name becomes a mapping with that name; so the parent's own name changes nothing. For a hook of another name,
    the parent's parameters become null, so that the new hook inherits none of them: they are unrelated."""
    hook = normalise_hook(patch.get("hook"))
    if not isinstance(hook, dict):
        return patch
    other = hook.get("name", parent["name"]) != parent["name"]
    return patch | {"hook": {key: None for key in parent if key not in hook} | hook if other else hook}
