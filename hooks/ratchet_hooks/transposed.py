"""M^T P for PowerSGD, column by column where that is faster and gives the same bits.

On CPUs MKL multiplies a transposed matrix by a few columns at a tenth of the speed at which it reads the matrix; one
matrix-vector product per column runs at that speed. Both add up in the same order on the machines that were looked at, but no
document promises it: the shape is tried first, and where one bit differs, the matrix product stays.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import torch

from ratchet_hooks.states import same_bits

WORTH_IT: Final = 1 << 16  # elements of M; below, calls cost more than they save
TOO_LARGE: Final = 1 << 26  # a trial needs a second matrix for a moment
_PERIOD: Final = 65521  # of a trial's values: a prime, so that rows differ
_ROUNDS: Final = 4
_LINE: Final = 64  # bytes

Tried: TypeAlias = dict[tuple[object, ...], bool]
"""What was found for a shape, so that equal layers are tried once."""


class TransposedProduct:
    """``q = M^T p`` through views that are made once.

    ``matrix``: ``n x m``, ``p``: ``n x r``, ``q``: ``m x r``, or a batch of each; the bits of ``torch.mm`` or ``torch.bmm``.
    """

    def __init__(self, matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor, tried: Tried) -> None:
        self._transposed, self._p, self._q = matrix.mT, p, q
        self._product = torch.mm if matrix.dim() == 2 else torch.bmm
        self._tried = tried
        self._threads = 0
        self._columns: _Columns | None = None

    def compute(self) -> None:
        """Into ``q``."""
        threads = torch.get_num_threads()
        if threads != self._threads:  # the order of additions depends on it
            self._threads = threads
            self._columns = self._choose()
        if self._columns is None:
            self._product(self._transposed, self._p, out=self._q)
        else:
            self._columns.compute(self._transposed, self._p, self._q)

    def _choose(self) -> _Columns | None:
        transposed, rank = self._transposed, self._p.shape[-1]
        one = transposed.dim() == 2 or len(transposed) == 1
        full = transposed.device.type == "cpu" and transposed.dtype in (torch.float32, torch.float64)
        if rank < 2 or not one or not full or not WORTH_IT <= transposed.numel() <= TOO_LARGE:
            return None
        if self._threads > 1 and _flushes():
            return None
        columns = _Columns(self._p, self._q)
        places = tuple(place(of) for of in (transposed, self._p, self._q))
        case = (transposed.shape, transposed.dtype, rank, places, self._threads)
        if case not in self._tried:
            self._tried[case] = self._same(columns)
        return columns if self._tried[case] else None

    def _same(self, columns: _Columns) -> bool:
        """Tries on matrices of these shapes and places in a cache line. The order of additions does not depend on the values.
        Where rows cancel each other, rounding is all that is left, and another order shows; where all is zero, its sign does."""
        generator = torch.Generator().manual_seed(0)
        matrix, p, q, other = (like(of) for of in (self._transposed.mT, self._p, self._q, self._q))
        n = matrix.shape[-2]
        for zeros in (False,) * _ROUNDS + (True,):
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


def place(tensor: torch.Tensor) -> int:
    """Where it begins within a cache line, in elements: how it is added up may depend on that."""
    return tensor.data_ptr() % _LINE // tensor.element_size()


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Other memory, of the same shape and place."""
    begin = place(tensor)
    return tensor.new_empty(begin + tensor.numel())[begin:].view(tensor.shape)


def _flushes() -> bool:
    """Whether this thread takes denormals for zero (``torch.set_flush_denormal``): the others that share in a product do not, and
    which of them makes an element is another one for a column than for the whole."""
    return not bool(torch.tensor(1e-310, dtype=torch.float64) * 1.0)


class _Columns:
    """Memory in which the columns of ``p`` and ``q`` are contiguous: a strided vector costs three times as much."""

    def __init__(self, p: torch.Tensor, q: torch.Tensor) -> None:
        self._p, self._q = (of.new_empty(of.shape[-1], of.shape[-2]) for of in (p, q))
        self._each = list(zip(self._p.unbind(), self._q.unbind(), strict=True))

    def compute(self, transposed: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
        matrix = transposed if transposed.dim() == 2 else transposed[0]
        self._p.copy_(p.view(p.shape[-2:]).t())
        for column, out in self._each:
            torch.mv(matrix, column, out=out)
        q.view(q.shape[-2:]).copy_(self._q.t())
