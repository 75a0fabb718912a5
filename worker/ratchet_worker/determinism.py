"""Settings under which the same inputs give the same bits: algorithms, libraries, thread count.

The thread count is set in every mode: it is part of a job's resources, and 1 thread against 2 changes convolution, linear
and LayerNorm gradients.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import torch

from ratchet_hooks.torch_compat import recompute_with_default_generators

Mode = Literal["strict", "warn", "off"]


def apply(mode: Mode, threads: int) -> None:
    """Fix ``threads`` intra-op threads (one inter-op) and, unless ``mode`` is off, deterministic algorithms.

    ``strict``: an operation without a deterministic implementation raises; ``warn``: it warns. Must run before torch has
    done parallel work, because the number of inter-op threads can be set only once; behind it that number stays.
    """
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        with suppress(RuntimeError):  # too late in this process; the number is among the facts that a resume compares
            torch.set_num_interop_threads(1)
    recompute_with_default_generators()
    if mode == "off":
        return
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
