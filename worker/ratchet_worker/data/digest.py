"""Digests that identify training data: computed over tensors, or returned by the data set's own method ``digest``."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the hex SHA-256 over names, dtypes, shapes and bytes of ``tensors``, sorted by name."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def dataset_digest(dataset: Any) -> str | None:
    """Return ``dataset.digest()`` as text, which must change whenever a sample changes; None if there is no such method."""
    method = getattr(dataset, "digest", None)
    # No digest is guessed: one over, say, the length alone would not show that files have changed.
    return None if method is None else str(method())
