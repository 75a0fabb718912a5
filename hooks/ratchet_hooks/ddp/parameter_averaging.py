"""Averaging of parameters over ranks, in place. Unlike torch's ``model_averaging``, parameters whose ``.grad`` is None are
averaged too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ratchet_hooks.torch_compat import foreach_copy_


@torch.no_grad()
def average_in_place(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Set every parameter to its mean over the ranks of ``group``, with the arithmetic of torch's ``average_parameters``. A
    collective."""
    if not parameters or group.size() == 1:
        return
    flat = torch.cat([p.reshape(-1) for p in parameters])
    flat /= group.size()
    dist.all_reduce(flat, group=group)
    means = torch.split(flat, [p.numel() for p in parameters])
    foreach_copy_(parameters, [mean.view(p.shape) for mean, p in zip(means, parameters, strict=True)])


@contextmanager
def temporarily_averaged(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Iterator[None]:
    """Context manager: in its block the parameters have their mean over the ranks of ``group``, then their own values again. A
    collective."""
    with torch.no_grad():
        kept = [p.clone() for p in parameters]
    try:
        average_in_place(parameters, group)
        yield
    finally:
        with torch.no_grad():
            foreach_copy_(parameters, kept)


class Averager:
    """Decides after each step over which group parameters are averaged. ``groups``: the group for each period in steps. The
    largest period that divides the step's number applies; its group may be None, for no averaging. Steps are numbered from 0
    after the warm-up, or with ``hierarchical`` from the first step. ``warm_up``: number of steps of the warm-up; None while it is
    not over. Nothing is averaged in the warm-up."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup | None], *, hierarchical: bool) -> None:
        self._groups = dict(sorted(groups.items(), reverse=True))
        self._hierarchical = hierarchical
        self.step = 0
        self.warm_up: int | None = None

    def next_group(self) -> dist.ProcessGroup | None:
        """Count a step, and return the group over which the parameters are averaged after it; None: no averaging."""
        period = None if self.warm_up is None else self._due_period(self.step, self.warm_up)
        self.step += 1
        return None if period is None else self._groups[period]

    def steps_until(self, warm_up: int) -> int:
        """Return the number of steps until a period of ``groups`` is due next. 1: it is due after the next step. ``warm_up``:
        number of steps of the warm-up."""
        step = max(self.step, warm_up)
        while self._due_period(step, warm_up) is None:
            step += 1
        return step + 1 - self.step

    def _due_period(self, step: int, warm_up: int) -> int | None:
        """Return the period that is due after step ``step``; None if none is, or the warm-up is not over."""
        if step < warm_up:
            return None
        # HierarchicalModelAverager counts from the first step, PeriodicModelAverager from the end of the warm-up
        since = step if self._hierarchical else step - warm_up
        return next((period for period in self._groups if since % period == 0), None)
