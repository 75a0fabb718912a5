"""Detects silent numeric problems of hooks, such as overflow in float16. They are logged and returned as warnings."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ratchet_hooks.torch_compat import norms as norms_of

Code = Literal["fp16-overflow", "bf16-overflow", "non-finite", "low-rank-overflow", "quantization-range"]
Gradients = Callable[[], list[torch.Tensor]]
"""The gradients of a bucket one by one. On the CPU called only when something seems wrong, since making hundreds of views takes
long."""

_log = logging.getLogger(__name__)
_PENDING_LIMIT = 4096  # maximum number of unread checks on the device
_ROUNDS_TO_INF: dict[torch.dtype, tuple[Code, float]] = {
    torch.float16: ("fp16-overflow", 65520.0),  # halfway between 65504, the largest finite value, and 65536
    torch.bfloat16: ("bf16-overflow", 2.0**128 - 2.0**119),
}
# Code for a gradient that was inf or nan before the hook; None: not reported, since it stays inf or nan and is visible anyway.
_CODE_IF_INFINITE: dict[Code, Code | None] = {
    "fp16-overflow": None,
    "bf16-overflow": None,
    "non-finite": "non-finite",
    "low-rank-overflow": "non-finite",
    "quantization-range": "quantization-range",
}
_TEXT: dict[Code, str] = {
    "fp16-overflow": "gradients of {0} exceed 65504 on this rank and became inf in float16 at iteration {1}; "
    "scale the loss down, or use allreduce",
    "bf16-overflow": "gradients of {0} exceed 3.39e38 on this rank and became inf in bfloat16 at iteration {1}; "
    "scale the loss down, or use allreduce",
    "non-finite": "the compressed average of {0} is not finite from iteration {1} on, and its residual stays so: gradients "
    "were inf or nan, or all zero (set orthogonalization_epsilon, like 1e-8), or overflowed in half precision",
    "low-rank-overflow": "the compressed average of {0} is too large for its dtype at iteration {1}: columns of P or Q "
    "become inf, or zero when divided by their norm; scale the loss down, or use float32 gradients",
    "quantization-range": "gradients of {0} are inf or nan on this rank, or further apart than float32 reaches, at iteration "
    "{1}: the 8-bit average of all gradients with the same scale is nan on every rank",
}


@dataclass(frozen=True)
class HookWarning:
    """The first occurrence of one problem of one parameter. ``iteration``: number of the averaging backward pass, from 1."""

    code: Code
    parameter: str
    iteration: int

    def __str__(self) -> str:
        return _TEXT[self.code].format(self.parameter, self.iteration)


@dataclass(frozen=True)
class _Look:
    """A check of a bucket that is not evaluated yet. ``peaks``: for each parameter, a magnitude or norm. ``limit``: the smallest
    peak that may be a problem."""

    code: Code
    iteration: int
    names: Sequence[str]
    peaks: torch.Tensor
    limit: float


class Watch:
    """Checks gradients for numeric problems. Logs each kind of problem once per parameter. The caller sets ``iteration``."""

    def __init__(self) -> None:
        self.iteration = 0
        self._reported: dict[tuple[Code, str], HookWarning] = {}
        self._pending: list[_Look] = []

    def check_overflow(self, names: Sequence[str], sent: torch.Tensor, gradients: Gradients) -> None:
        """Report finite gradients that became inf in ``sent``, the bucket's 16-bit copy. ``names``: the bucket's parameters, in
        order."""
        code, limit = _ROUNDS_TO_INF[sent.dtype]
        self._check_peaks(code, names, sent, gradients, limit)

    def check_quantized(self, names: Sequence[str], scales: torch.Tensor, gradients: Gradients) -> None:
        """If one of ``scales`` is inf or nan, report the gradients that may be the cause. ``names``: the bucket's parameters."""
        limit = torch.finfo(scales.dtype).max / 2  # where the range overflows, its larger end reaches this
        if scales.is_cuda:
            peaks = _device_peaks(gradients())
            peaks = peaks.masked_fill(scales.isfinite().all(), 0.0)
            self._defer(_Look("quantization-range", self.iteration, list(names), peaks, limit))
        elif not scales.isfinite().all():
            peaks = torch.tensor([_peak(gradient) for gradient in gradients()])
            self._evaluate(_Look("quantization-range", self.iteration, list(names), peaks, limit))

    def check_non_finite(self, names: Sequence[str], buffer: torch.Tensor, gradients: Gradients) -> None:
        """Report gradients that contain inf or nan. ``buffer`` contains all of the gradients; ``names``: their parameters."""
        self._check_peaks("non-finite", names, buffer, gradients, float("inf"))

    def check_low_rank(
        self, names: Sequence[str], flat: torch.Tensor, parts: Sequence[torch.Tensor], *, dims: tuple[int, ...]
    ) -> None:
        """Report the parameters whose gradients PowerSGD corrupts: norms of P or Q are then inf, nan or too large for the dtype.
        ``parts``: the matrices in ``flat``, one per parameter. A single matrix may be for all parameters, which are then reported
        together. ``dims``: dimensions along which norms are computed."""
        # Every problem shows in P or Q. Inf or nan in a gradient or residual reaches its row of P. Values that stay finite but
        # are wrong have a norm beyond their dtype: a column of P is divided by its norm (``dims`` 0), and the norm of a row of Q
        # bounds the elements of P Q^T (``dims`` 1).
        limit = torch.finfo(flat.dtype).max
        if flat.is_cuda:
            # In dtypes other than float16 a norm overflows only when the elements nearly do: one kernel is enough.
            near = flat.dtype is torch.float16
            norms = _norms(parts, dims) if near else torch.stack(norms_of(parts, 2))
            self._defer(_Look("low-rank-overflow", self.iteration, list(names), norms.expand(len(names)), limit))
        elif not torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32)).item() < limit:
            norms = _norms(parts, dims).expand(len(names))
            self._evaluate(_Look("low-rank-overflow", self.iteration, list(names), norms, limit))

    def warnings(self) -> list[HookWarning]:
        """Return all warnings so far, oldest first. Waits for a CUDA device if results are on it."""
        pending, self._pending = self._pending, []
        if pending:  # made on several streams: PowerSGD has a separate one
            torch.cuda.synchronize(pending[0].peaks.device)
        for look in pending:
            self._evaluate(look)
        return list(self._reported.values())

    def _check_peaks(
        self, code: Code, names: Sequence[str], flat: torch.Tensor, gradients: Gradients, limit: float
    ) -> None:
        """Report, with ``code``, finite gradients whose largest magnitude is at least ``limit``. For gradients with inf or nan,
        the code is in ``_CODE_IF_INFINITE``; None there: not reported. ``flat``: all gradients in one tensor, or a copy of it in
        16 bits."""
        if flat.is_cuda:
            peaks = _device_peaks(gradients())
            self._defer(_Look(code, self.iteration, list(names), peaks, limit))
        elif not _finite_sum(flat):
            peaks = torch.tensor([_peak(gradient) for gradient in gradients()], dtype=torch.float64)
            self._evaluate(_Look(code, self.iteration, list(names), peaks, limit))

    def _defer(self, check: _Look) -> None:
        """Keep a check whose result is on the device. Once ``_PENDING_LIMIT`` are kept, evaluate all, which waits for the
        device."""
        self._pending.append(check)
        if len(self._pending) >= _PENDING_LIMIT:
            self.warnings()

    def _evaluate(self, check: _Look) -> None:
        """Store and log each problem in the result of ``check``, unless that problem of that parameter was stored before."""
        for name, peak in zip(check.names, check.peaks.tolist(), strict=True):
            here = check.code if check.limit <= peak else None
            code = here if peak < float("inf") else _CODE_IF_INFINITE[check.code]
            if code is not None and (code, name) not in self._reported:
                warning = HookWarning(code, name, check.iteration)
                self._reported[code, name] = warning
                _log.warning("%s", warning)


def _norms(parts: Sequence[torch.Tensor], dims: tuple[int, ...]) -> torch.Tensor:
    """Return, for each part, the largest norm along any of the dimensions ``dims``; nan for a part that contains nan."""
    norms = [[torch.linalg.vector_norm(part, dim=d, dtype=torch.float64).amax() for d in dims] for part in parts]
    return torch.stack([torch.stack(of_one).amax() for of_one in norms])


def _finite_sum(flat: torch.Tensor) -> bool:
    """Return True if the elements' sum is finite, so that no element is inf or nan. Faster than ``aminmax``."""
    return math.isfinite(flat.sum().item())


def _device_peaks(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor on the device with the largest magnitude in each of ``gradients``, without waiting for the device."""
    parts = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
    return torch.stack(norms_of(parts, float("inf")))


def _peak(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor; nan if it contains nan, 0 if it has no elements."""
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item()) if not torch.isnan(high) else float("nan")
