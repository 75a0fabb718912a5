"""Settings under which the same inputs give the same bits: algorithms, libraries, thread count.

The thread count is set in every mode: it is part of a job's resources, and 1 thread against 2 changes convolution, linear
and LayerNorm gradients.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

Mode = Literal["strict", "warn", "off"]

_CUBLAS_WORKSPACE = ":4096:8"  # https://docs.nvidia.com/cuda/cublas/#results-reproducibility


def set_library_variables(mode: Mode) -> None:
    """Variables that libraries read when they are first used; call before anything touches CUDA. A user's own value stays."""
    if mode != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # no choice of kernels by a stop watch


def apply(mode: Mode, threads: int) -> None:
    """Fix ``threads`` intra-op threads (one inter-op) and, unless ``mode`` is off, deterministic algorithms.

    ``strict``: an operation without a deterministic implementation raises; ``warn``: it warns. Must run before torch has
    done parallel work, because the number of inter-op threads can be set only once.
    """
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    if mode == "off":
        return
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
