"""PowerSGD (Vogels et al., arXiv 1905.13727) as torch's ``powerSGD_hook`` computes it: the same bits in less time, with torch's
``PowerSGDState``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ratchet_hooks.algorithms.base import Setup
from ratchet_hooks.algorithms.powersgd import state_by_name
from ratchet_hooks.algorithms.powersgd.low_rank import LowRank, Stages
from ratchet_hooks.algorithms.powersgd.views import Plan
from ratchet_hooks.specs.powersgd import PowerSGDSpec
from ratchet_hooks.torch_compat import foreach_copy_


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
