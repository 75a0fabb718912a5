"""Base of ``powerSGD`` and ``batched_powerSGD``: the order of work on the buckets, and the hook's state, captured and restored by
parameter name, also with another bucket layout.

The thread that calls the hook issues all collectives. Their order depends only on the order of the buckets."""

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
from ratchet_hooks.algorithms.powersgd.state_by_name import PER_BUCKET
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.specs.powersgd import BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_hooks.state.encode import Tensors, decode, encode
from ratchet_hooks.torch_compat import report_compression

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
        """Return this rank's state. Tensors: residuals, P and Q under the keys of ``residuals`` and ``factors``, and those in the
        other slots of torch's state as ``state/<path>``. JSON: these other slots, and what exists per bucket. ``copy`` False:
        residuals, P and Q are views. Raises ``HookStateError`` if the buckets' state is incomplete, or exists without a
        ``layout``."""
        slots = state_by_name.read_slots(self.state)
        errors, ps, qs = (slots.pop(key) for key in PER_BUCKET)
        if (errors or ps) and layout is None:
            raise HookStateError("state.error_dict", "per-bucket state exists, but no bucket layout is known")
        for key, held in (("error_dict", errors), ("p_memory_dict", ps)):
            if held and set(held) != set(range(len(layout or []))):
                raise HookStateError(
                    f"state.{key}", f"has buckets {sorted(held)} of {len(layout or [])}, so it could not be restored"
                )
        tensors: Tensors = {}
        for i, bucket in enumerate(layout or []):
            views = [*self.residuals(i, bucket, errors[i])] if errors else []
            views += [*self.factors(i, bucket, ps[i], qs[i])] if ps else []
            if copy:
                views = [(key, view.clone(memory_format=torch.contiguous_format)) for key, view in views]
            tensors |= dict(views)
        rest, slots_json = encode(slots, root="state")
        tensors |= {f"state/{name}": tensor for name, tensor in rest.items()}
        return tensors, {"slots": slots_json, "residuals": bool(errors), "low_rank": bool(ps)}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture`` into torch's state object. Raises ``HookStateError``, and changes nothing, if an
        entry does not fit."""
        state_by_name.write_slots(self.state, self.to_slots(tensors, state, layout))

    def to_slots(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> dict[str, Any]:
        """Return a captured state in the form of ``PowerSGDState.__getstate__``. Raises ``HookStateError`` if an entry does not
        fit this hook and ``layout``."""
        if not isinstance(state, dict):
            raise HookStateError("state", "missing from the recorded state")
        rest = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        slots = decode(rest, state.get("slots"))
        free = {"compression_stats_logging_frequency", *self.unused}
        state_by_name.check_slots(self.state, slots, free)
        assert isinstance(slots, dict)
        slots |= {key: getattr(self.state, key) for key in free}
        taken = state_by_name.Taken(tensors)
        errors, ps, qs = {}, {}, {}
        if (state.get("residuals") or state.get("low_rank")) and layout is None:
            raise HookStateError("layout", "the state holds residuals, but no bucket layout is recorded")
        for i, bucket in enumerate(layout or []):
            residual, p, q = self.allocate_zeros(bucket)
            if state.get("residuals"):
                errors[i] = residual
                for key, view in self.residuals(i, bucket, residual):
                    taken.copy_into(key, view)
            if state.get("low_rank"):
                ps[i], qs[i] = p, q
                for key, view in self.factors(i, bucket, p, q):
                    taken.copy_into(key, view)
        taken.finish()
        return {**slots, **dict(zip(PER_BUCKET, (errors, ps, qs), strict=True))}

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
