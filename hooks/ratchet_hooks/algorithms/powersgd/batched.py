"""Batched PowerSGD: one square matrix per bucket, made of all its gradients and padding at the end. The algorithm is that of
torch's ``batched_powerSGD_hook``, which fails at its first compressed step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ratchet_hooks.algorithms.base import Setup
from ratchet_hooks.algorithms.powersgd.kernels import Basis, TransposedProduct, Tried
from ratchet_hooks.algorithms.powersgd.low_rank import LowRank, Stages
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.specs.powersgd import BatchedPowerSGDSpec
from ratchet_hooks.state.encode import Tensors

_PER_SQUARE_PREFIXES = ("residual_padding/", "p/", "q/")
_log = logging.getLogger(__name__)


class BatchedPowerSGD(LowRank):
    """Batched PowerSGD: one P and one Q per bucket. Raises ``UnsupportedModel`` for a parameter without elements."""

    def __init__(self, spec: BatchedPowerSGDSpec, setup: Setup) -> None:
        super().__init__(spec, setup)
        for name, parameter in setup.parameters.items():
            if not parameter.numel():
                raise UnsupportedModel(
                    f"{name} has no elements, and an empty bucket cannot be viewed as a matrix; set its requires_grad to False"
                )
        self._squares: dict[int, _Square] = {}
        self._scratch_by_dtype: dict[torch.dtype, torch.Tensor] = {}

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return this rank's state: residuals by parameter name, padding, P and Q by bucket index, and a JSON part."""
        tensors, data = super().capture(layout, copy=copy)
        assert isinstance(data, dict)
        return tensors, {**data, "buckets": None if layout is None else [list[JsonValue](bucket) for bucket in layout]}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture`` into torch's state object. If the buckets differ from the recorded ones, padding, P
        and Q are reset with a warning. Raises ``HookStateError``."""
        if isinstance(state, dict) and layout is not None and state.get("buckets") != layout:
            _log.warning(
                "the buckets differ from the recorded ones: P and Q of the batched_powerSGD state are initialised again"
            )
            tensors = {key: t for key, t in tensors.items() if not key.startswith(_PER_SQUARE_PREFIXES)}
            if state.get("residuals"):
                blank = ((i, bucket, self.allocate_zeros(bucket)[0]) for i, bucket in enumerate(layout))
                views = (view for one in blank for view in self.residuals(*one))
                tensors |= {key: view for key, view in views if key.startswith(_PER_SQUARE_PREFIXES)}
            state = {**state, "low_rank": False}
        super().restore(tensors, state, layout)

    def allocate_zeros(self, bucket: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a residual, P and Q of zeros for a bucket of these parameters. The residual has the elements of the square."""
        side, rank = self._matrix_size(sum(self.setup.parameters[name].numel() for name in bucket))
        options: dict[str, Any] = {"dtype": self.setup.dtype(bucket[0]), "device": self.setup.device}
        return (
            torch.zeros(side * side, **options),
            torch.zeros(side, rank, **options),
            torch.zeros(side, rank, **options),
        )

    def residuals(
        self, index: int, bucket: Sequence[str], residual: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(key, view)`` of the residual: ``residual/<parameter>``, and ``residual_padding/<bucket index>`` for the
        rest."""
        yield from super().residuals(index, bucket, residual)
        length = sum(self.setup.parameters[name].numel() for name in bucket)
        yield f"residual_padding/{index}", residual[length:]

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield P and Q as a whole, under ``p/<bucket index>`` and ``q/<bucket index>``."""
        yield from ((f"p/{index}", p), (f"q/{index}", q))

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        """Return the number of elements that this rank sends for a bucket, and the stages of its compression."""
        square = self._square(bucket.index(), buffer)
        sent = square.p.numel() + square.q.numel()
        self._count_elements(bucket, buffer.numel(), sent)
        return sent, self._stages(square, bucket.index(), buffer, names)

    def _stages(self, square: _Square, index: int, buffer: torch.Tensor, names: Sequence[str]) -> Stages:
        """Compress one bucket: yield the all-reduces of P and Q, which the caller waits for, then store average and residual."""
        state = self.state
        square.load(buffer, add=index in state.error_dict)
        if not state.warm_start or index not in state.p_memory_dict:
            self._draw_random([square.q_basis])
        square.q_basis.orthogonalize(state.orthogonalization_epsilon)
        torch.mm(square.matrix, square.q, out=square.p)
        yield self._all_reduce(square.p)  # no division: P is made orthonormal
        self.watch.check_low_rank(names, square.p, [square.p], dims=(0,))
        square.p_basis.orthogonalize(state.orthogonalization_epsilon)
        square.transposed.compute()
        yield self._all_reduce(square.q)
        square.q.div_(self.group.size())
        self.watch.check_low_rank(names, square.q, [square.q], dims=self._norm_dims)
        if state.use_error_feedback:
            state.error_dict[index] = square.flat
            square.store(buffer, self._scratch(square.flat))
        else:
            square.store(buffer, square.flat)
        if state.warm_start:
            state.p_memory_dict[index], state.q_memory_dict[index] = square.p, square.q

    def _square(self, index: int, buffer: torch.Tensor) -> _Square:
        """Return the square of bucket ``index``, over the state's residual, P and Q if the state has them."""
        state, square = self.state, self._squares.get(index)
        flat, p, q = (d.get(index) for d in (state.error_dict, state.p_memory_dict, state.q_memory_dict))
        if square is None or not square.is_reusable(buffer, flat, p, q):
            side, rank = self._matrix_size(buffer.numel())
            square = self._squares[index] = _Square(
                buffer.numel(),
                buffer.new_zeros(side * side) if flat is None else flat,
                buffer.new_empty(side, rank) if p is None else p,
                buffer.new_empty(side, rank) if q is None else q,
                self._trial_results,
            )
        return square

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised flat memory of the size and dtype of ``like``, which all buckets of a dtype share."""
        space = self._scratch_by_dtype.get(like.dtype)
        if space is None or space.numel() < like.numel():
            space = self._scratch_by_dtype[like.dtype] = torch.empty_like(like)
        return space[: like.numel()]

    def _matrix_size(self, length: int) -> tuple[int, int]:
        """Return the side of the square and the rank, for a bucket of ``length`` elements."""
        side = math.isqrt(length - 1) + 1
        return side, min(side, self.state.matrix_approximation_rank)


class _Square:
    """A bucket's square matrix with its factors P and Q. ``length``: elements of the bucket. ``flat``: the elements to compress;
    with error feedback the residual's memory."""

    def __init__(self, length: int, flat: torch.Tensor, p: torch.Tensor, q: torch.Tensor, trial_results: Tried) -> None:
        side = p.shape[0]
        self.length, self.flat, self.p, self.q = length, flat, p, q
        self.matrix = flat.view(side, side)
        self.p_basis, self.q_basis = Basis(p.unsqueeze(0)), Basis(q.unsqueeze(0))
        self.transposed = TransposedProduct(self.matrix, p, q, trial_results)

    def is_reusable(
        self, buffer: torch.Tensor, flat: torch.Tensor | None, p: torch.Tensor | None, q: torch.Tensor | None
    ) -> bool:
        """Return True if this square fits the bucket ``buffer`` and uses the tensors ``flat``, ``p`` and ``q``. A tensor given as
        None is not compared."""
        same = all(want is None or want is have for want, have in ((flat, self.flat), (p, self.p), (q, self.q)))
        return same and self.length == buffer.numel() and self.flat.dtype is buffer.dtype

    def load(self, gradients: torch.Tensor, *, add: bool) -> None:
        """Put the gradients into the matrix. ``add`` True: they are added to the residual that is there."""
        part, padding = self.flat[: self.length], self.flat[self.length :]
        if add:
            torch.add(gradients, part, out=part)
            padding.add_(0.0)  # as torch adds its padding, which turns -0.0 into 0.0
        else:
            part.copy_(gradients)
            padding.zero_()

    def store(self, buffer: torch.Tensor, product: torch.Tensor) -> None:
        """Compute P Q^T in ``product``, and copy it without its padding into ``buffer``, the bucket. Then subtract ``product``
        from ``flat``, unless both are the same tensor."""
        torch.mm(self.p, self.q.t(), out=product.view(self.matrix.shape))
        buffer.copy_(product[: self.length])
        if product is not self.flat:
            self.flat.sub_(product)
