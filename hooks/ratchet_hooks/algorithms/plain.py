"""The arithmetic of the plain hooks: torch's own functions, with overflow checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.algorithms.base import Algorithm, Report, Setup, TensorFuture, completed
from ratchet_hooks.specs.hook_specs import AllreduceSpec, Bf16CompressSpec, Fp16CompressSpec, NoopSpec


class Allreduce(Algorithm):
    """One all-reduce per bucket, with the bits of DDP without a hook, which multiplies by 1 / ranks where torch's
    ``allreduce_hook`` divides by ranks (other bits when the number of ranks is not a power of two).

    With a wrapper there is no counterpart without a hook, and the bits are those of torch's wrapped ``allreduce_hook``.
    """

    def __init__(self, spec: AllreduceSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer, size = bucket.buffer(), self.group.size()
        buffer = buffer.mul_(1.0 / size) if self.setup.cast_dtype is None else divide(buffer, size)
        work: Any = dist.all_reduce(buffer, group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes


class _Compress16(Algorithm):
    """Cast to 16 bits, divide by the number of ranks, all-reduce, cast back; what is sent is checked.

    The cast comes before the division, so only this rank's own gradients can overflow; they are watched.
    """

    dtype: torch.dtype

    def __init__(self, spec: Fp16CompressSpec | Bf16CompressSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer = bucket.buffer()
        sent = divide(buffer.to(self.dtype), self.group.size())
        if sent.dtype is not buffer.dtype:
            self.watch.check_overflow(names, sent, bucket.gradients)
        work: Any = dist.all_reduce(sent, group=self.group, async_op=True)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0])), sent.nbytes


class Fp16Compress(_Compress16):
    """torch's ``fp16_compress_hook``."""

    dtype = torch.float16


class Bf16Compress(_Compress16):
    """torch's ``bf16_compress_hook``. DDP refuses it on the CPU by the function's name, although gloo can add bfloat16."""

    dtype = torch.bfloat16


class Noop(Algorithm):
    """torch's ``noop_hook``: every rank keeps its own gradients, and nothing is sent."""

    def __init__(self, spec: NoopSpec, setup: Setup) -> None:
        super().__init__(setup)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        return completed(bucket.buffer()), 0

    def report(self, *, norm: bool = True) -> Report:
        """The phase is ``local``: every rank trains alone."""
        return Report(phase="local", elements_after=0)


def divide(flat: torch.Tensor, size: int) -> torch.Tensor:
    """``flat.div_(size)``. For a power of two, multiplying by the inverse gives the same bits in two thirds of the time."""
    return flat.mul_(1.0 / size) if size & (size - 1) == 0 else flat.div_(size)
