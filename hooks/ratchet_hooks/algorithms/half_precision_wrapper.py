"""torch's ``fp16_compress_wrapper`` and ``bf16_compress_wrapper``: run a hook on buckets cast to 16 bits, and cast its result
back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ratchet_hooks.algorithms.base import Algorithm, Report, TensorFuture, parameter_views
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import CountedBucket, Layout
from ratchet_hooks.specs.hook_specs import Wrapper
from ratchet_hooks.state.encode import Tensors

DTYPES: dict[Wrapper, torch.dtype] = {
    "fp16_compress_wrapper": torch.float16,
    "bf16_compress_wrapper": torch.bfloat16,
}


class Wrapped(Algorithm):
    """Runs the hook ``inner`` on the buckets, cast to 16 bits. Its state is that of ``inner``."""

    def __init__(self, inner: Algorithm) -> None:
        cast = inner.setup.cast_dtype
        assert cast is not None
        super().__init__(replace(inner.setup, cast_dtype=None))
        self.watch = inner.watch
        self._inner = inner
        self._dtype = cast
        # Kept from step to step: the hook finds each bucket's gradients in the same memory.
        self._copies: dict[int, torch.Tensor] = {}

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int | None]:
        """Begin to average a bucket through the inner hook, in 16 bits. Returns the future of the average, and the bytes sent
        (None: unknown). If ``Setup.undefined`` is False, the average stays in 16 bits, and DDP casts it."""
        buffer = bucket.buffer()
        if buffer.dtype is self._dtype:
            return self._inner.run(bucket, names)
        copy = self._copy(bucket.index(), buffer)
        self.watch.check_overflow(names, copy, bucket.gradients)
        future, sent = self._inner.run(CastBucket(bucket, copy), names)
        if not self.setup.undefined:  # DDP casts while it copies into the gradients: the same bits, one pass less
            return future, sent
        return future.then(lambda done: buffer.copy_(done.value())), sent

    def average(self) -> None:
        self._inner.average()

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        return self._inner.capture(layout, copy=copy)

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        self._inner.restore(tensors, state, layout)

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        return self._inner.norm_of(tensors)

    def report(self, *, norm: bool = True) -> Report:
        """Return the inner hook's report; ``memory_bytes`` includes the copies."""
        report = self._inner.report(norm=norm)
        return replace(report, memory_bytes=report.memory_bytes + sum(copy.nbytes for copy in self._copies.values()))

    def _copy(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Copy ``buffer`` into the 16-bit memory that is kept for bucket ``index``, and return that memory."""
        copy = self._copies.get(index)
        if copy is None or copy.numel() != buffer.numel():
            copy = self._copies[index] = torch.empty_like(buffer, dtype=self._dtype)
        return copy.copy_(buffer)


class CastBucket(CountedBucket):
    """Has the methods of a ``GradBucket``: the gradients are in ``buffer``, all else is that of ``bucket``."""

    def __init__(self, bucket: Any, buffer: torch.Tensor) -> None:
        super().__init__(bucket, bucket.index(), bucket.parameters(), bucket.is_last())
        self._buffer = buffer

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, one per parameter, in its shape and memory order."""
        return list(parameter_views(self._buffer, self._parameters))

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor
