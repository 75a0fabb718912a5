"""P Q^T for PowerSGD, in blocks of rows where that is faster and gives the same bits.

On CPUs MKL takes a product of few columns by few rows for one of large matrices, and packs them: blocks of sixteen rows, as a
batch, take less than half the time. An element is the same sum of ``r`` products; that it is added up in the same order is tried
for each shape first, as ``transposed`` does.
"""

from __future__ import annotations

from typing import Final

import torch

from ratchet_hooks.states import same_bits
from ratchet_hooks.transposed import TOO_LARGE, WORTH_IT, Tried, like, place

_ROWS: Final = 16
_ROUNDS: Final = 2


class OuterProduct:
    """``average = P Q^T`` through views that are made once; the bits of ``torch.bmm``.

    ``average``: ``b x n x m``, ``p``: ``b x n x r``, ``q``: ``b x m x r``.
    """

    def __init__(self, average: torch.Tensor, p: torch.Tensor, q: torch.Tensor, tried: Tried) -> None:
        self._average, self._p, self._q = average, p, q
        self._tried = tried
        self._threads = 0
        self._blocked = False

    def compute(self) -> None:
        """Into ``average``."""
        threads = torch.get_num_threads()
        if threads != self._threads:  # the order of additions may depend on it
            self._threads = threads
            self._blocked = self._choose()
        if self._blocked:
            _in_blocks(self._average, self._p, self._q)
        else:
            torch.bmm(self._p, self._q.mT, out=self._average)

    def _choose(self) -> bool:
        average, rank = self._average, self._p.shape[-1]
        full = average.device.type == "cpu" and average.dtype in (torch.float32, torch.float64)
        if rank < 2 or not full or len(average) != 1 or average.shape[1] % _ROWS:
            return False
        if not WORTH_IT <= average.numel() <= TOO_LARGE:
            return False
        case = ("outer", average.shape, average.dtype, rank, *map(place, (average, self._p, self._q)), self._threads)
        if case not in self._tried:
            self._tried[case] = self._same()
        return self._tried[case]

    def _same(self) -> bool:
        """Tries on factors of these shapes and places in a cache line, into the memory of ``average`` and of one more matrix. The
        order of additions does not depend on the values; where all products are zero, the sign of the first shows."""
        generator = torch.Generator().manual_seed(0)
        p, q, other = (like(of) for of in (self._p, self._q, self._average))
        for zeros in (False,) * _ROUNDS + (True,):
            for factor in (p, q):
                factor.normal_(generator=generator)
            if zeros:
                p[:, ::2].zero_().neg_()
                q[:, ::3].zero_()
            torch.bmm(p, q.mT, out=other)
            _in_blocks(self._average, p, q)
            if not same_bits(self._average, other):
                return False
        return True


def _in_blocks(average: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    _, n, m = average.shape
    blocks = n // _ROWS
    torch.bmm(p.view(blocks, _ROWS, -1), q.mT.expand(blocks, -1, m), out=average.view(blocks, _ROWS, m))
