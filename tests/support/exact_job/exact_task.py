"""``digits`` in the configurations that a task, not a spec, asks for; this directory is the code of such a job."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ratchet_worker.task import LossResult, Parts, TaskContext
from ratchet_worker.tasks.digits import DigitsTask


class Odd(nn.Module):
    """``net`` with a layer that only every other call uses, as a counter among its attributes says; and a buffer that the first
    call makes."""

    def __init__(self, net: nn.Module, alternate: bool) -> None:
        super().__init__()
        self.net, self.alternate, self.calls = net, alternate, 0
        self.extra = nn.Linear(10, 10)
        self.register_buffer("first", None)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(images)
        if self.first is None:
            self.first = out.detach().float().mean(0)
        if self.training:
            self.calls += 1
        if not self.alternate or self.calls % 2:
            out = out + self.extra(out)
        return out + self.first.to(out.dtype)


class Configured(DigitsTask):
    """``accumulate`` batches per step; ``scaled``: fp16 autocast and a gradient scaler; ``alternate``: a layer is used in every
    other call only; ``channels_last``; ``compiled``: through ``torch.compile``, without code generation."""

    def __init__(
        self,
        accumulate: int = 1,
        scaled: bool = False,
        alternate: bool = False,
        channels_last: bool = False,
        compiled: bool = False,
        **digits: Any,
    ) -> None:
        super().__init__(**digits)
        self.accumulate, self.scaled, self.alternate = accumulate, scaled, alternate
        self.channels_last, self.compiled = channels_last, compiled

    def build(self, ctx: TaskContext) -> Parts:
        parts = super().build(ctx)
        model = Odd(parts.model, self.alternate).to(ctx.device)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.compiled:
            model.compile(backend="aot_eager")
        parts.model, parts.accumulate = model, self.accumulate
        parts.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        parts.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(parts.optimizer, T_max=parts.steps())
        if self.scaled:
            parts.scaler = torch.amp.GradScaler(ctx.device.type, init_scale=2.0**12, growth_interval=10)  # type: ignore[attr-defined]
        return parts

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        images, labels = batch
        if self.channels_last:
            images = images.to(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, dtype=torch.float16, enabled=self.scaled):
            logits = model(images)
        return functional.cross_entropy(logits.float(), labels)
