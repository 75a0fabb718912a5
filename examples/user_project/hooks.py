"""This project's own hooks. Ratchet has a package for communication hooks too; the names do not meet."""

from __future__ import annotations

import torch
from torch import nn


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale the averaged gradients down to an L2 norm of at most ``max_norm``."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
