"""What the ranks of ``tests.support.groups`` are forked with. Only their fork server imports this."""

from __future__ import annotations

import gc

from ratchet_worker.imports import uncollected

with uncollected():
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel

gc.freeze()  # no rank's collections look through it

__all__ = ["torch"]
