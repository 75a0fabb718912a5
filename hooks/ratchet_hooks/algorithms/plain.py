"""The plain hooks: all-reduce, all-reduce in 16 bits with overflow checks of the cast, and no communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.algorithms.base import Algorithm, Report, Setup, TensorFuture, completed
from ratchet_hooks.specs.hook_specs import AllreduceSpec, Bf16CompressSpec, Fp16CompressSpec, NoopSpec


class Allreduce(Algorithm):
    """One all-reduce per bucket. The result is bit for bit that of DDP without a hook; under a wrapper, it is that of torch's
    wrapped ``allreduce_hook``."""

    def __init__(self, spec: AllreduceSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        """Start the all-reduce of a bucket; returns the future of its average, and the bytes that this rank sends."""
        buffer, size = bucket.buffer(), self.group.size()
        # DDP multiplies by 1 / ranks. torch's hook divides, which gives other bits unless the number of ranks is a power of two.
        buffer = buffer.mul_(1.0 / size) if self.setup.cast_dtype is None else divide(buffer, size)
        work: Any = dist.all_reduce(buffer, group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes


class _Compress16(Algorithm):
    """Casts a bucket to 16 bits, averages it, and casts it back. Overflow in the cast is reported as a warning."""

    dtype: torch.dtype

    def __init__(self, spec: Fp16CompressSpec | Bf16CompressSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        """Start the all-reduce of a bucket in 16 bits. Returns the future of its average and the bytes sent."""
        buffer = bucket.buffer()
        # The cast comes first: only this rank's own gradients can overflow in it.
        sent = divide(buffer.to(self.dtype), self.group.size())
        if sent.dtype is not buffer.dtype:
            self.watch.check_overflow(names, sent, bucket.gradients)
        work: Any = dist.all_reduce(sent, group=self.group, async_op=True)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0])), sent.nbytes


class Fp16Compress(_Compress16):
    """torch's ``fp16_compress_hook``: gradients are sent as float16."""

    dtype = torch.float16


class Bf16Compress(_Compress16):
    """torch's ``bf16_compress_hook``: gradients are sent as bfloat16. Unlike torch's, this one also runs on the CPU."""

    # On the CPU DDP refuses torch's function by its name, although gloo can add bfloat16.
    dtype = torch.bfloat16


class Noop(Algorithm):
    """torch's ``noop_hook``: every rank keeps its own gradients, and nothing is sent."""

    def __init__(self, spec: NoopSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        return completed(bucket.buffer()), 0

    def report(self, *, norm: bool = True) -> Report:
        """Return the report; the phase is ``local``, since every rank trains alone."""
        return Report(phase="local", elements_after=0)


def divide(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Divide ``flat`` by ``size`` in place and return it. For a power of two, multiplication gives the same bits faster."""
    return flat.mul_(1.0 / size) if size & (size - 1) == 0 else flat.div_(size)
