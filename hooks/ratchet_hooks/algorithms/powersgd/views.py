"""PowerSGD's views of a bucket, P and Q, made once and used step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ratchet_hooks.algorithms.powersgd.kernels import Basis, OuterProduct, TransposedProduct, Tried
from ratchet_hooks.algorithms.powersgd.state_by_name import (
    LowRankPlace,
    PowerSGDState,
    factor_numels,
    factor_views,
    low_rank_places,
)


@dataclass(frozen=True)
class Product:
    """Tensors for the compression of one matrix M, or of ``b`` matrices of equal shape as a batch. ``P Q^T`` approximates the
    average of M over the ranks."""

    matrix: torch.Tensor
    """``b x n x m``: a view of the sum of gradients and residual; for several matrices, memory for a copy of them."""
    p: Basis
    """``b x n x r``"""
    q: Basis
    """``b x m x r``"""
    average: torch.Tensor
    """``b x n x m``: a view of the bucket; for several matrices, the memory of ``matrix``."""
    sources: list[torch.Tensor]
    """For several matrices: the single ones, ``n x m``."""
    targets: list[torch.Tensor]
    """For several matrices: the place of each in the bucket."""
    transposed: TransposedProduct
    """``q = M^T p``"""
    outer: OuterProduct
    """``average = P Q^T``"""


class Plan:
    """All views of one bucket. ``total``: the sum of gradients and residual, which is compressed. ``p``, ``q``: flat factors.
    ``uncompressed``: memory for the uncompressed gradients."""

    def __init__(
        self, state: PowerSGDState, shapes: Mapping[str, torch.Size], buffer: torch.Tensor, total: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor] | None, trial_results: Tried,
    ) -> None:  # fmt: skip
        """``total``: the sum of gradients and residual. ``factors``: P and Q of the previous step; None: new, undefined ones."""
        self._trial_results = trial_results
        self.names, self.buffer, self.total = list(shapes), buffer, total
        numels = [shape.numel() for shape in shapes.values()]
        cut, out = (dict(zip(shapes, torch.split(flat, numels), strict=True)) for flat in (total, buffer))
        places = low_rank_places(state, shapes)
        self.compressed_names = [place.name for place in places]
        numel_p, numel_q = factor_numels(places)
        self.p, self.q = factors or (buffer.new_empty(numel_p), buffer.new_empty(numel_q))
        self.p_parts, self.q_parts = factor_views(places, self.p, self.q)
        self.products: list[Product] = []
        for group in _groups(places, batched=state.batch_tensors_with_same_shape):
            self.products.append(self._product(group, cut, out))
        low = set(self.compressed_names)
        self.uncompressed_names = [name for name in shapes if name not in low]
        self.uncompressed_sources, self.uncompressed_targets = (
            [flat[name] for name in self.uncompressed_names] for flat in (cut, out)
        )
        sizes = [shapes[name].numel() for name in self.uncompressed_names]
        self.uncompressed = buffer.new_empty(sum(sizes))
        self.uncompressed_parts = list(torch.split(self.uncompressed, sizes))
        self.elements_before, self.elements_sent = buffer.numel(), self.uncompressed.numel() + numel_p + numel_q

    def is_reusable(
        self, buffer: torch.Tensor, total: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor] | None,
        names: Sequence[str],
    ) -> bool:  # fmt: skip
        """Return True if the views fit the bucket ``buffer`` and ``names``, and use the tensors ``total`` and ``factors``."""
        return (
            # The plan keeps the bucket's memory alive, so an equal address means the same memory.
            self.buffer.data_ptr() == buffer.data_ptr()
            and self.buffer.numel() == buffer.numel()
            and self.buffer.dtype is buffer.dtype
            and (self.total is total or total is buffer)
            and (factors is None or (self.p is factors[0] and self.q is factors[1]))
            and self.names == names
        )

    def _product(
        self, group: Sequence[LowRankPlace], inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> Product:
        """Return the views for ``group``, parameters that are compressed together. ``inputs``: each parameter's part of
        ``total``, by name. ``outputs``: each parameter's part of the bucket, by name."""
        first, count = group[0], len(group)
        (n, rank), m = first.p_shape, first.q_shape[0]
        p = self.p.narrow(0, first.p_start, count * n * rank).view(count, n, rank)
        q = self.q.narrow(0, first.q_start, count * m * rank).view(count, m, rank)
        if count == 1:
            sources, targets = [], []
            matrix, average = (flat[first.name].view(1, n, m) for flat in (inputs, outputs))
        else:
            sources, targets = ([flat[place.name].view(n, m) for place in group] for flat in (inputs, outputs))
            matrix = average = self.buffer.new_empty(count, n, m)
        transposed = TransposedProduct(matrix, p, q, self._trial_results)
        outer = OuterProduct(average, p, q, self._trial_results)
        return Product(matrix, Basis(p), Basis(q), average, sources, targets, transposed, outer)


def _groups(places: Sequence[LowRankPlace], *, batched: bool) -> list[list[LowRankPlace]]:
    """Split the places into groups that are compressed together: with ``batched``, runs of equal shape, otherwise single
    places."""
    if not batched:
        return [[place] for place in places]
    return [list(group) for _, group in groupby(places, key=lambda place: (place.p_shape, place.q_shape))]
