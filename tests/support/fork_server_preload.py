"""What the ranks of ``tests.support.gloo_ranks`` are forked with. Only their fork server imports this."""

from __future__ import annotations

import gc

from ratchet_worker.host.cpu import gc_disabled

with gc_disabled():
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel

gc.freeze()  # no rank's collections look through it

__all__ = ["torch"]
