"""Evaluation. Ranks exchange results through the store, not by collectives, which a stop could leave hanging."""

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
    """What the block of ``Session.evaluation`` gets. Between two steps, its methods may raise ``Abandoned`` once the ranks have
    agreed to stop."""

    def __init__(
        self, exchange: Exchange, name: str, tick: Callable[[], None], stop_pending: Callable[[], bool]
    ) -> None:
        self._exchange, self._name, self._tick, self._stop_pending = exchange, name, tick, stop_pending
        self._gathers = 0

    def batches(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items``, and show with each that this rank is alive. Raises ``Abandoned`` if a stop is pending between two
        steps."""
        for item in items:
            if self._stop_pending():
                raise Abandoned(self._name)
            self._tick()
            yield item

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON ``value``, in rank order; blocks until all ranks have called it. Raises ``PeerTimeout`` and
        ``Abandoned``."""
        self._gathers += 1
        return self._exchange.gather(f"{self._name}/{self._gathers}", value, should_abandon=self._stop_pending)

    def averages(self, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Return, by name, the total of all ranks' sums divided by the total of their weights (NaN for 0). ``sums``: this rank's
        pairs (sum, weight). Blocks and raises as ``gather`` does."""
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
    """Run the block in eval mode without gradients. During the block, parameters that differ between ranks are replaced by their
    mean. With ``broadcast``, buffers are replaced by those of rank 0, except buffers that DDP ignores. Afterwards restore all
    this, the process-wide generators and the data's own. Entering may be a collective."""
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
    """Restore, after the block, weights and modes of optimizers that switch between training and evaluating, such as
    schedulefree's."""
    modal = {id(o): [place for place in (vars(o), *o.param_groups) if "train_mode" in place] for o in optimizers}
    weights = [p for o in optimizers if modal[id(o)] for group in o.param_groups for p in group["params"]]
    modes = [(place, place["train_mode"]) for places in modal.values() for place in places]
    # Switching there and back rounds the weights; an evaluation that runs again after a resume would round them twice.
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
