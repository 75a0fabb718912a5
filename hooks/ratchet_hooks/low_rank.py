"""PowerSGD (Vogels et al., arXiv 1905.13727) as torch's ``powerSGD_hook`` computes it: the same bits in less time.

The state is torch's ``PowerSGDState``; what its dictionaries hold after a step is what torch's hook leaves in them. Different is

- where it is computed: torch starts a bucket's second and third all-reduce, and multiplies matrices, in callbacks. On gloo those
  run in whichever thread finishes the all-reduce before; two buckets (or DDP's own all-reduce of the map of unused parameters)
  cross in different orders on different ranks, and products come out in other bits, because the number of threads and the
  handling of denormals belong to the thread. Here the thread that calls the hook issues and computes everything;
- when: the uncompressed gradients are on their way while P is computed;
- the memory: a bucket's residual is also the matrix that is compressed. Gradients are added to it, the average is subtracted from
  it, and neither a copy of the bucket nor a new residual is made. Views are made once per bucket, not once per step;
- on NCCL everything is queued on a stream of its own, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from ratchet_hooks.orthogonalize import Basis
from ratchet_hooks.specs_powersgd import BatchedPowerSGDSpec, PowerSGDSpec


class LowRank(Algorithm):
    """What ``powerSGD`` and ``batched_powerSGD`` share: torch's state, the warm-up, the order of what is issued."""

    def __init__(self, spec: PowerSGDSpec | BatchedPowerSGDSpec, setup: Setup) -> None:
        super().__init__(setup)
        self.state = powersgd.make_state(spec, setup.group)
        self._nccl = on_nccl(setup.group, setup.device)
        self._stream = torch.cuda.Stream(setup.device) if self._nccl else None

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer, state = bucket.buffer(), self.state
        if state.iter < state.start_powerSGD_iter:
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
            work: Any = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes
        with self._queue():
            sent = self._compress(bucket, buffer, names)
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
            # On CUDA the future keeps an event of this stream, for which DDP's own stream will wait.
            future: TensorFuture = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
            future.set_result(buffer)
        return future, sent * buffer.element_size()

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

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> int:
        """Put the compressed average into ``buffer``; the number of elements that this rank sends."""
        raise NotImplementedError

    def _queue(self) -> AbstractContextManager[Any]:
        """Where the compression runs: on NCCL a stream of its own, behind what the caller's has queued, so that the backward pass
        goes on beside it."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.setup.device))
        return torch.cuda.stream(self._stream)

    def _reduce(self, flat: torch.Tensor) -> Any:
        """Begin to add ``flat`` up over the ranks. ``wait()`` of what is returned blocks the host on gloo, the stream on NCCL."""
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def _count(self, bucket: Any, before: int, after: int) -> None:
        """Add to torch's statistics, and log them when that is due."""
        self.state.total_numel_before_compression += before
        self.state.total_numel_after_compression += after
        torch_powersgd._report_compression_stats(bucket, self.state)  # type: ignore[no-untyped-call]

    def _draw(self, qs: Sequence[Basis]) -> None:
        """A new random Q, equal on all ranks: torch's numbers, from a generator of its own. (torch seeds the default generators
        for it and brings back only the CPU's, so that dropout on CUDA gets the same numbers on every rank.)"""
        generator = torch.Generator().manual_seed(self.state.rng.randint(1_000_000_000))
        for q in qs:
            q.matrices.copy_(torch.randn(q.matrices.shape, dtype=q.matrices.dtype, generator=generator))


@dataclass
class _Product:
    """One matrix M of ``n x m``, or a batch of equal shape, and its factors: ``M ~ P Q^T``."""

    matrix: torch.Tensor  # b x n x m
    transposed: torch.Tensor
    p: Basis  # b x n x r
    q: Basis  # b x m x r
    q_transposed: torch.Tensor
    sources: list[torch.Tensor]  # what a batch is made of; empty for a single matrix
    average: torch.Tensor  # b x n x m, in the bucket; of a batch, in its own memory
    targets: list[torch.Tensor]  # where the parts of a batch go in the bucket


class _Plan:
    """The views of one bucket that stay the same as long as its memory does.

    ``total`` is the sum of gradients and residual, which is compressed: the residual's own memory, or the bucket's without error
    feedback. ``p`` and ``q`` are flat, in the order of ``powersgd.low_rank_places``.
    """

    def __init__(
        self, state: powersgd.PowerSGDState, bucket: Any, buffer: torch.Tensor, total: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor] | None, names: Sequence[str],
    ) -> None:  # fmt: skip
        shapes = dict(zip(names, (gradient.shape for gradient in bucket.gradients()), strict=True))
        places = powersgd.low_rank_places(state, names, shapes)
        numels = [shape.numel() for shape in shapes.values()]
        small = [i for i, name in enumerate(names) if name not in {place.name for place in places}]
        self.names, self.buffer, self.total = list(names), buffer, total
        self.low_names, self.small_names = [place.name for place in places], [names[i] for i in small]
        numel_p, numel_q = powersgd.factor_numels(places)
        self.p, self.q = factors or (buffer.new_empty(numel_p), buffer.new_empty(numel_q))
        self.p_parts, self.q_parts = powersgd.factor_views(places, self.p, self.q)
        cut = dict(zip(names, total.split(numels), strict=True))
        out = dict(zip(names, buffer.split(numels), strict=True))
        self.small = buffer.new_empty(sum(numels[i] for i in small))
        self.small_parts = list(self.small.split([numels[i] for i in small]))
        self.small_sources = [cut[name] for name in self.small_names]
        self.small_targets = [out[name] for name in self.small_names]
        self.sent = self.small.numel() + self.p.numel() + self.q.numel()
