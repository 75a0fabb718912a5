"""Gradients in 8 bits: the bits of torch's two quantization hooks, on every back end."""

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
    """Every rank sends a bucket as 8-bit numbers, with a scale and a zero point per channel; the ranks' values are averaged. Inf
    or nan makes a channel nan on every rank. Raises ``UnsupportedModel`` for gradients that are not float32."""

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
        """Quantize a bucket, and start to gather the quantized buckets of all ranks. Returns the average's future and the bytes
        sent."""
        buffer = bucket.buffer()
        if not buffer.numel():
            return completed(buffer), 0
        channel = min(self._channel_size or buffer.numel(), buffer.numel())
        scale, zero = _scales(buffer, channel)
        self.watch.check_quantized(names, scale, bucket.gradients)
        sent = _pack(buffer, scale, zero, channel)
        ranks = sent.new_empty(self.group.size() * sent.numel())
        # torch gathers scales first and gradients second, in callbacks. A rank quantizes with its own scale alone, so one
        # all-gather carries both.
        work = all_gather_single(ranks, sent, self.group)
        return work.get_future().then(lambda _: _average(ranks.view(-1, sent.numel()), buffer, channel)), sent.nbytes


class PerTensor(Quantization):
    """Quantization with one scale and zero point per bucket."""


class PerChannel(Quantization):
    """Quantization with a scale and zero point for each ``bucket_size`` elements of a bucket."""


def _scales(flat: torch.Tensor, channel_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of every channel, as torch's observers compute them. If a channel's range is not finite, its
    scale is nan and its zero point 0."""
    ends = [torch.aminmax(part, dim=1) for part in _channels(flat, channel_size)]
    low = torch.cat([end.min for end in ends]).clamp_(max=0.0)
    high = torch.cat([end.max for end in ends]).clamp_(min=0.0)
    scale = high.sub_(low).div_(float(_LEVELS)).clamp_(min=torch.finfo(torch.float32).eps)
    finite = scale.isfinite()
    zero = torch.where(finite, -torch.round(low / scale), 0.0).clamp_(0, _LEVELS)
    return torch.where(finite, scale, torch.nan), zero


def _pack(flat: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, channel_size: int) -> torch.Tensor:
    """Return the bytes that a rank sends: every element in 8 bits, padding, all scales, all zero points."""
    behind = -flat.numel() % _ALIGNMENT + flat.numel()
    out = torch.zeros(behind + 2 * scale.nbytes, dtype=torch.uint8, device=flat.device)
    torch.cat((scale, zero), out=out[behind:].view(torch.float32))
    for part, levels, s, z in _rows(channel_size, flat, out[: flat.numel()], scale, zero):
        levels.copy_(torch.div(part, s).round_().add_(z).clamp_(0, _LEVELS))
    return out


def _average(ranks: torch.Tensor, buffer: torch.Tensor, channel_size: int) -> torch.Tensor:
    """Overwrite ``buffer`` with the mean of the gradients that the ranks sent, and return it. ``ranks``: a row per rank."""
    behind = -buffer.numel() % _ALIGNMENT + buffer.numel()
    # From the first rank to the last, so that all ranks get the same bits.
    for rank, packed in enumerate(ranks):
        scale, zero = packed[behind:].view(torch.float32).chunk(2)
        for part, levels, s, z in _rows(channel_size, buffer, packed[: buffer.numel()], scale, zero):
            values = levels.to(torch.float32).sub_(z).mul_(s)
            _ = part.add_(values) if rank else part.copy_(values)
    return divide(buffer, len(ranks))


def _rows(
    channel_size: int, flat: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield elements, 8-bit numbers, scales and zero points with a row per channel: whole channels, then a shorter last one."""
    start = 0
    for part, numbers in zip(_channels(flat, channel_size), _channels(levels, channel_size), strict=True):
        end = start + len(part)
        yield part, numbers, scale[start:end, None], zero[start:end, None]
        start = end


def _channels(flat: torch.Tensor, channel_size: int) -> list[torch.Tensor]:
    """Return views of ``flat`` with a row per channel: of whole channels, and of a shorter last one."""
    whole = flat.numel() // channel_size * channel_size
    return [
        part.view(rows, -1) for part, rows in ((flat[:whole], whole // channel_size), (flat[whole:], 1)) if part.numel()
    ]
