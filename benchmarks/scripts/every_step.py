"""The built-in task ``bytelm``, which tells when each of its optimizer's steps began."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ratchet_worker.task import Parts, TaskContext
from ratchet_worker.tasks.bytelm import ByteLMTask


class Timed(ByteLMTask):
    """``out``: a JSON list with a time for each step, and the processor time that rank 0 had used by then, written by it in the
    last. Other arguments: the task's."""

    def __init__(self, out: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._out, self._rank, self._times = Path(out), 0, list[tuple[float, float]]()

    def build(self, ctx: TaskContext) -> Parts:
        self._rank = ctx.rank
        return super().build(ctx)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().before_step(model, optimizer, step)
        self._times.append((time.monotonic(), time.process_time()))
        if step == self.steps and self._rank == 0:
            self._out.write_text(json.dumps(self._times))
