"""Settings of torch under which the same inputs give the same bits: deterministic algorithms and the thread count."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import torch

from ratchet_hooks.torch_compat import recompute_with_default_generators

Mode = Literal["strict", "warn", "off"]


def apply(mode: Mode, threads: int) -> None:
    """Set ``threads`` intra-op threads, one inter-op thread and, unless ``mode`` is ``off``, deterministic algorithms. Call it
    before torch does parallel work."""
    # In every mode: gradients of convolution, linear and LayerNorm layers differ between 1 and 2 threads.
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        with suppress(RuntimeError):  # too late in this process; a resume compares the number, among other facts
            torch.set_num_interop_threads(1)
    recompute_with_default_generators()
    if mode == "off":
        return
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
