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
