"""The arithmetic of the plain hooks: torch's own functions, guarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from ratchet_hooks import powersgd
from ratchet_hooks.algorithm import Algorithm, Report, Setup, TensorFuture, on_nccl
from ratchet_hooks.codec import Tensors
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.layout import Layout
from ratchet_hooks.specs import AllreduceSpec, Fp16CompressSpec, PowerSGDSpec

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


class _InOrder:
    """Stands for ``torch.distributed`` inside torch's hook: every all-reduce is complete when it returns.

    torch starts a bucket's second and third all-reduce, and multiplies matrices, in callbacks. On gloo those run in whichever
    thread finishes the all-reduce before: two buckets (or DDP's own all-reduce of the map of unused parameters) cross in
    different orders on different ranks, and the products come out in other bits, because the number of threads and the handling
    of denormals belong to the thread. After a finished all-reduce the callbacks run at once, in the thread that called the hook.
    """

    group = dist.group

    @staticmethod
    def all_reduce(tensor: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
        work: Any = dist.all_reduce(tensor, group=group, async_op=async_op)
        work.get_future().wait()
        return work


def _in_order(hook: Any) -> FunctionType:
    """The same code over ``_InOrder`` instead of ``torch.distributed``; torch's module stays as it is."""
    return FunctionType(hook.__code__, {**hook.__globals__, "dist": _InOrder}, hook.__name__, hook.__defaults__)


class PowerSGD(Algorithm):
    """torch's ``powerSGD_hook``; off NCCL with every all-reduce of its chain in order."""

    def __init__(self, spec: PowerSGDSpec, setup: Setup) -> None:
        super().__init__(setup)
        self.state = powersgd.make_state(spec, setup.group)
        self._in_order = _in_order(torch_powersgd.powerSGD_hook)

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer, state = bucket.buffer(), self.state
        compressing, before = state.iter >= state.start_powerSGD_iter, state.total_numel_after_compression
        nccl = on_nccl(self.group, buffer.device)
        hook = torch_powersgd.powerSGD_hook if nccl else self._in_order
        future: TensorFuture = hook(state, bucket)
        if not compressing:
            return future, buffer.nbytes
        if nccl:
            gradients = bucket.gradients()  # now: the bucket does not outlive this call
            future = future.then(lambda done: self._watched(done, names, buffer, gradients))
        else:
            self.watch.non_finite(names, buffer, bucket.gradients)
        return future, (state.total_numel_after_compression - before) * buffer.element_size()

    def _watched(
        self, done: TensorFuture, names: Sequence[str], buffer: torch.Tensor, gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        self.watch.non_finite(names, buffer, lambda: gradients)
        return done.value()

    def capture(self, layout: Layout | None) -> tuple[Tensors, JsonValue]:
        """Residuals, P and Q by parameter name; the rest of ``__getstate__()`` as JSON."""
        return powersgd.capture(self.state, layout, self.setup.parameters)

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Into torch's state object, through ``__setstate__``."""
        if not isinstance(state, dict):
            raise HookStateError("state", "missing from the recorded state")
        powersgd.restore(self.state, tensors, state, layout, self.setup.parameters)

    def report(self) -> Report:
        """Statistics of torch's state object."""
        state = self.state
        rate, before, after = state.compression_stats()  # type: ignore[no-untyped-call]
        return Report(
            phase="warm-up" if state.iter < state.start_powerSGD_iter else "compressing",
            iteration=state.iter,
            compression_rate=rate if after else 1.0,
            elements_before=before,
            elements_after=after,
            residual_norm=powersgd.residual_norm(state),
            memory_bytes=powersgd.memory_bytes(state),
        )
