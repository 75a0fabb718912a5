"""Evaluation, between two steps or within a step's body. ``preserving_state`` puts modes, buffers and generators back after it.
Ranks exchange values through the store, not by collectives, which a stop could leave hanging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_hooks.manage.managed_hook import ManagedHook
from ratchet_hooks.torch_compat import versions_of
from ratchet_worker.coordination.store_exchange import Abandoned, Exchange
from ratchet_worker.data import data_generators
from ratchet_worker.state import rng
from ratchet_worker.state.snapshot import flat
from ratchet_worker.task import TrainData

Item = TypeVar("Item")


class Evaluation:
    """The object that the block of ``Session.evaluation`` uses. If the evaluation is between two steps and the ranks have agreed
    to stop, ``batches`` raises ``Abandoned`` before its next item, and the other methods raise it while they wait for other
    ranks. The block is then left, and the evaluation runs again after the resume."""

    def __init__(
        self, exchange: Exchange, name: str, tick: Callable[[], None], stop_pending: Callable[[], bool]
    ) -> None:
        self._exchange, self._name, self._tick, self._stop_pending = exchange, name, tick, stop_pending
        self._gathers = 0

    def batches(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``. Before each one it checks for an agreed stop, and ticks the step counter so that a long evaluation
        does not look like a hang. Raises ``Abandoned`` if a stop is pending."""
        for item in items:
            if self._stop_pending():
                raise Abandoned(self._name)
            self._tick()
            yield item

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON ``value``, in rank order. Every rank must call it; it blocks until all have. Raises
        ``PeerTimeout`` if a rank does not, and ``Abandoned`` if a stop is pending while it waits."""
        self._gathers += 1
        return self._exchange.gather(f"{self._name}/{self._gathers}", value, should_abandon=self._stop_pending)

    def averages(self, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Return, for each name, the sum of all ranks' sums divided by the sum of all ranks' weights (NaN for a weight of 0).
        ``sums``: this rank's pairs (sum, weight) by name; a rank may lack names. Every rank must call it; it blocks until all
        have, and raises as ``gather`` does."""
        parts = self.gather({k: [float(v[0]).hex(), float(v[1]).hex()] for k, v in sums.items()})
        names = sorted({name for part in parts for name in part})
        out: dict[str, float] = {}
        for name in names:
            total = sum(float.fromhex(p[name][0]) for p in parts if name in p)
            weight = sum(float.fromhex(p[name][1]) for p in parts if name in p)
            out[name] = total / weight if weight else float("nan")
        return out


@contextmanager
def preserving_state(
    ddp: ManagedDDP,
    hook: ManagedHook,
    data: TrainData | None,
    device: torch.device,
    optimizers: Sequence[Any] = (),
    *,
    broadcast: bool,
) -> Iterator[None]:
    """Context manager: the block runs in eval mode without gradients. Afterwards modes, buffers and generators are restored,
    including generators inside the training ``data``, and weights that ``optimizers`` with modes of their own have switched.
    Where replicas are equal, another change of the parameters in the block stays.

    One model is evaluated, not one per rank: where replicas differ, their mean replaces the parameters in the block, and this
    rank's own values are put back afterwards. With ``broadcast`` every rank has rank 0's values of the buffers in the
    block, except of those that DDP is configured to ignore. Entering is a collective where replicas differ, and with
    ``broadcast``.
    """
    modes = [(module, module.training, _own_buffers(module)) for module in ddp.modules()]
    synced = ddp.require_forward_param_sync
    named = sorted(ddp.module.named_buffers())
    buffers = [buffer for _, buffer in named]
    with torch.no_grad():
        kept = [buffer.clone() for buffer in buffers]
        if broadcast:
            for name, buffer in named:
                if name in ddp.parameters_to_ignore:
                    continue
                line = flat(buffer)  # gloo copies memory from the buffer's address on, whatever its strides
                dist.broadcast(line, src=0, group=ddp.process_group)
                buffer.copy_(line.view(buffer.shape))
    try:
        ddp.eval()
        with (
            rng.fork_rng(device), data_generators.for_data(data).preserved(), hook.averaged_parameters(),
            _preserving_weights(optimizers), torch.no_grad(),
        ):  # fmt: skip
            yield
    finally:
        for module, training, held in modes:
            module.training = training
            now = _own_buffers(module)
            for name in now | held:  # an evaluation may have replaced a buffer
                if now.get(name) is not held.get(name):
                    setattr(module, name, held.get(name))
        ddp.require_forward_param_sync = synced
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)


def _own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of the module itself by name, without those of its submodules."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


@contextmanager
def _preserving_weights(optimizers: Sequence[Any]) -> Iterator[None]:
    """Context manager: restore, after the block, the weights and modes of optimizers that switch between training and
    evaluating (schedulefree's ``train`` and ``eval``). Switching there and back rounds the weights, and an evaluation that runs
    again after a resume would round them twice."""
    modal = {id(o): [place for place in (vars(o), *o.param_groups) if "train_mode" in place] for o in optimizers}
    weights = [p for o in optimizers if modal[id(o)] for group in o.param_groups for p in group["params"]]
    modes = [(place, place["train_mode"]) for places in modal.values() for place in places]
    kept, versions = [p.detach().clone() for p in weights], versions_of(weights)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, before, now in zip(weights, kept, versions, versions_of(weights), strict=True):
                if now != before:
                    p.copy_(value)
        for place, mode in modes:
            place["train_mode"] = mode
