"""The interface that all hooks implement: one object per DDP instance on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.ddp.numeric_warnings import Watch
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import Tensors, is_dense
from ratchet_hooks.summary import HookPhase

TensorFuture = torch.futures.Future[torch.Tensor]
Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """The surroundings of a hook. ``parameters``: all trained parameters by name, in registration order. ``node_ranks``: the
    number of ranks of ``group`` on each node. ``cast_dtype``: the dtype to which a wrapper casts the buckets; None: no wrapper.
    ``undefined``: True if the hook's result may become the gradient of a parameter that has no gradient. The result must then
    have the parameter's dtype."""

    group: dist.ProcessGroup
    parameters: Parameters
    device: torch.device
    node_ranks: int
    cast_dtype: torch.dtype | None = None
    undefined: bool = True

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype that this parameter's gradient has when the hook receives it."""
        return self.cast_dtype or self.parameters[parameter].dtype


@dataclass
class Report:
    """The part of a summary that only the algorithm knows; ``HookSummary`` describes the fields. ``compression_rate`` None: it is
    unknown how much is sent. ``elements_before`` None: the number of all elements. ``elements_after`` None: the same number, but
    unknown if ``compression_rate`` is None. ``iteration`` None: the iteration of ``ManagedHook``."""

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
    """Base class of all hooks; a subclass that overrides only ``run`` is a hook without state.

    Without NCCL, ``run`` itself must issue all collectives of a bucket, at the latest in its call for the last bucket. Callbacks
    must not start collectives then, since callbacks run in different orders on different ranks.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.group = setup.group
        self.watch = Watch()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int | None]:
        """Begin to combine a bucket over the ranks, usually as an average. ``names``: those of the bucket's parameters. Returns
        the future of the flat result, and the bytes that this rank sends (None: unknown)."""
        raise NotImplementedError

    def average(self) -> None:
        """Average the parameters over the ranks in place, if that is due. Called after every optimizer step."""

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return this rank's state: tensors by name, and a JSON part. ``layout``: parameter names per bucket; None before the
        first iteration. ``copy`` False: the tensors may be views of live ones."""
        return {}, None

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Continue from the result of ``capture``; ``state`` is its JSON part. Raises ``HookStateError`` for a key that does not
        fit; nothing is changed then, except perhaps in a custom hook's state."""
        if tensors or state is not None:
            raise HookStateError(min(tensors, default="state"), "recorded, but this hook keeps no state")

    def report(self, *, norm: bool = True) -> Report:
        """Return the algorithm's part of the summary. ``norm`` False: without ``residual_norm``, which takes time."""
        return Report()

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        """Return the ``residual_norm`` of ``tensors`` from ``capture``; None for a hook without residuals. May be called in any
        thread."""
        return None


def new_future(tensor: torch.Tensor) -> TensorFuture:
    """Return a future that ``set_result(tensor)`` completes; on CUDA, after the work of the current stream."""
    return torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)


def completed(tensor: torch.Tensor) -> TensorFuture:
    """Return a future that is complete, with the result ``tensor``."""
    future = new_future(tensor)
    future.set_result(tensor)
    return future


def parameter_views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a view of each parameter's part of a bucket's flat tensor, in the parameter's shape and, if it is dense, its
    memory order."""
    offset = 0
    for parameter in parameters:
        if parameter.is_contiguous() or not is_dense(parameter):
            yield flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        else:
            yield flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
        offset += parameter.numel()


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if collectives on ``device`` use NCCL: CUDA streams order them, so a hook need not wait for them."""
    return device.type == "cuda" and "cuda:nccl" in str(dist.get_backend_config(group))
