"""The views of a bucket, P and Q through which PowerSGD works, made once and used step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ratchet_hooks.orthogonalize import Basis
from ratchet_hooks.outer import OuterProduct
from ratchet_hooks.powersgd import LowRankPlace, PowerSGDState, factor_numels, factor_views, low_rank_places
from ratchet_hooks.transposed import TransposedProduct, Tried


@dataclass(frozen=True)
class Product:
    """One matrix M of ``n x m``, or ``b`` of them in one batch, and the factors of their average, ``P Q^T``."""

    matrix: torch.Tensor
    """``b x n x m``: a view of gradients and residual added up; of several matrices, memory for a copy of them."""
    p: Basis
    """``b x n x r``"""
    q: Basis
    """``b x m x r``"""
    average: torch.Tensor
    """``b x n x m``: a view of the bucket; of several matrices, the memory of ``matrix``."""
    sources: list[torch.Tensor]
    """Of several matrices: each by itself, ``n x m``."""
    targets: list[torch.Tensor]
    """Of several matrices: the place in the bucket of each."""
    transposed: TransposedProduct
    """``q = M^T p``"""
    outer: OuterProduct
    """``average = P Q^T``"""


class Plan:
    """All views of one bucket; good for as long as ``shows`` says so.

    ``total`` is gradients and residual added up, which is what is compressed; it lies in the residual's memory, or without error
    feedback in the bucket's. ``p`` and ``q`` are flat, in the order of ``powersgd.low_rank_places``; ``small`` holds what is not
    compressed. Since a plan keeps the bucket's memory alive, an equal address means the same memory.
    """

    def __init__(
        self, state: PowerSGDState, shapes: Mapping[str, torch.Size], buffer: torch.Tensor, total: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor] | None, tried: Tried,
    ) -> None:  # fmt: skip
        """``shapes``: of the bucket's parameters, by name, in order. ``factors``: P and Q of the step before."""
        self._tried = tried
        self.names, self.buffer, self.total = list(shapes), buffer, total
        numels = [shape.numel() for shape in shapes.values()]
        cut, out = (dict(zip(shapes, torch.split(flat, numels), strict=True)) for flat in (total, buffer))
        places = low_rank_places(state, shapes)
        self.low_names = [place.name for place in places]
        numel_p, numel_q = factor_numels(places)
        self.p, self.q = factors or (buffer.new_empty(numel_p), buffer.new_empty(numel_q))
        self.p_parts, self.q_parts = factor_views(places, self.p, self.q)
        self.products: list[Product] = []
        for group in _groups(places, batched=state.batch_tensors_with_same_shape):
            self.products.append(self._product(group, cut, out))
        low = set(self.low_names)
        self.small_names = [name for name in shapes if name not in low]
        self.small_sources, self.small_targets = ([flat[name] for name in self.small_names] for flat in (cut, out))
        sizes = [shapes[name].numel() for name in self.small_names]
        self.small = buffer.new_empty(sum(sizes))
        self.small_parts = list(torch.split(self.small, sizes))
        self.before, self.sent = buffer.numel(), self.small.numel() + numel_p + numel_q

    def shows(
        self, buffer: torch.Tensor, total: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor] | None,
        names: Sequence[str],
    ) -> bool:  # fmt: skip
        """Whether the views are of these very tensors."""
        return (
            self.buffer.data_ptr() == buffer.data_ptr()
            and self.buffer.numel() == buffer.numel()
            and self.buffer.dtype is buffer.dtype
            and (self.total is total or total is buffer)
            and (factors is None or (self.p is factors[0] and self.q is factors[1]))
            and self.names == names
        )

    def _product(
        self, group: Sequence[LowRankPlace], cut: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]
    ) -> Product:
        first, count = group[0], len(group)
        (n, rank), m = first.p_shape, first.q_shape[0]
        p = self.p.narrow(0, first.p_start, count * n * rank).view(count, n, rank)
        q = self.q.narrow(0, first.q_start, count * m * rank).view(count, m, rank)
        if count == 1:
            sources, targets = [], []
            matrix, average = (flat[first.name].view(1, n, m) for flat in (cut, out))
        else:
            sources, targets = ([flat[place.name].view(n, m) for place in group] for flat in (cut, out))
            matrix = average = self.buffer.new_empty(count, n, m)
        transposed = TransposedProduct(matrix, p, q, self._tried)
        outer = OuterProduct(average, p, q, self._tried)
        return Product(matrix, Basis(p), Basis(q), average, sources, targets, transposed, outer)


def _groups(places: Sequence[LowRankPlace], *, batched: bool) -> list[list[LowRankPlace]]:
    """Those of equal shape together, which follow one another, or each by itself."""
    if not batched:
        return [[place] for place in places]
    return [list(group) for _, group in groupby(places, key=lambda place: (place.p_shape, place.q_shape))]
