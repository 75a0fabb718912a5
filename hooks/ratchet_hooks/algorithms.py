"""The arithmetic of the plain hooks: torch's own functions, guarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.algorithm import Algorithm, Setup, TensorFuture
from ratchet_hooks.specs import AllreduceSpec, Fp16CompressSpec

_FP16_ROUNDS_TO_INF = 65520.0  # halfway between 65504, the largest finite float16, and 65536


class Allreduce(Algorithm):
    """One all-reduce per bucket: the bits of DDP without a hook, which multiplies by 1 / ranks where torch's ``allreduce_hook``
    divides by ranks (other bits when the number of ranks is no power of two)."""

    def __init__(self, spec: AllreduceSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer = bucket.buffer().mul_(1.0 / self.group.size())
        work: Any = dist.all_reduce(buffer, group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes


class Fp16Compress(Algorithm):
    """Cast to float16, divide by the number of ranks, all-reduce, cast back: torch's ``fp16_compress_hook``, with a look at what
    is sent.

    The cast comes before the division, so only this rank's own gradients can overflow; they are watched.
    """

    def __init__(self, spec: Fp16CompressSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer = bucket.buffer()
        sent, size = buffer.to(torch.float16), self.group.size()
        # torch divides. By a power of two, the product has the same bits, in two thirds of the time.
        sent = sent.mul_(1.0 / size) if size & (size - 1) == 0 else sent.div_(size)
        if sent.dtype is not buffer.dtype:
            self.watch.overflow(names, sent, bucket.gradients, _FP16_ROUNDS_TO_INF)
        work: Any = dist.all_reduce(sent, group=self.group, async_op=True)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0])), sent.nbytes
