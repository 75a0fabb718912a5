"""The arithmetic of each hook: torch's own functions, guarded; one object per DDP instance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from ratchet_hooks import powersgd
from ratchet_hooks.specs import AllreduceSpec, Fp16CompressSpec, PowerSGDSpec
from ratchet_hooks.watch import Watch

TensorFuture = torch.futures.Future[torch.Tensor]
_FP16_ROUNDS_TO_INF = 65520.0  # halfway between 65504, the largest finite float16, and 65536


class Algorithm(Protocol):
    """What differs between hooks. ``state`` is torch's state object, if there is one."""

    watch: Watch

    @property
    def state(self) -> powersgd.PowerSGDState | None: ...

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        """Begin to average a bucket over the ranks; the future of its flat tensor and the bytes that this rank sends."""
        ...


def on_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives on ``device`` are ordered by CUDA streams, so that a hook need not wait for them."""
    return device.type == "cuda" and "cuda:nccl" in str(dist.get_backend_config(group))


class Allreduce:
    """One all-reduce per bucket, divided first: the bits of DDP without a hook."""

    def __init__(self, spec: AllreduceSpec, group: dist.ProcessGroup) -> None:
        self.state = None
        self.group = group
        self.watch = Watch()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        return default_hooks.allreduce_hook(self.group, bucket), bucket.buffer().nbytes


class Fp16Compress:
    """Cast to float16, divide by the number of ranks, all-reduce, cast back.

    The cast comes before the division, so only this rank's own gradients can overflow; they are watched.
    """

    def __init__(self, spec: Fp16CompressSpec, group: dist.ProcessGroup) -> None:
        self.state = None
        self.group = group
        self.watch = Watch()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer = bucket.buffer()
        if buffer.dtype is not torch.float16:
            self.watch.overflow(names, buffer, bucket.gradients(), _FP16_ROUNDS_TO_INF)
        return default_hooks.fp16_compress_hook(self.group, bucket), buffer.numel() * 2


class PowerSGD:
    """torch's ``powerSGD_hook``. Off NCCL it waits for the bucket's whole chain of all-reduces before it returns.

    torch starts a bucket's second and third all-reduce from callbacks, in whatever thread finishes the one before. On gloo two
    buckets, or DDP's own all-reduce of the map of unused parameters, would cross in different orders on different ranks.
    """

    def __init__(self, spec: PowerSGDSpec, group: dist.ProcessGroup) -> None:
        self.group = group
        self.state = powersgd.make_state(spec, group)
        self.watch = Watch()

    @property
    def compressing(self) -> bool:
        return bool(self.state.iter >= self.state.start_powerSGD_iter)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer, compressing, before = bucket.buffer(), self.compressing, self.state.total_numel_after_compression
        gradients = bucket.gradients()
        future = torch_powersgd.powerSGD_hook(self.state, bucket)
        elements = self.state.total_numel_after_compression - before if compressing else buffer.numel()
        waits = not on_nccl(self.group, buffer.device)
        if waits:
            future.wait()
        if compressing and waits:
            self.watch.non_finite(names, buffer, gradients)
        elif compressing:
            future = future.then(lambda done: self._watched(done, names, buffer, gradients))
        return future, elements * buffer.element_size()

    def _watched(
        self, done: TensorFuture, names: Sequence[str], buffer: torch.Tensor, gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        self.watch.non_finite(names, buffer, gradients)
        return done.value()
