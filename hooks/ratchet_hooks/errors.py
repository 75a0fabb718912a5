"""Errors of the hook package, and what helps against one of torch's. Torch-free."""

from __future__ import annotations

_DETACHED_VIEW = "Can't detach views in-place"


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


_SPARSE = "Cannot access storage of SparseTensorImpl"


def advice_on(error: BaseException) -> str | None:
    """What the user can do against an error of torch's that comes of DDP's settings; None for any other error."""
    if isinstance(error, RuntimeError) and _DETACHED_VIEW in str(error):
        return (
            "under gradient_as_bucket_view gradients are views of DDP's buckets, and detach_() cannot take those out of their "
            "graph: where the code does p.grad.detach_() and p.grad.zero_(), call optimizer.zero_grad(), or "
            "model.zero_grad(set_to_none=True), instead; or set gradient_as_bucket_view to false"
        )
    if isinstance(error, NotImplementedError) and _SPARSE in str(error):
        return "a gradient is sparse, and DDP's buckets are dense: give sparse=False to the embedding, functional ones included"
    return None
