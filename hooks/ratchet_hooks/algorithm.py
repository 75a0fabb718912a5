"""What differs between hooks, as an interface: one object per DDP instance on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.codec import Tensors, is_dense
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.layout import Layout
from ratchet_hooks.summary import HookPhase
from ratchet_hooks.watch import Watch

TensorFuture = torch.futures.Future[torch.Tensor]
Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """What a hook is built for. ``parameters``: all trained ones by name, in registration order. ``cast``: the dtype that a
    wrapper gives the hook's buckets, None without one. ``node_ranks``: ranks of ``group`` on one node (the local world size).
    ``undefined``: may DDP make a gradient of the hook's result where a parameter has none, and give it the result's dtype?"""

    group: dist.ProcessGroup
    parameters: Parameters
    device: torch.device
    node_ranks: int
    cast: torch.dtype | None = None
    undefined: bool = True

    def dtype(self, parameter: str) -> torch.dtype:
        """Of the elements of this parameter's gradient as the hook sees them."""
        return self.cast or self.parameters[parameter].dtype


@dataclass
class Report:
    """The part of a summary that only the algorithm knows; see ``HookSummary`` for the fields. Elements None: as without
    compression; a ``compression_rate`` of None: nobody knows what is sent."""

    phase: HookPhase = "steady"
    iteration: int | None = None
    compression_rate: float | None = 1.0
    elements_before: int | None = None
    elements_after: int | None = None
    residual_norm: float | None = None
    memory_bytes: int = 0
    averager_step: int | None = None
    steps_to_averaging: int | None = None  # 1: after the next one


class Algorithm:
    """Base of all hooks; as it stands, the one of a hook without state.

    Off NCCL all collectives of a chain must be issued by ``run`` itself, of this bucket or of a later one: chains that go on in
    callbacks would cross in different orders on different ranks. When ``run`` returns for the last bucket, all must be issued.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.group = setup.group
        self.watch = Watch()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int | None]:
        """Begin to average a bucket over the ranks; the future of its flat tensor and the bytes that this rank sends (None: not
        known)."""
        raise NotImplementedError

    def average(self) -> None:
        """After every optimizer step, on every rank: average parameters, where the hook does that."""

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """This rank's state by parameter name, and its JSON part; ``layout`` is None before the first iteration. ``copy`` False
        allows views of live tensors, which the next backward pass changes."""
        return {}, None

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Continue from what ``capture`` gave. Raises ``HookStateError`` naming the key that does not fit; nothing changes."""
        if tensors or state is not None:
            raise HookStateError(min(tensors, default="state"), "recorded, but this hook keeps no state")

    def report(self, *, norm: bool = True) -> Report:
        """For the summary. ``norm`` False leaves out what takes a pass over the residuals."""
        return Report()

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        """``Report.residual_norm`` as it was when ``capture`` gave ``tensors``; in any thread."""
        return None


def promised(tensor: torch.Tensor) -> TensorFuture:
    """A future that comes with ``set_result(tensor)``. On CUDA it then keeps an event of the present stream, for which the
    waiter's stream will wait."""
    return torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)


def completed(tensor: torch.Tensor) -> TensorFuture:
    """A future that has come."""
    future = promised(tensor)
    future.set_result(tensor)
    return future


def parameter_views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The slices of a bucket's flat tensor, each in the shape and the memory order of its parameter, as DDP lays gradients."""
    offset = 0
    for parameter in parameters:
        if parameter.is_contiguous() or not is_dense(parameter):
            yield flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        else:
            yield flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
        offset += parameter.numel()


def on_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives on ``device`` are ordered by CUDA streams, so that a hook need not wait for them."""
    return device.type == "cuda" and "cuda:nccl" in str(dist.get_backend_config(group))
