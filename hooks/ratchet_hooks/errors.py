"""Errors of the hook package, and advice on errors of torch. Torch-free."""

from __future__ import annotations

_DETACHED_VIEW = "Can't detach views in-place"


class HookStateError(ValueError):
    """A state cannot be captured, stored, read, converted or restored. ``key``: what is at fault, such as an entry or a file."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"{key}: {detail}")
        self.key = key
        self.detail = detail


class LayoutMismatch(HookStateError):
    """The reducer's buckets are not the expected ones, such as those of a recorded state: state would be applied to the wrong
    gradients."""


class UnsupportedModel(ValueError):
    """A model, DDP, hook or wrapper cannot be managed as it is, or a managed hook is needed and none is registered."""


class CustomHookError(RuntimeError):
    """A user's own hook or its state cannot be used, or has failed. ``key``: the spec's key at fault; ``code``: a stable
    identifier."""

    def __init__(self, key: str, code: str, detail: str) -> None:
        super().__init__(detail)
        self.key = key
        self.code = code
        self.detail = detail


_SPARSE = "Cannot access storage of SparseTensorImpl"


def advice_on(error: BaseException) -> str | None:
    """Return advice for the user on an error that torch raised under DDP; None if there is none."""
    if isinstance(error, RuntimeError) and _DETACHED_VIEW in str(error):
        return (
            "under gradient_as_bucket_view gradients are views of DDP's buckets, and detach_() cannot take those out of their "
            "graph: where the code does p.grad.detach_() and p.grad.zero_(), call optimizer.zero_grad(), or "
            "model.zero_grad(set_to_none=True), instead; or set gradient_as_bucket_view to false"
        )
    if isinstance(error, NotImplementedError) and _SPARSE in str(error):
        return "a gradient is sparse, and DDP's buckets are dense: give sparse=False to the embedding, functional ones included"
    return None
