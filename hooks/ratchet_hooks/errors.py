"""Errors of the hook package. Torch-free."""

from __future__ import annotations


class HookStateError(ValueError):
    """A state that cannot be captured or restored. ``key`` is the full path of the offending entry."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key
        self.detail = detail


class LayoutMismatch(HookStateError):
    """The reducer's buckets are not the recorded ones, so restored state would meet the wrong gradients."""


class UnsupportedModel(ValueError):
    """A module or a DDP setting under which the hook asked for cannot work or cannot be resumed exactly."""


class CustomHookError(RuntimeError):
    """A user's own hook, or its state, that cannot be used. ``key`` is the key of the spec that it is about (hook, state,
    state_args), ``code`` a stable word; no retry heals it, except of ``hook-failed``, which the user's function raised."""

    def __init__(self, key: str, code: str, detail: str) -> None:
        super().__init__(detail)
        self.key = key
        self.code = code
        self.detail = detail
