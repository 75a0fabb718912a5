"""Gradients in 8 bits: the bits of torch's two quantization hooks, on every back end.

torch's hooks gather scales and zero points first and the quantized gradients second, in a chain of callbacks that reads the
result of a future in a form that only NCCL gives. But a rank quantizes with its own scale alone, so here one all-gather carries
both: nothing can cross another bucket's collective, and a round trip is saved. torch pads a bucket to whole channels, and one
that consists of whole channels by another channel; neither padding is sent here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ratchet_hooks.algorithms.base import Algorithm, Setup, TensorFuture, completed
from ratchet_hooks.algorithms.plain import divide
from ratchet_hooks.errors import UnsupportedModel
from ratchet_hooks.specs.hook_specs import QuantizationPerchannelSpec, QuantizationPertensorSpec
from ratchet_hooks.torch_compat import all_gather_single

_LEVELS = 255  # of torch.quint8, from 0
_ALIGNMENT = 4  # bytes: alignment of the scales and zero points, as float32, after the quantized gradients


class Quantization(Algorithm):
    """Every rank sends each channel of a bucket as 8-bit numbers with a scale and a zero point, gathers those of all ranks,
    and averages them in rank order, so that the result is equal on all ranks. Raises ``UnsupportedModel`` for gradients that
    are not float32.

    The error of a gradient is at most half a scale. A channel's scale is its range (extended to include 0) divided by 255, but
    never below float32's epsilon (1.2e-7), so gradients below half of that become 0, as with torch. A channel that contains
    inf or nan becomes nan on every rank, so that a GradScaler on any rank detects it.

    The count of sent bytes is this rank's part of the all-gather: a byte per element, up to 3 of padding, and 8 per channel.
    """

    def __init__(self, spec: QuantizationPertensorSpec | QuantizationPerchannelSpec, setup: Setup) -> None:
        super().__init__(setup)
        self._channel_size = spec.bucket_size if isinstance(spec, QuantizationPerchannelSpec) else None
        for name in setup.parameters:
            if setup.dtype(name) is not torch.float32:
                raise UnsupportedModel(
                    f"{name} has gradients of {setup.dtype(name)}, and {spec.name} quantizes float32 only; keep the parameters "
                    "in float32 and use autocast, or another hook"
                )

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        """Quantize a bucket and start to gather the quantized buckets of all ranks. Returns the future of the average, and the
        number of bytes that this rank sends."""
        buffer = bucket.buffer()
        if not buffer.numel():
            return completed(buffer), 0
        channel = min(self._channel_size or buffer.numel(), buffer.numel())
        scale, zero = _scales(buffer, channel)
        self.watch.check_quantized(names, scale, bucket.gradients)
        sent = _pack(buffer, scale, zero, channel)
        ranks = sent.new_empty(self.group.size() * sent.numel())
        work = all_gather_single(ranks, sent, self.group)
        return work.get_future().then(lambda _: _average(ranks.view(-1, sent.numel()), buffer, channel)), sent.nbytes


class PerTensor(Quantization):
    """Quantization with one scale and zero point per bucket."""


class PerChannel(Quantization):
    """Quantization with a scale and zero point for each ``bucket_size`` elements of a bucket."""


def _scales(flat: torch.Tensor, channel_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of every channel, as torch's MinMaxObserver and PerChannelMinMaxObserver compute them. A
    channel without a finite range gets nan and 0; there torch's scale is inf or nan, and its result nan too."""
    ends = [torch.aminmax(part, dim=1) for part in _channels(flat, channel_size)]
    low = torch.cat([end.min for end in ends]).clamp_(max=0.0)
    high = torch.cat([end.max for end in ends]).clamp_(min=0.0)
    scale = high.sub_(low).div_(float(_LEVELS)).clamp_(min=torch.finfo(torch.float32).eps)
    finite = scale.isfinite()
    zero = torch.where(finite, -torch.round(low / scale), 0.0).clamp_(0, _LEVELS)
    return torch.where(finite, scale, torch.nan), zero


def _pack(flat: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, channel_size: int) -> torch.Tensor:
    """Return the bytes that a rank sends: every element in 8 bits, up to three bytes of padding, all scales, all zero points."""
    behind = -flat.numel() % _ALIGNMENT + flat.numel()
    out = torch.zeros(behind + 2 * scale.nbytes, dtype=torch.uint8, device=flat.device)
    torch.cat((scale, zero), out=out[behind:].view(torch.float32))
    for part, levels, s, z in _rows(channel_size, flat, out[: flat.numel()], scale, zero):
        levels.copy_(torch.div(part, s).round_().add_(z).clamp_(0, _LEVELS))
    return out


def _average(ranks: torch.Tensor, buffer: torch.Tensor, channel_size: int) -> torch.Tensor:
    """Overwrite ``buffer`` with the mean of the gradients that the ranks sent, and return it. Row r of ``ranks`` has the bytes
    of rank r. Values are added up from the first rank to the last, so that all ranks get the same bits."""
    behind = -buffer.numel() % _ALIGNMENT + buffer.numel()
    for rank, packed in enumerate(ranks):
        scale, zero = packed[behind:].view(torch.float32).chunk(2)
        for part, levels, s, z in _rows(channel_size, buffer, packed[: buffer.numel()], scale, zero):
            values = levels.to(torch.float32).sub_(z).mul_(s)
            _ = part.add_(values) if rank else part.copy_(values)
    return divide(buffer, len(ranks))


def _rows(
    channel_size: int, flat: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield elements, their 8-bit numbers, scales and zero points as matrices with a row per channel: first all whole
    channels, then the shorter last one, if there is one."""
    start = 0
    for part, numbers in zip(_channels(flat, channel_size), _channels(levels, channel_size), strict=True):
        end = start + len(part)
        yield part, numbers, scale[start:end, None], zero[start:end, None]
        start = end


def _channels(flat: torch.Tensor, channel_size: int) -> list[torch.Tensor]:
    """Return views of ``flat`` with a row per channel: one of all whole channels, and one of a shorter last channel, if there
    is one."""
    whole = flat.numel() // channel_size * channel_size
    return [
        part.view(rows, -1) for part, rows in ((flat[:whole], whole // channel_size), (flat[whole:], 1)) if part.numel()
    ]
