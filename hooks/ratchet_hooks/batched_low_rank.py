"""Batched PowerSGD: one square matrix per bucket, made of all its gradients one after the other and zeros at the end.

torch's ``batched_powerSGD_hook`` fails at its first compressed step, since its P and Q are no batches, which is what
``_orthogonalize`` asks for. This is the algorithm of its documentation, with the bits that its code gives once P and Q are handed
over as batches of one, but for two things: the bucket's memory is not resized to the square, for it may be what the gradients are
views of, and ``orthogonalization_epsilon`` is heeded. The state is torch's ``PowerSGDState``; a residual has the elements of the
whole square, since the product P Q^T fills it all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ratchet_hooks import powersgd
from ratchet_hooks.algorithm import Setup
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.codec import Tensors
from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.layout import Layout
from ratchet_hooks.low_rank import LowRank, Stages
from ratchet_hooks.orthogonalize import Basis
from ratchet_hooks.specs_powersgd import BatchedPowerSGDSpec
from ratchet_hooks.transposed import TransposedProduct, Tried

_OF_THE_SQUARE = ("residual_padding/", "p/", "q/")
_log = logging.getLogger(__name__)


class BatchedPowerSGD(LowRank):
    """One P and one Q per bucket."""

    def __init__(self, spec: BatchedPowerSGDSpec, setup: Setup) -> None:
        super().__init__(spec, setup)
        for name, parameter in setup.parameters.items():
            if not parameter.numel():
                raise UnsupportedModel(
                    f"{name} has no elements, and there is no matrix of a bucket without any; set its requires_grad to False"
                )
        self._squares: dict[int, _Square] = {}
        self._spaces: dict[torch.dtype, torch.Tensor] = {}

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Residuals by parameter name; what belongs to a square as a whole by the bucket's index, with the buckets."""
        tensors, data = powersgd.capture(self.state, layout, self, copy=copy)
        return tensors, {**data, "buckets": None if layout is None else [list[JsonValue](bucket) for bucket in layout]}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Into torch's state object. On other buckets than the recorded ones there are other squares: only the parameters'
        residuals fit, the padding's are zero and Q is drawn anew; that is logged."""
        if isinstance(state, dict) and layout is not None and state.get("buckets") != layout:
            _log.warning("other buckets than the recorded ones: of the state of batched_powerSGD, P, Q are made anew")
            tensors = {key: t for key, t in tensors.items() if not key.startswith(_OF_THE_SQUARE)}
            if state.get("residuals"):
                blank = ((i, bucket, self.blank(bucket)[0]) for i, bucket in enumerate(layout))
                views = (view for one in blank for view in self.residuals(*one))
                tensors |= {key: view for key, view in views if key.startswith(_OF_THE_SQUARE)}
            state = {**state, "low_rank": False}
        super().restore(tensors, state, layout)

    def blank(self, bucket: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A residual, P and Q of zeros, for a bucket of these parameters."""
        side, rank = self._sides(sum(self.setup.parameters[name].numel() for name in bucket))
        options: dict[str, Any] = {"dtype": self.setup.dtype(bucket[0]), "device": self.setup.device}
        return (
            torch.zeros(side * side, **options),
            torch.zeros(side, rank, **options),
            torch.zeros(side, rank, **options),
        )

    def residuals(
        self, index: int, bucket: Sequence[str], residual: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """By parameter name; the padding's by the bucket's index."""
        yield from super().residuals(index, bucket, residual)
        length = sum(self.setup.parameters[name].numel() for name in bucket)
        yield f"residual_padding/{index}", residual[length:]

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """By the bucket's index."""
        yield from ((f"p/{index}", p), (f"q/{index}", q))

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        square = self._square(bucket.index(), buffer)
        sent = square.p.numel() + square.q.numel()
        self._count(bucket, buffer.numel(), sent)
        return sent, self._stages(square, bucket.index(), buffer, names)

    def _stages(self, square: _Square, index: int, buffer: torch.Tensor, names: Sequence[str]) -> Stages:
        state = self.state
        square.load(buffer, add=index in state.error_dict)
        if not state.warm_start or index not in state.p_memory_dict:
            self._draw([square.q_basis])
        square.q_basis.orthogonalize(state.orthogonalization_epsilon)
        torch.mm(square.matrix, square.q, out=square.p)
        yield self._reduce(square.p)  # no division: P is made orthonormal
        self.watch.low_rank(names, square.p, [square.p], along=(0,))
        square.p_basis.orthogonalize(state.orthogonalization_epsilon)
        square.transposed.compute()
        yield self._reduce(square.q)
        square.q.div_(self.group.size())
        self.watch.low_rank(names, square.q, [square.q], along=self._along)
        if state.use_error_feedback:
            state.error_dict[index] = square.flat
            square.store(buffer, self._space(square.flat))
        else:
            square.store(buffer, square.flat)
        if state.warm_start:
            state.p_memory_dict[index], state.q_memory_dict[index] = square.p, square.q

    def _square(self, index: int, buffer: torch.Tensor) -> _Square:
        """The bucket's, on the memory of its residual, P and Q where there are any."""
        state, square = self.state, self._squares.get(index)
        flat, p, q = (d.get(index) for d in (state.error_dict, state.p_memory_dict, state.q_memory_dict))
        if square is None or not square.fits(buffer, flat, p, q):
            side, rank = self._sides(buffer.numel())
            square = self._squares[index] = _Square(
                buffer.numel(),
                buffer.new_zeros(side * side) if flat is None else flat,
                buffer.new_empty(side, rank) if p is None else p,
                buffer.new_empty(side, rank) if q is None else q,
                self._tried,
            )
        return square

    def _space(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a product; that of the largest bucket serves all, since they come one after the other."""
        space = self._spaces.get(like.dtype)
        if space is None or space.numel() < like.numel():
            space = self._spaces[like.dtype] = torch.empty_like(like)
        return space[: like.numel()]

    def _sides(self, length: int) -> tuple[int, int]:
        """(side of the square, rank) for a bucket of ``length`` elements."""
        side = math.isqrt(length - 1) + 1
        return side, min(side, self.state.matrix_approximation_rank)


class _Square:
    """A bucket's square matrix with its factors.

    ``flat``: what is compressed, ``side * side`` elements; under error feedback the residual's memory, else memory of its own.
    """

    def __init__(self, length: int, flat: torch.Tensor, p: torch.Tensor, q: torch.Tensor, tried: Tried) -> None:
        side = p.shape[0]
        self.length, self.flat, self.p, self.q = length, flat, p, q
        self.matrix = flat.view(side, side)
        self.p_basis, self.q_basis = Basis(p.unsqueeze(0)), Basis(q.unsqueeze(0))
        self.transposed = TransposedProduct(self.matrix, p, q, tried)

    def fits(
        self, buffer: torch.Tensor, flat: torch.Tensor | None, p: torch.Tensor | None, q: torch.Tensor | None
    ) -> bool:
        """Whether it is good for this bucket and on these tensors; None: there are none yet."""
        same = all(want is None or want is have for want, have in ((flat, self.flat), (p, self.p), (q, self.q)))
        return same and self.length == buffer.numel() and self.flat.dtype is buffer.dtype

    def load(self, gradients: torch.Tensor, *, add: bool) -> None:
        """Gradients into the matrix, added to the residual or in the place of what was there."""
        part, padding = self.flat[: self.length], self.flat[self.length :]
        if add:
            torch.add(gradients, part, out=part)
            padding.add_(0.0)  # as torch adds its padding, which makes 0.0 of -0.0
        else:
            part.copy_(gradients)
            padding.zero_()

    def store(self, buffer: torch.Tensor, product: torch.Tensor) -> None:
        """P Q^T into the bucket, by way of ``product``, flat memory for it. What the matrix is without it remains in ``flat``,
        unless ``product`` is ``flat`` itself."""
        torch.mm(self.p, self.q.t(), out=product.view(self.matrix.shape))
        buffer.copy_(product[: self.length])
        if product is not self.flat:
            self.flat.sub_(product)
