"""Settings of torch under which the same inputs give the same bits: deterministic algorithms and the thread count. Environment
variables, such as ``CUBLAS_WORKSPACE_CONFIG``, are set by the agent that starts a rank, or by ``session.without_service``.

The thread count is set in every mode: it is part of a job's resources, and gradients of convolution, linear and LayerNorm
layers differ between 1 and 2 threads.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import torch

from ratchet_hooks.torch_compat import recompute_with_default_generators

Mode = Literal["strict", "warn", "off"]


def apply(mode: Mode, threads: int) -> None:
    """Set ``threads`` intra-op threads and one inter-op thread in torch, and have torch.compile use torch's default generators.
    Unless ``mode`` is ``off``, also set deterministic algorithms, those of cuDNN included.

    ``strict``: an operation without a deterministic implementation raises; ``warn``: it warns. Call it before torch does parallel
    work: the number of inter-op threads can be set only before that, and stays as it is otherwise, without an error.
    """
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
