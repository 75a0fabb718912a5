"""PowerSGD (Vogels et al., arXiv 1905.13727) as torch's ``powerSGD_hook`` computes it: the same bits in less time, with torch's
``PowerSGDState``. The thread that calls the hook issues all collectives. Their order depends only on the order of the buckets."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ratchet_hooks.algorithms.base import Algorithm, Report, Setup, TensorFuture, is_nccl, new_future
from ratchet_hooks.algorithms.powersgd import state_by_name
from ratchet_hooks.algorithms.powersgd.kernels import Basis, Tried
from ratchet_hooks.algorithms.powersgd.views import Plan
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.specs.powersgd import BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_hooks.state.encode import Tensors
from ratchet_hooks.torch_compat import foreach_copy_, report_compression

Stages: TypeAlias = Generator[Any, None, None]
"""The stages of one bucket: until P is in transfer, then until Q is in transfer, then the rest. Yields the all-reduce that the
next stage needs, or None where there is none."""


@dataclass
class _Begun:
    """A bucket in compression. ``average``: the future that DDP received. ``pending_work``: the all-reduce that the next stage
    waits for."""

    stages: Stages
    buffer: torch.Tensor
    average: TensorFuture
    pending_work: Any = None

    def advance(self) -> None:
        """Wait for the pending all-reduce, if there is one, and run the next stage."""
        if self.pending_work is not None:
            self.pending_work.wait()
        self.pending_work = next(self.stages, None)


class LowRank(Algorithm):
    """The common part of ``powerSGD`` and ``batched_powerSGD``: torch's state, the warm-up, and the order of work."""

    def __init__(self, spec: PowerSGDSpec | BatchedPowerSGDSpec, setup: Setup) -> None:
        super().__init__(setup)
        self.state = state_by_name.make_state(spec, setup.group)
        self.unused = spec.unused
        # Dimensions along which Q's norms matter: rows in P Q^T, and columns when the next step begins with this Q.
        self._norm_dims = (0, 1) if spec.warm_start else (1,)
        self._trial_results: Tried = {}
        nccl = is_nccl(setup.group, setup.device)
        self._in_flight: list[_Begun] = []
        self._stream = torch.cuda.Stream(setup.device) if nccl else None  # type: ignore[no-untyped-call]

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        """Begin to average a bucket: by an all-reduce in the warm-up, by low-rank factors after it. Returns the average's future
        and the bytes sent."""
        buffer, state = bucket.buffer(), self.state
        if state.iter < state.start_powerSGD_iter:
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
            work: Any = dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes
        # Unlike in torch's hook, nothing is done in callbacks: on gloo those run in any thread, so that collectives cross in
        # different orders on different ranks, and products have other bits (number of threads, denormals).
        if bucket.index() == 0:
            self._discard_all()
        with self._stream_context():
            sent, stages = self._compress(bucket, buffer, names)
            begun = _Begun(stages, buffer, new_future(buffer))
            self._in_flight.append(begun)
            begun.advance()
            if self._stream is not None:  # there "wait" does not block the host: nothing to gain
                begun.advance()
                self._complete_all()
            else:
                self._advance_previous(last=bucket.is_last())
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        return begun.average, sent * buffer.element_size()

    def _advance_previous(self, *, last: bool) -> None:
        """Run the next stage of the second newest bucket, if there are at least two. ``last``: the newest bucket is the last one
        of the backward pass. If it is, also run the newest bucket's next stage, and then complete all buckets."""
        for begun in self._in_flight[-2:] if last else self._in_flight[-2:-1]:
            begun.advance()
        if last:
            self._complete_all()

    def _complete_all(self) -> None:
        """Run the last stage of all buckets that are not complete, and complete their futures."""
        for begun in self._in_flight:
            begun.advance()
            begun.average.set_result(begun.buffer)
        self._in_flight = []

    def _discard_all(self) -> None:
        """Drop buckets that a failed backward pass left incomplete, after waiting for their all-reduces."""
        for begun in self._in_flight:
            if begun.pending_work is not None:
                begun.pending_work.wait()
        self._in_flight = []

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return this rank's state: residuals, P and Q by parameter name, and the other values of ``__getstate__()``. Raises
        ``HookStateError`` if the buckets' state is incomplete, or exists without a ``layout``."""
        return state_by_name.capture(self.state, layout, self, copy=copy)

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture`` into torch's state object. Raises ``HookStateError``, and changes nothing, if an
        entry does not fit."""
        if not isinstance(state, dict):
            raise HookStateError("state", "missing from the recorded state")
        state_by_name.restore(self.state, tensors, state, layout, self)

    def allocate_zeros(self, bucket: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a residual, P and Q of zeros, as the hook keeps them, for a bucket of these parameters."""
        raise NotImplementedError

    def residuals(
        self, index: int, bucket: Sequence[str], residual: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(key, view)`` of every parameter's part of a bucket's flat residual; the key is ``residual/<parameter>``."""
        for name, view in state_by_name.residual_views(residual, bucket, self.setup.parameters):
            yield f"residual/{name}", view

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(key, view)`` for each part of the bucket's P and Q. A part is stored under its key."""
        raise NotImplementedError

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        return state_by_name.captured_norm(self.state, tensors)

    def report(self, *, norm: bool = True) -> Report:
        """Return the statistics of torch's state object. ``norm`` False: without the residuals' norm."""
        state = self.state
        rate, before, after = state.compression_stats()  # type: ignore[no-untyped-call]
        return Report(
            phase="warm-up" if state.iter < state.start_powerSGD_iter else "compressing",
            iteration=state.iter,
            compression_rate=rate if after else 1.0,
            elements_before=before,
            elements_after=after,
            residual_norm=state_by_name.residual_norm(state) if norm else None,
            memory_bytes=state_by_name.memory_bytes(state),
        )

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        """Return the number of elements that this rank sends for a bucket, and the stages that average it into ``buffer``."""
        raise NotImplementedError

    def _stream_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the compression runs: on NCCL a separate stream, otherwise one without effect."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.setup.device))
        return torch.cuda.stream(self._stream)

    def _all_reduce(self, flat: torch.Tensor) -> Any:
        """Start to sum ``flat`` over the ranks, in place; return the work to wait for."""
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def _count_elements(self, bucket: Any, before: int, after: int) -> None:
        """Add a bucket's elements ``before`` and ``after`` compression to torch's statistics, and log them when that is due."""
        self.state.total_numel_before_compression += before
        self.state.total_numel_after_compression += after
        report_compression(bucket, self.state)

    def _draw_random(self, qs: Sequence[Basis]) -> None:
        """Fill every Q with the random numbers that torch draws, equal on all ranks."""
        # A separate generator: torch seeds the default ones and restores only the CPU's, so that dropout on CUDA would get the
        # same numbers on every rank.
        generator = torch.Generator().manual_seed(self.state.rng.randint(1_000_000_000))
        for q in qs:
            q.matrices.copy_(torch.randn(q.matrices.shape, dtype=q.matrices.dtype, generator=generator))


class PowerSGD(LowRank):
    """PowerSGD with a P and a Q for each parameter that is worth compressing; other gradients are averaged uncompressed."""

    def __init__(self, spec: PowerSGDSpec, setup: Setup) -> None:
        super().__init__(spec, setup)
        self._plans: dict[int, Plan] = {}

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        """Add a bucket's gradients to its residual, if any. Return the number of elements to send, and the stages."""
        index = bucket.index()
        total = self._add_residual(index, buffer)
        plan = self._plan(bucket, buffer, total, names)
        if bucket.is_last() and len(self._plans) > index + 1:  # plans of buckets that no longer exist hold their memory
            self._plans = {i: kept for i, kept in self._plans.items() if i <= index}
        self._count_elements(bucket, plan.elements_before, plan.elements_sent)
        return plan.elements_sent, self._stages(plan, index)

    def _stages(self, plan: Plan, index: int) -> Stages:
        """Compress one bucket, and store the average in its buffer. Yields twice: the all-reduce of P, then the all-reduce of Q.
        Both are None if the bucket has no compressed parameter. The caller waits for each all-reduce before it continues the
        generator."""
        state, small = self.state, None
        if plan.uncompressed.numel():
            torch.cat(plan.uncompressed_sources, out=plan.uncompressed)
            small = self._all_reduce(plan.uncompressed)
        if not state.warm_start or index not in state.p_memory_dict:
            self._draw_random([product.q for product in plan.products])
        yield from self._factorise(plan) if plan.products else (None, None)
        if state.warm_start:
            state.p_memory_dict[index], state.q_memory_dict[index] = plan.p, plan.q
        if small is not None:
            small.wait()
            self.watch.check_non_finite(plan.uncompressed_names, plan.uncompressed, lambda: plan.uncompressed_parts)
            plan.uncompressed.div_(self.group.size())
            foreach_copy_(plan.uncompressed_targets, plan.uncompressed_parts)
        if plan.total is not plan.buffer:
            plan.total.sub_(plan.buffer)  # the intended update minus the applied one: the new residual

    def _add_residual(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Add a bucket's gradients to its residual in place, and return the sum; without error feedback return ``buffer``
        itself."""
        if not self.state.use_error_feedback:
            return buffer
        residual = self.state.error_dict.get(index)
        if residual is None:  # not zeros plus the gradients, which would turn -0.0 into 0.0
            residual = self.state.error_dict[index] = buffer.clone()
        else:
            torch.add(buffer, residual, out=residual)
        return residual

    def _factorise(self, plan: Plan) -> Stages:
        """Replace the bucket's compressed gradients by their low-rank average; yield the all-reduces of P and Q."""
        epsilon = self.state.orthogonalization_epsilon
        for product in plan.products:
            product.q.orthogonalize(epsilon)
            if product.sources:
                torch.stack(product.sources, out=product.matrix)
            torch.bmm(product.matrix, product.q.matrices, out=product.p.matrices)
        yield self._all_reduce(plan.p)  # no division: P is made orthonormal
        self.watch.check_low_rank(plan.compressed_names, plan.p, plan.p_parts, dims=(0,))
        for product in plan.products:
            product.p.orthogonalize(epsilon)
            product.transposed.compute()
        yield self._all_reduce(plan.q)
        plan.q.div_(self.group.size())
        self.watch.check_low_rank(plan.compressed_names, plan.q, plan.q_parts, dims=self._norm_dims)
        for product in plan.products:
            product.outer.compute()
            if product.targets:
                foreach_copy_(product.targets, product.average.unbind())

    def allocate_zeros(self, bucket: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a residual, P and Q of zeros, flat, for a bucket with the parameters named in ``bucket``."""
        numels = state_by_name.factor_numels(state_by_name.low_rank_places(self.state, self._shapes(bucket)))
        dtype = self.setup.dtype(bucket[0])
        length = sum(self.setup.parameters[name].numel() for name in bucket)
        residual, p, q = (torch.zeros(n, dtype=dtype, device=self.setup.device) for n in (length, *numels))
        return residual, p, q

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(key, view)`` of P and Q of every compressed parameter; the keys are ``p/<parameter>`` and
        ``q/<parameter>``."""
        places = state_by_name.low_rank_places(self.state, self._shapes(bucket))
        for place, p_part, q_part in zip(places, *state_by_name.factor_views(places, p, q), strict=True):
            yield f"p/{place.name}", p_part
            yield f"q/{place.name}", q_part

    def _shapes(self, names: Sequence[str]) -> dict[str, torch.Size]:
        return {name: self.setup.parameters[name].shape for name in names}

    def _plan(self, bucket: Any, buffer: torch.Tensor, total: torch.Tensor, names: Sequence[str]) -> Plan:
        """Return the bucket's views: those of the previous step if they still refer to the same memory, otherwise new ones."""
        state, index = self.state, bucket.index()
        plan = self._plans.get(index)
        factors = (state.p_memory_dict[index], state.q_memory_dict[index]) if index in state.p_memory_dict else None
        if plan is None or not plan.is_reusable(buffer, total, factors, names):
            plan = self._plans[index] = Plan(state, self._shapes(names), buffer, total, factors, self._trial_results)
        return plan
