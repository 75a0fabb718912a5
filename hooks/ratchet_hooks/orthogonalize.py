"""Orthonormal columns, in the bits of torch's PowerSGD hooks."""

from __future__ import annotations

import torch

_HALF = (torch.float16, torch.bfloat16)


class Basis:
    """A batch of matrices, ``b x n x r`` with ``r <= n``, whose columns are made orthonormal in place, step after step.

    torch's ``_orthogonalize`` over views that are made once: Gram-Schmidt up to rank 2 and in 16 bits (there is no QR for those),
    else a QR factorisation, which ignores epsilon.
    """

    def __init__(self, matrices: torch.Tensor) -> None:
        batch, rows, rank = matrices.shape
        if rank > rows:
            raise ValueError(f"{rank} columns of {rows} elements cannot be orthonormal")
        self.matrices = matrices
        self._triangle: torch.Tensor | None = None
        self._columns: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # each with those behind it
        if rank > 2 and matrices.dtype not in _HALF:
            self._triangle = matrices.new_empty(batch, rank, rank)
        else:
            rest = [matrices[:, :, i + 1 :] for i in range(rank - 1)]
            self._columns = list(zip(torch.split(matrices, 1, dim=2), [*rest, None], strict=True))

    def orthogonalize(self, epsilon: float) -> None:
        """``epsilon`` is added to the norms; where it is 0, a column of zeros becomes NaN."""
        if self._triangle is not None:
            torch.linalg.qr(self.matrices, out=(self.matrices, self._triangle))
        for column, rest in self._columns:
            norms = torch.linalg.vector_norm(column, 2, 1, True)
            column.div_(norms.add_(epsilon) if epsilon else norms)
            if rest is not None:
                rest.sub_(torch.sum(column * rest, dim=1, keepdim=True).mul(column))
