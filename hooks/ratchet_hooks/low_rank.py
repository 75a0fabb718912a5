"""PowerSGD (Vogels et al., arXiv 1905.13727) as torch's ``powerSGD_hook`` computes it: the same bits in less time.

The state is torch's ``PowerSGDState``; what its dictionaries hold after a step is what torch's hook leaves in them. Different is

- where it is computed: torch starts a bucket's second and third all-reduce, and multiplies matrices, in callbacks. On gloo those
  run in whichever thread finishes the all-reduce before; two buckets (or DDP's own all-reduce of the map of unused parameters)
  cross in different orders on different ranks, and products come out in other bits, because the number of threads and the
  handling of denormals belong to the thread. Here the thread that calls the hook issues and computes everything;
- when: the uncompressed gradients are on their way while P is computed; off NCCL a bucket's P is while the backward pass goes on
  and the next bucket is begun, and its Q while those of the buckets behind it are made. No result is needed before the last
  bucket's hook, which ends them all: what a hook call issues depends on the buckets' order alone, so it is the same on all ranks;
- the memory: a bucket's residual is also the matrix that is compressed. Gradients are added to it, the average is subtracted from
  it, and neither a copy of the bucket nor a new residual is made. Views are made once per bucket, not once per step;
- on NCCL everything is queued on a stream of its own, and the host waits for nothing but the copy of a random Q to the device.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ratchet_hooks import powersgd
from ratchet_hooks.algorithm import Algorithm, Report, Setup, TensorFuture, on_nccl, promised
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.codec import Tensors
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.layout import Layout
from ratchet_hooks.low_rank_plan import Plan
from ratchet_hooks.orthogonalize import Basis
from ratchet_hooks.specs_powersgd import BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_hooks.torch_compat import foreach_copy_, report_compression
from ratchet_hooks.transposed import Tried

Stages: TypeAlias = Generator[Any, None, None]
"""Of one bucket: up to P on its way, then up to Q on its way, then the rest. Gives the all-reduce that the next stage needs, or
None where there is none."""


@dataclass
class _Begun:
    """A bucket between two stages."""

    stages: Stages
    buffer: torch.Tensor
    average: TensorFuture
    awaited: Any = None

    def go_on(self) -> None:
        if self.awaited is not None:
            self.awaited.wait()
        self.awaited = next(self.stages, None)


class LowRank(Algorithm):
    """What ``powerSGD`` and ``batched_powerSGD`` share: torch's state, the warm-up, the order of what is issued."""

    def __init__(self, spec: PowerSGDSpec | BatchedPowerSGDSpec, setup: Setup) -> None:
        super().__init__(setup)
        self.state = powersgd.make_state(spec, setup.group)
        self.unused = spec.unused
        # How Q's norms matter: of rows in P Q^T, of columns when the next step begins with this Q.
        self._along = (0, 1) if spec.warm_start else (1,)
        self._tried: Tried = {}
        nccl = on_nccl(setup.group, setup.device)
        self._begun: list[_Begun] = []
        self._stream = torch.cuda.Stream(setup.device) if nccl else None  # type: ignore[no-untyped-call]

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        buffer, state = bucket.buffer(), self.state
        if state.iter < state.start_powerSGD_iter:
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
            work: Any = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes
        if bucket.index() == 0:
            self._abandon()
        with self._queue():
            sent, stages = self._compress(bucket, buffer, names)
            begun = _Begun(stages, buffer, promised(buffer))
            self._begun.append(begun)
            begun.go_on()
            if self._stream is not None:  # there "wait" does not block the host: nothing to gain
                begun.go_on()
                self._end()
            else:
                self._pass_on(last=bucket.is_last())
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        return begun.average, sent * buffer.element_size()

    def _pass_on(self, *, last: bool) -> None:
        """Q of the bucket before the newest, and behind the newest, if it is the last one, what remains of all."""
        for begun in self._begun[-2:] if last else self._begun[-2:-1]:
            begun.go_on()
        if last:
            self._end()

    def _end(self) -> None:
        for begun in self._begun:
            begun.go_on()
            begun.average.set_result(begun.buffer)
        self._begun = []

    def _abandon(self) -> None:
        """What a backward pass that failed half-way has left."""
        for begun in self._begun:
            if begun.awaited is not None:
                begun.awaited.wait()
        self._begun = []

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Residuals, P and Q; the rest of ``__getstate__()`` as JSON."""
        return powersgd.capture(self.state, layout, self, copy=copy)

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Into torch's state object, through ``__setstate__``."""
        if not isinstance(state, dict):
            raise HookStateError("state", "missing from the recorded state")
        powersgd.restore(self.state, tensors, state, layout, self)

    def blank(self, bucket: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A residual, P and Q of zeros, for a bucket of these parameters."""
        raise NotImplementedError

    def residuals(
        self, index: int, bucket: Sequence[str], residual: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """By parameter name."""
        for name, view in powersgd.residual_views(residual, bucket, self.setup.parameters):
            yield f"residual/{name}", view

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """How P and Q are stored."""
        raise NotImplementedError

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        return powersgd.captured_norm(self.state, tensors)

    def report(self, *, norm: bool = True) -> Report:
        """Statistics of torch's state object."""
        state = self.state
        rate, before, after = state.compression_stats()  # type: ignore[no-untyped-call]
        return Report(
            phase="warm-up" if state.iter < state.start_powerSGD_iter else "compressing",
            iteration=state.iter,
            compression_rate=rate if after else 1.0,
            elements_before=before,
            elements_after=after,
            residual_norm=powersgd.residual_norm(state) if norm else None,
            memory_bytes=powersgd.memory_bytes(state),
        )

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        """The number of elements that this rank sends, and what puts the compressed average into ``buffer``."""
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
        report_compression(bucket, self.state)

    def _draw(self, qs: Sequence[Basis]) -> None:
        """A new random Q, equal on all ranks: torch's numbers, from a generator of its own. (torch seeds the default generators
        for it and brings back only the CPU's, so that dropout on CUDA gets the same numbers on every rank.)"""
        generator = torch.Generator().manual_seed(self.state.rng.randint(1_000_000_000))
        for q in qs:
            q.matrices.copy_(torch.randn(q.matrices.shape, dtype=q.matrices.dtype, generator=generator))


class PowerSGD(LowRank):
    """One P and Q per parameter that is worth it; the rest is averaged as it is."""

    def __init__(self, spec: PowerSGDSpec, setup: Setup) -> None:
        super().__init__(spec, setup)
        self._plans: dict[int, Plan] = {}

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        index = bucket.index()
        total = self._total(index, buffer)
        plan = self._plan(bucket, buffer, total, names)
        if bucket.is_last() and len(self._plans) > index + 1:  # plans of buckets that are no more hold their memory
            self._plans = {i: kept for i, kept in self._plans.items() if i <= index}
        self._count(bucket, plan.before, plan.sent)
        return plan.sent, self._stages(plan, index)

    def _stages(self, plan: Plan, index: int) -> Stages:
        state, small = self.state, None
        if plan.small.numel():
            torch.cat(plan.small_sources, out=plan.small)
            small = self._reduce(plan.small)
        if not state.warm_start or index not in state.p_memory_dict:
            self._draw([product.q for product in plan.products])
        yield from self._factorise(plan) if plan.products else (None, None)
        if state.warm_start:
            state.p_memory_dict[index], state.q_memory_dict[index] = plan.p, plan.q
        if small is not None:
            small.wait()
            self.watch.non_finite(plan.small_names, plan.small, lambda: plan.small_parts)
            plan.small.div_(self.group.size())
            foreach_copy_(plan.small_targets, plan.small_parts)
        if plan.total is not plan.buffer:
            plan.total.sub_(plan.buffer)  # what is applied from what should have been: the new residual

    def _total(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Gradients and residual added up: in the residual's memory, or in the bucket's without error feedback."""
        if not self.state.use_error_feedback:
            return buffer
        residual = self.state.error_dict.get(index)
        if residual is None:  # not zeros plus the gradients: that would make 0.0 of -0.0
            residual = self.state.error_dict[index] = buffer.clone()
        else:
            torch.add(buffer, residual, out=residual)
        return residual

    def _factorise(self, plan: Plan) -> Stages:
        """Replace the bucket's compressed gradients by their average of low rank."""
        epsilon = self.state.orthogonalization_epsilon
        for product in plan.products:
            product.q.orthogonalize(epsilon)
            if product.sources:
                torch.stack(product.sources, out=product.matrix)
            torch.bmm(product.matrix, product.q.matrices, out=product.p.matrices)
        yield self._reduce(plan.p)  # no division: P is made orthonormal
        self.watch.low_rank(plan.low_names, plan.p, plan.p_parts, along=(0,))
        for product in plan.products:
            product.p.orthogonalize(epsilon)
            product.transposed.compute()
        yield self._reduce(plan.q)
        plan.q.div_(self.group.size())
        self.watch.low_rank(plan.low_names, plan.q, plan.q_parts, along=self._along)
        for product in plan.products:
            product.outer.compute()
            if product.targets:
                foreach_copy_(product.targets, product.average.unbind())

    def blank(self, bucket: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A residual, P and Q of zeros, for a bucket of these parameters."""
        numels = powersgd.factor_numels(powersgd.low_rank_places(self.state, self._shapes(bucket)))
        dtype = self.setup.dtype(bucket[0])
        length = sum(self.setup.parameters[name].numel() for name in bucket)
        residual, p, q = (torch.zeros(n, dtype=dtype, device=self.setup.device) for n in (length, *numels))
        return residual, p, q

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """P and Q by parameter name."""
        places = powersgd.low_rank_places(self.state, self._shapes(bucket))
        for place, p_part, q_part in zip(places, *powersgd.factor_views(places, p, q), strict=True):
            yield f"p/{place.name}", p_part
            yield f"q/{place.name}", q_part

    def _shapes(self, names: Sequence[str]) -> dict[str, torch.Size]:
        return {name: self.setup.parameters[name].shape for name in names}

    def _plan(self, bucket: Any, buffer: torch.Tensor, total: torch.Tensor, names: Sequence[str]) -> Plan:
        """The bucket's views: those of the step before, if they still show its memory."""
        state, index = self.state, bucket.index()
        plan = self._plans.get(index)
        factors = (state.p_memory_dict[index], state.q_memory_dict[index]) if index in state.p_memory_dict else None
        if plan is None or not plan.shows(buffer, total, factors, names):
            plan = self._plans[index] = Plan(state, self._shapes(names), buffer, total, factors, self._tried)
        return plan
