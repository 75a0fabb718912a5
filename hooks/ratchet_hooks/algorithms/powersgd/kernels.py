"""Kernels of PowerSGD: M^T P, P Q^T and orthonormal columns, each with the bits of torch's PowerSGD hooks. On CPUs, faster
products are used for shapes for which a trial gave the same bits."""

from __future__ import annotations

from typing import Final, TypeAlias

import torch

from ratchet_hooks.algorithms.state_version import same_bits

MIN_ELEMENTS: Final = 1 << 16  # elements of M; below this, calls cost more than they save
MAX_ELEMENTS: Final = 1 << 26  # a trial temporarily needs a second matrix
_PERIOD: Final = 65521  # of a trial's values: a prime, so that rows differ
_TRANSPOSED_ROUNDS: Final = 4
_CACHE_LINE_BYTES: Final = 64  # bytes

Tried: TypeAlias = dict[tuple[object, ...], bool]
"""The result of the trial by shape, so that equal layers are tried once."""


class TransposedProduct:
    """Computes ``q = M^T p`` with the bits of ``torch.mm`` or ``torch.bmm``. ``matrix``: ``n x m``; ``p``: ``n x r``; ``q``:
    ``m x r``; or a batch of each. ``trial_results``: shared with other products."""

    def __init__(self, matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor, trial_results: Tried) -> None:
        self._transposed, self._p, self._q = matrix.mT, p, q
        self._product = torch.mm if matrix.dim() == 2 else torch.bmm
        self._trial_results = trial_results
        self._threads = 0
        self._columns: _Columns | None = None

    def compute(self) -> None:
        """Compute the product of the present values into ``q``. May run a trial, at first and when the number of threads has
        changed."""
        threads = torch.get_num_threads()
        if threads != self._threads:  # the order of additions depends on it
            self._threads = threads
            self._columns = self._choose()
        if self._columns is None:
            self._product(self._transposed, self._p, out=self._q)
        else:
            self._columns.compute(self._transposed, self._p, self._q)

    def _choose(self) -> _Columns | None:
        """Return memory for the product column by column, if a trial has shown that it gives the bits of the matrix product.
        Otherwise return None: ``compute`` then uses the matrix product."""
        transposed, rank = self._transposed, self._p.shape[-1]
        one = transposed.dim() == 2 or len(transposed) == 1
        full = transposed.device.type == "cpu" and transposed.dtype in (torch.float32, torch.float64)
        if rank < 2 or not one or not full or not MIN_ELEMENTS <= transposed.numel() <= MAX_ELEMENTS:
            return None
        # The other threads of a product do not flush, and the two products divide the elements among threads differently.
        if self._threads > 1 and _flushes_denormals():
            return None
        # MKL multiplies a transposed matrix by a few columns at a tenth of the speed of matrix-vector products.
        columns = _Columns(self._p, self._q)
        places = tuple(cache_line_offset(of) for of in (transposed, self._p, self._q))
        case = (transposed.shape, transposed.dtype, rank, places, self._threads)
        if case not in self._trial_results:
            self._trial_results[case] = self._is_identical(columns)
        return columns if self._trial_results[case] else None

    def _is_identical(self, columns: _Columns) -> bool:
        """Return whether the product column by column has the bits of the matrix product, in trials with these shapes."""
        generator = torch.Generator().manual_seed(0)
        matrix, p, q, other = (empty_aligned_like(of) for of in (self._transposed.mT, self._p, self._q, self._q))
        n = matrix.shape[-2]
        # The order of additions does not depend on the values. Where rows cancel each other, only rounding is left, which reveals
        # another order; where all values are zero, the sign does.
        for zeros in (False,) * _TRANSPOSED_ROUNDS + (True,):
            values = torch.randn(_PERIOD, generator=generator)
            p.normal_(generator=generator)
            for part in torch.split(matrix.view(-1), _PERIOD):
                part.copy_(values[: len(part)])
            if zeros:
                matrix[..., ::2].zero_()
                p[..., 0].abs_().neg_()
            else:
                order = torch.randperm(n, generator=generator)
                some, others = order[: n // 2], order[n // 2 : n // 2 * 2]
                rows, few = matrix.view(matrix.shape[-2:]), max(1, _PERIOD // matrix.shape[-1])
                for these, those in zip(
                    torch.split(some, few), torch.split(others, few), strict=True
                ):  # no copy of half the matrix
                    rows[those] = rows[these].neg_()
                p[..., others, :] = p[..., some, :]
            self._product(matrix.mT, p, out=q)
            columns.compute(matrix.mT, p, other)
            if not same_bits(q, other):
                return False
        return True


def cache_line_offset(tensor: torch.Tensor) -> int:
    """Return the offset of the tensor's memory within a cache line, in elements. The order of additions may depend on it."""
    return tensor.data_ptr() % _CACHE_LINE_BYTES // tensor.element_size()


def empty_aligned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new uninitialised tensor of the same shape, at the same offset within a cache line."""
    begin = cache_line_offset(tensor)
    return tensor.new_empty(begin + tensor.numel())[begin:].view(tensor.shape)


def _flushes_denormals() -> bool:
    """Return True if this thread treats denormals as zero (``torch.set_flush_denormal``)."""
    return not bool(torch.tensor(1e-310, dtype=torch.float64) * 1.0)


class _Columns:
    """Memory for copies of ``p`` and ``q`` whose columns are contiguous: products with strided vectors are slower."""

    def __init__(self, p: torch.Tensor, q: torch.Tensor) -> None:
        self._p, self._q = (of.new_empty(of.shape[-1], of.shape[-2]) for of in (p, q))
        self._column_pairs = list(zip(self._p.unbind(), self._q.unbind(), strict=True))

    def compute(self, transposed: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
        """Compute ``q = transposed p``, one matrix-vector product per column."""
        matrix = transposed if transposed.dim() == 2 else transposed[0]
        self._p.copy_(p.view(p.shape[-2:]).t())
        for column, out in self._column_pairs:
            torch.mv(matrix, column, out=out)
        q.view(q.shape[-2:]).copy_(self._q.t())


_HALF = (torch.float16, torch.bfloat16)


class Basis:
    """Matrices, ``b x n x r``, whose columns ``orthogonalize`` makes orthonormal as torch does. Raises ``ValueError`` if
    ``r > n``."""

    def __init__(self, matrices: torch.Tensor) -> None:
        batch, rows, rank = matrices.shape
        if rank > rows:
            raise ValueError(f"{rank} columns of {rows} elements cannot be orthonormal")
        self.matrices = matrices
        self._triangle: torch.Tensor | None = None
        self._columns: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # each with the columns after it
        if rank > 2 and matrices.dtype not in _HALF:
            self._triangle = matrices.new_empty(batch, rank, rank)
        else:
            rest = [matrices[:, :, i + 1 :] for i in range(rank - 1)]
            self._columns = list(zip(torch.split(matrices, 1, dim=2), [*rest, None], strict=True))

    def orthogonalize(self, epsilon: float) -> None:
        """Make the columns orthonormal in place. ``epsilon`` is added to the norms in Gram-Schmidt; a QR factorisation ignores
        it."""
        if self._triangle is not None:
            torch.linalg.qr(self.matrices, out=(self.matrices, self._triangle))
        for column, rest in self._columns:
            norms = torch.linalg.vector_norm(column, 2, 1, True)
            column.div_(norms.add_(epsilon) if epsilon else norms)
            if rest is not None:
                rest.sub_(torch.sum(column * rest, dim=1, keepdim=True).mul(column))


_ROWS: Final = 16
_ROUNDS: Final = 2


class OuterProduct:
    """Computes ``average = P Q^T`` with the bits of ``torch.bmm``. ``average``: ``b x n x m``; ``p``: ``b x n x r``; ``q``:
    ``b x m x r``."""

    def __init__(self, average: torch.Tensor, p: torch.Tensor, q: torch.Tensor, trial_results: Tried) -> None:
        self._average, self._p, self._q = average, p, q
        self._trial_results = trial_results
        self._threads = 0
        self._blocked = False

    def compute(self) -> None:
        """Compute ``P Q^T`` into ``average``. The first call may run a trial to choose between two ways to compute the product.
        So may a call after the number of threads has changed."""
        threads = torch.get_num_threads()
        if threads != self._threads:  # the order of additions may depend on it
            self._threads = threads
            self._blocked = self._choose()
        if self._blocked:
            _blocked_bmm(self._average, self._p, self._q)
        else:
            torch.bmm(self._p, self._q.mT, out=self._average)

    def _choose(self) -> bool:
        """True if the product in blocks of rows is worth trying here and gives the bits of ``torch.bmm``."""
        average, rank = self._average, self._p.shape[-1]
        full = average.device.type == "cpu" and average.dtype in (torch.float32, torch.float64)
        if rank < 2 or not full or len(average) != 1 or average.shape[1] % _ROWS:
            return False
        if not MIN_ELEMENTS <= average.numel() <= MAX_ELEMENTS:
            return False
        case = (
            "outer",
            average.shape,
            average.dtype,
            rank,
            *map(cache_line_offset, (average, self._p, self._q)),
            self._threads,
        )
        if case not in self._trial_results:
            self._trial_results[case] = self._is_identical()
        return self._trial_results[case]

    def _is_identical(self) -> bool:
        """Return whether the product in blocks of rows has the bits of ``torch.bmm``, in trials. Overwrites ``average``."""
        generator = torch.Generator().manual_seed(0)
        p, q, other = (empty_aligned_like(of) for of in (self._p, self._q, self._average))
        # The order of additions does not depend on the values; where all products are zero, the sign of the first shows it.
        for zeros in (False,) * _ROUNDS + (True,):
            for factor in (p, q):
                factor.normal_(generator=generator)
            if zeros:
                p[:, ::2].zero_().neg_()
                q[:, ::3].zero_()
            torch.bmm(p, q.mT, out=other)
            _blocked_bmm(self._average, p, q)
            if not same_bits(self._average, other):
                return False
        return True


def _blocked_bmm(average: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Compute ``average = p q^T``, for a batch of one, in blocks of ``_ROWS`` rows, which must divide the rows."""
    _, n, m = average.shape
    # MKL packs even small factors as for large matrices: blocks, as a batch, take less than half the time.
    blocks = n // _ROWS
    torch.bmm(p.view(blocks, _ROWS, -1), q.mT.expand(blocks, -1, m), out=average.view(blocks, _ROWS, m))
