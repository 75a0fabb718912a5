"""Averaging parameters over ranks with the bits of torch's averagers, without their pitfalls.

``torch.distributed.algorithms.model_averaging`` silently skips every parameter whose ``.grad`` is None, that is all of them after
``zero_grad()``; and it assigns new tensors to ``p.data``, so that channels-last and other references to the old storage are lost.
Here every trained parameter is averaged, in registration order, in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ratchet_hooks.torch_compat import foreach_copy_


@torch.no_grad()
def average_in_place(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Set every parameter to its mean over the ranks of ``group``. A collective; complete when it returns (on CUDA: queued).
    Does nothing in a group of one rank, and without parameters.

    The arithmetic is that of ``model_averaging.utils.average_parameters``: one flat copy of all parameters, in logical order
    and of the widest dtype among them, is divided by the number of ranks and all-reduced. The copy is freed afterwards.
    """
    if not parameters or group.size() == 1:
        return
    flat = torch.cat([p.reshape(-1) for p in parameters])
    flat /= group.size()
    dist.all_reduce(flat, group=group)
    means = torch.split(flat, [p.numel() for p in parameters])
    foreach_copy_(parameters, [mean.view(p.shape) for mean, p in zip(means, parameters, strict=True)])


@contextmanager
def temporarily_averaged(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Iterator[None]:
    """Context manager: in its block the parameters have their mean over the ranks of ``group``. At the end this rank's own
    values are put back, bit for bit. Entering it is a collective."""
    with torch.no_grad():
        kept = [p.clone() for p in parameters]
    try:
        average_in_place(parameters, group)
        yield
    finally:
        with torch.no_grad():
            foreach_copy_(parameters, kept)


class Averager:
    """Decides after each step whether parameters are averaged, and over which group. ``step`` counts the calls of
    ``next_group``, as torch's averagers count theirs.

    ``groups``: by period in steps, the group to average over; None: this rank alone, so that nothing is averaged. After a step,
    the largest period that divides the step's number decides. The number is 0 for the first step after the warm-up, which
    therefore averages (``PeriodicModelAverager``); with ``hierarchical`` it is 0 for the first step of all
    (``HierarchicalModelAverager``). ``warm_up``: number of calls before the first that may average; while it is None, it is
    unknown and nothing is averaged.
    """

    def __init__(self, groups: Mapping[int, dist.ProcessGroup | None], *, hierarchical: bool) -> None:
        self._groups = dict(sorted(groups.items(), reverse=True))
        self._hierarchical = hierarchical
        self.step = 0
        self.warm_up: int | None = None

    def next_group(self) -> dist.ProcessGroup | None:
        """Count a step, and return the group over which the parameters are averaged after it; None: no averaging after this
        step."""
        period = None if self.warm_up is None else self._due_period(self.step, self.warm_up)
        self.step += 1
        return None if period is None else self._groups[period]

    def steps_until(self, warm_up: int) -> int:
        """Return the number of steps until a period is due (1: after the next step), if the warm-up takes ``warm_up`` calls.
        A period without a group counts too. Changes nothing."""
        step = max(self.step, warm_up)
        while self._due_period(step, warm_up) is None:
            step += 1
        return step + 1 - self.step

    def _due_period(self, step: int, warm_up: int) -> int | None:
        """Return the period that is due after step ``step``; None if none is, or the warm-up is not over."""
        if step < warm_up:
            return None
        since = step if self._hierarchical else step - warm_up
        return next((period for period in self._groups if since % period == 0), None)
