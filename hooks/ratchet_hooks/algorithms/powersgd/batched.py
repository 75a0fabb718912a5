"""Batched PowerSGD: one square matrix per bucket, made of all its gradients one after the other and zeros at the end.

torch's ``batched_powerSGD_hook`` fails at its first compressed step, since ``_orthogonalize`` needs batches, which its P and Q
are not. This is the algorithm of its documentation, with the bits that its code gives once P and Q are passed as batches of one,
with two differences: the bucket's memory is not resized to the square, since gradients may be views of it, and
``orthogonalization_epsilon`` is applied. The state is torch's ``PowerSGDState``; a residual has the elements of the whole square,
since the product P Q^T fills all of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ratchet_hooks.algorithms.base import Setup
from ratchet_hooks.algorithms.powersgd import state_by_name
from ratchet_hooks.algorithms.powersgd.kernels import Basis, TransposedProduct, Tried
from ratchet_hooks.algorithms.powersgd.powersgd import LowRank, Stages
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
        """Return this rank's state: residuals by parameter name; what belongs to a square as a whole (padding, P, Q) by the
        bucket's index. The JSON part also contains the buckets. All else is as in ``LowRank.capture``."""
        tensors, data = state_by_name.capture(self.state, layout, self, copy=copy)
        return tensors, {**data, "buckets": None if layout is None else [list[JsonValue](bucket) for bucket in layout]}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture`` into torch's state object. Raises ``HookStateError`` naming the entry that does not
        fit.

        If the buckets are not the recorded ones, their squares differ, and a warning is logged. The parameters' residuals, the
        iteration, the generator and the statistics are then restored. The residuals of the padding become zero, P and Q are
        dropped, and the next step begins with a new random Q.
        """
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
        """Return a residual, P and Q of zeros, for a bucket of these parameters; the residual has the elements of the whole
        square."""
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
        rest of the square."""
        yield from super().residuals(index, bucket, residual)
        length = sum(self.setup.parameters[name].numel() for name in bucket)
        yield f"residual_padding/{index}", residual[length:]

    def factors(
        self, index: int, bucket: Sequence[str], p: torch.Tensor, q: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield P and Q as a whole, under ``p/<bucket index>`` and ``q/<bucket index>``."""
        yield from ((f"p/{index}", p), (f"q/{index}", q))

    def _compress(self, bucket: Any, buffer: torch.Tensor, names: Sequence[str]) -> tuple[int, Stages]:
        """Return the number of elements that this rank sends for a bucket, and the stages of its compression, which have not
        begun. Adds the bucket to the compression statistics."""
        square = self._square(bucket.index(), buffer)
        sent = square.p.numel() + square.q.numel()
        self._count_elements(bucket, buffer.numel(), sent)
        return sent, self._stages(square, bucket.index(), buffer, names)

    def _stages(self, square: _Square, index: int, buffer: torch.Tensor, names: Sequence[str]) -> Stages:
        """Compress one bucket in stages: a generator that yields the all-reduce of P, then that of Q, and then puts the average
        into ``buffer`` and, with error feedback, the rest into the residual. The caller waits for a yielded all-reduce before
        it continues."""
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
        """Return the square of bucket ``index``. It uses the memory of the bucket's residual, P and Q in the state. For one that
        the state does not have, it uses the memory of the previous step's square if that fits, otherwise new memory."""
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
        """Return uninitialised flat memory of the size and dtype of ``like`` for a product. All buckets of a dtype share the
        memory of the largest one, since they are computed one after the other."""
        space = self._scratch_by_dtype.get(like.dtype)
        if space is None or space.numel() < like.numel():
            space = self._scratch_by_dtype[like.dtype] = torch.empty_like(like)
        return space[: like.numel()]

    def _matrix_size(self, length: int) -> tuple[int, int]:
        """Return the side of the square and the rank, for a bucket of ``length`` elements."""
        side = math.isqrt(length - 1) + 1
        return side, min(side, self.state.matrix_approximation_rank)


class _Square:
    """A bucket's square matrix with its factors P and Q.

    ``length``: elements of the bucket. ``flat``: the ``side * side`` elements to compress; with error feedback the residual's
    memory, otherwise separate memory.
    """

    def __init__(self, length: int, flat: torch.Tensor, p: torch.Tensor, q: torch.Tensor, trial_results: Tried) -> None:
        side = p.shape[0]
        self.length, self.flat, self.p, self.q = length, flat, p, q
        self.matrix = flat.view(side, side)
        self.p_basis, self.q_basis = Basis(p.unsqueeze(0)), Basis(q.unsqueeze(0))
        self.transposed = TransposedProduct(self.matrix, p, q, trial_results)

    def is_reusable(
        self, buffer: torch.Tensor, flat: torch.Tensor | None, p: torch.Tensor | None, q: torch.Tensor | None
    ) -> bool:
        """True if this square has the size and dtype of the bucket ``buffer`` and uses exactly the tensors ``flat``, ``p`` and
        ``q``. None for one of these: the state has no such tensor yet, so any fits."""
        same = all(want is None or want is have for want, have in ((flat, self.flat), (p, self.p), (q, self.q)))
        return same and self.length == buffer.numel() and self.flat.dtype is buffer.dtype

    def load(self, gradients: torch.Tensor, *, add: bool) -> None:
        """Put the gradients into the matrix. ``add`` True: they are added to the residual that is there. ``add`` False: they
        replace what is there, and the padding becomes zeros."""
        part, padding = self.flat[: self.length], self.flat[self.length :]
        if add:
            torch.add(gradients, part, out=part)
            padding.add_(0.0)  # as torch adds its padding, which turns -0.0 into 0.0
        else:
            part.copy_(gradients)
            padding.zero_()

    def store(self, buffer: torch.Tensor, product: torch.Tensor) -> None:
        """Compute P Q^T and copy its elements, without the padding, into the bucket. ``product``: flat memory for P Q^T.
        Afterwards ``flat`` contains the matrix minus the product, unless ``product`` is ``flat`` itself."""
        torch.mm(self.p, self.q.t(), out=product.view(self.matrix.shape))
        buffer.copy_(product[: self.length])
        if product is not self.flat:
            self.flat.sub_(product)
