"""Errors of the hook package, and advice on errors of torch. Torch-free."""

from __future__ import annotations

_DETACHED_VIEW = "Can't detach views in-place"


class HookStateError(ValueError):
    """A state cannot be captured, stored, read, converted or restored. ``key``: the full path of the entry at fault, or another
    name for what is at fault, such as a file or a rank; ``detail``: what is wrong with it."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key
        self.detail = detail


class LayoutMismatch(HookStateError):
    """The reducer's buckets are not the recorded ones, so restored state would be applied to the wrong gradients."""


class UnsupportedModel(ValueError):
    """A model, a DDP setting, or a requested hook, state or wrapper is not supported: the hook cannot work with it, or cannot be
    resumed exactly. Also raised where a managed hook is needed and none is registered."""


class CustomHookError(RuntimeError):
    """A user's own hook or its state cannot be used. ``key``: the key of the spec at fault (hook, state, state_args);
    ``code``: a stable identifier. A retry does not help, except for ``hook-failed``: the user's function raised."""

    def __init__(self, key: str, code: str, detail: str) -> None:
        super().__init__(detail)
        self.key = key
        self.code = code
        self.detail = detail


_SPARSE = "Cannot access storage of SparseTensorImpl"


def advice_on(error: BaseException) -> str | None:
    """Return advice for the user on an error that torch raised under DDP; None for an error without advice here. There is
    advice on two errors: ``detach_()`` of a gradient under ``gradient_as_bucket_view``, and a sparse gradient."""
    if isinstance(error, RuntimeError) and _DETACHED_VIEW in str(error):
        return (
            "under gradient_as_bucket_view gradients are views of DDP's buckets, and detach_() cannot take those out of their "
            "graph: where the code does p.grad.detach_() and p.grad.zero_(), call optimizer.zero_grad(), or "
            "model.zero_grad(set_to_none=True), instead; or set gradient_as_bucket_view to false"
        )
    if isinstance(error, NotImplementedError) and _SPARSE in str(error):
        return "a gradient is sparse, and DDP's buckets are dense: give sparse=False to the embedding, functional ones included"
    return None
