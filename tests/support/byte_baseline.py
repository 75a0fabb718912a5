"""The order-2 byte model that ``bytelm`` has to beat: the next byte given the two before it, by interpolated counts.

Witten-Bell interpolation (Witten and Bell 1991, IEEE Trans. Inf. Theory 37(4), method C; as in Chen and Goodman 1999, eq. 8):

    p(c | ab) = (n(abc) + d(ab) p(c | b)) / (n(ab) + d(ab))

with n the count in the training bytes and d(h) the number of different bytes seen after h; p(c | b) and p(c) likewise, and
below p(c) the uniform 1/256. Every parameter is fitted on the training bytes; an unseen history falls back entirely.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def _codes(data: Bytes, order: int) -> npt.NDArray[np.int64]:
    """Return each byte with its ``order`` predecessors as one number in base 256, from position ``order`` on; int64 of shape
    (len(data) - order,)."""
    words = data.astype(np.int64)
    codes = np.zeros(max(0, len(data) - order), dtype=np.int64)
    for k in range(order + 1):
        codes = codes * 256 + words[k : len(words) - order + k]
    return codes


class OrderTwo:
    """The order-2 byte model of this module, fitted on ``train``, uint8 of shape (n,). Holds 64 MB of counts."""

    def __init__(self, train: Bytes) -> None:
        self._counts = [np.bincount(_codes(train, k), minlength=256 ** (k + 1)).astype(np.int32) for k in range(3)]

    def bits_per_byte(self, data: Bytes) -> float:
        """Return the mean of -log2 p over positions 1, 2 ... of ``data``, uint8 (the first byte has no predecessor). Raises
        ``ValueError`` for fewer than two bytes."""
        if len(data) < 2:
            raise ValueError("bits per byte need at least two bytes")
        probability = np.full(len(data), 1 / 256)
        for order, counts in enumerate(self._counts):
            followers = counts.reshape(-1, 256)
            total, distinct = followers.sum(1, dtype=np.int64), (followers > 0).sum(1)
            codes = _codes(data, order)
            n, d = total[codes >> 8], distinct[codes >> 8]
            seen = n > 0
            lower = probability[order:]
            mixed = (counts[codes] + d * lower) / np.where(seen, n + d, 1)
            probability[order:] = np.where(seen, mixed, lower)
        return float(-np.log2(probability[1:]).mean())
