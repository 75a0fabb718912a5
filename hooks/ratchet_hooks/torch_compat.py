"""Every private part of torch that Ratchet uses, with what takes its place where the installed torch does not have it.

No other module names a private module, function, class or attribute of torch (``tests/architecture/test_torch_private.py``), but
for the names that a subclass of torch's overrides or inherits. A part is looked up when it is used, so that importing Ratchet
works on every torch. A substitute gives the same bits; where there is none, the function raises ``TorchUnsupported``, which names
the missing part, torch's version and the cure.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.torch_versions import OLDEST, TESTED

_REDUCER: Final = ("_push_all_rebuilt_params", "_rebuild_buckets", "_get_zeros_like_grad_buckets")
# What ManagedDDP overrides, calls or assigns. An override that torch no longer calls would have no effect, so that these are
# looked for before a ManagedDDP is made.
_DDP: Final = (
    "_build_debug_param_to_name_mapping", "_build_params_for_reducer", "_ddp_init_helper", "_pre_forward",
    "_remove_autograd_hooks", "_set_static_graph", "join", "register_comm_hook",
)  # fmt: skip
_OF_A_DDP: Final = (
    "_comm_hooks", "_delay_all_reduce_params", "_has_rebuilt_buckets", "_lazy_init_ran", "_use_python_reducer",
    "bucket_bytes_cap", "find_unused_parameters", "logger", "mixed_precision", "parameters_to_ignore", "process_group",
    "reducer", "require_backward_grad_sync", "static_graph",
)  # fmt: skip


_VERSION: Final = attrgetter("_version")


class TorchUnsupported(RuntimeError):
    """The installed torch is too old, or lacks a part that has no substitute."""


def require() -> None:
    """Raise ``TorchUnsupported`` where the installed torch is older than ``OLDEST``, or where its DDP lacks what ``ManagedDDP``
    overrides and calls."""
    if _release(torch.__version__) < _release(OLDEST):
        raise TorchUnsupported(f"torch {torch.__version__} is too old for Ratchet: {_CURE}")
    for owner, names in ((_part(dist, "Reducer"), _REDUCER), (DistributedDataParallel, _DDP)):
        for name in names:
            if not hasattr(owner, name):
                raise missing(f"{owner.__name__}.{name}")


def require_attributes(ddp: DistributedDataParallel) -> None:
    """Raise ``TorchUnsupported`` where a DDP lacks an attribute that ``ManagedDDP`` reads or assigns."""
    for name in _OF_A_DDP:
        if not hasattr(ddp, name):
            raise missing(f"DistributedDataParallel().{name}")


def missing(part: str) -> TorchUnsupported:
    """The error for a part that the installed torch does not have."""
    return TorchUnsupported(f"torch {torch.__version__} has no {part}, which Ratchet needs: {_CURE}")


_CURE: Final = f"install one of the tested versions, torch {', '.join(TESTED)}"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _part(owner: Any, name: str) -> Any:
    found = getattr(owner, name, None)
    if found is None:
        raise missing(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return found


# Tensors


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target at its place; the lists are equally long."""
    if not targets:
        return
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The vector norm of each tensor, as tensors without dimensions; on CUDA in one launch."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None or not tensors:
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
    return list(together(list(tensors), order))


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``tensor`` with its negative bit set: it shows each element negated."""
    view: torch.Tensor = _part(torch, "_neg_view")(tensor)
    return view


def version_of(tensor: torch.Tensor) -> int | None:
    """How often ``tensor`` was changed in place; None for an inference tensor, which does not count."""
    if tensor.is_inference():
        return None
    version: int = _part(tensor, "_version")
    return version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """``version_of`` each."""
    try:
        return [*map(_VERSION, tensors)]
    except (RuntimeError, AttributeError):  # an inference tensor is among them, or torch has no such attribute
        return [*map(version_of, tensors)]


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of the memory that a strided ``tensor`` lies in: the same for all its views, and after the memory grew. Valid
    for as long as the memory is in use."""
    storage = tensor.untyped_storage()
    number: int | None = getattr(storage, "_cdata", None)
    if number is None:
        from torch.multiprocessing.reductions import StorageWeakRef

        number = StorageWeakRef(storage).cdata  # type: ignore[no-untyped-call]
    assert number is not None
    return number


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """What is registered on a tensor for its gradient."""
    tables = (getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return [hook for table in tables if table for hook in table.values()]


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass."""
    return bool(_part(torch._C, "_current_graph_task_id")() != -1)


# Modules


def state_dict_hooks(module: nn.Module) -> tuple[Sized, Sized]:
    """The containers in which a module keeps its hooks of ``state_dict``, those behind it and those before it."""
    return _part(module, "_state_dict_hooks"), _part(module, "_state_dict_pre_hooks")


MODULE_TABLES: Final = ("_parameters", "_buffers", "_modules")
"""Attributes of a module: the dictionaries of its own parameters, buffers and modules by name."""


def non_persistent(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that ``state_dict`` leaves out: the set that the module changes."""
    names: set[str] = _part(module, "_non_persistent_buffers_set")
    return names


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether ``state_dict`` holds the module's own buffer of that name."""
    return buffer not in non_persistent(module)


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers by name, as it keeps them."""
    buffers: dict[str, torch.Tensor | None] = _part(module, "_buffers")
    return buffers


def has_state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are registered on the optimizer's ``state_dict``."""
    names = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return any(_part(optimizer, name) for name in names)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` stands between the call of a module, its parts aside, and its code."""
    if not hasattr(module, "_compiled_call_impl"):
        raise missing("Module._compiled_call_impl")
    return module._compiled_call_impl is not None


# Settings


def recompute_with_default_generators() -> None:
    """Have code that torch.compile makes from now on draw what it draws twice (dropout under activation checkpointing) from
    torch's own generators. Otherwise, on a GPU, it makes generators for itself that nobody can reach. For all threads: from torch
    2.13 on a value that is assigned holds in the assigning thread alone, the default in each."""
    config: Any = importlib.import_module("torch._functorch.config")
    entry = config._config.get("graphsafe_rng_functionalization")
    if entry is not None:
        entry.default = False


def matmul_precision() -> str:
    """``torch.get_float32_matmul_precision()`` without the warning of torch 2.9 about settings that nobody made."""
    if _release(torch.__version__) >= (2, 11):
        return torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.get_float32_matmul_precision()


# torch.distributed


def all_gather_single(output: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to gather ``sent`` of all ranks into ``output``, which has as many elements as all of them; returns the ``Work``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to 2.11
    return gather(output, sent, group=group, async_op=True)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective on ``device`` may take in ``group``."""
    limit: timedelta = _part(_part(group, "_get_backend")(device).options, "_timeout")
    return limit


def first_bucket_bytes() -> int:
    """DDP's limit for the bucket of the gradients that are ready first, where it is given none."""
    limit: int = _part(dist, "_DEFAULT_FIRST_BUCKET_BYTES")
    return limit


def assign_buckets(tensors: Sequence[torch.Tensor], limits: Sequence[int], indices: Sequence[int]) -> list[list[int]]:
    """How DDP cuts ``tensors`` into buckets: the ``indices``, one per tensor, by bucket. ``limits``: bytes of the first bucket,
    of the second, and so on; the last limit holds for all further ones."""
    assign = _part(dist, "_compute_bucket_assignment_by_size")
    buckets, _ = assign(list(tensors), list(limits), [False] * len(tensors), list(indices))
    return [list(bucket) for bucket in buckets]


def after_collectives(look: Callable[[str, Any], None]) -> AbstractContextManager[Any]:
    """Inside, this thread calls ``look(name, result)`` behind each of c10d's operators (``allreduce_``, ``send``, ...), whichever
    way the operator is called."""
    mode: AbstractContextManager[Any] = _after_collectives()(look)
    return mode


@cache
def _after_collectives() -> type:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        raise missing("torch.utils._python_dispatch.TorchDispatchMode") from None

    class AfterCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, look: Callable[[str, Any], None]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._look = look

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "c10d":
                self._look(func.overloadpacket.__name__, result)
            return result

    return AfterCollectives


# DistributedDataParallel and its reducer


def bucket_limits(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Bytes of the first and of every further bucket when DDP rebuilds its buckets. To be asked before anything assigns
    ``ddp.bucket_bytes_cap``."""
    config = getattr(ddp, "_bucket_config", None)  # not in 2.11
    if config is not None:
        return config.first_bucket_bytes_cap, config.bucket_bytes_cap
    cap: int = _part(ddp, "bucket_bytes_cap")
    return (first_bucket_bytes() if _part(ddp, "bucket_bytes_cap_default") else cap), cap


def hooks_of(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """(function, state) of the communication hooks that are registered on ``ddp``."""
    hooks: list[tuple[Callable[..., Any], object]] = _part(ddp, "_comm_hooks")
    return hooks


def has_run(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` has begun a forward."""
    return bool(_part(ddp, "_lazy_init_ran"))


def delays_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether ``delay_all_reduce_named_params`` was given, whose gradients go past the hook."""
    return bool(_part(ddp, "_delay_all_reduce_params"))


def reduces_in_python(ddp: DistributedDataParallel) -> bool:
    """Whether ``torch._dynamo.config.optimize_ddp`` replaced the reducer by one that calls no hook."""
    return bool(_part(ddp, "_use_python_reducer"))


def push_all_parameters(reducer: Any) -> None:
    """Tell the reducer that all gradients became ready in the order of its parameters."""
    _part(reducer, "_push_all_rebuilt_params")()


def rebuild_buckets(reducer: Any) -> bool:
    """Do the rebuild that the next forward would begin with, where one is due; whether there was one. A collective."""
    return bool(_part(reducer, "_rebuild_buckets")())


def bucket_parameters(reducer: Any) -> list[list[torch.Tensor]]:
    """The parameters of each of the reducer's buckets. Allocates, for a moment, zeros of the size of all gradients."""
    return [bucket.parameters() for bucket in _part(reducer, "_get_zeros_like_grad_buckets")()]


# PowerSGD


def should_compress(rows: int, columns: int, rank: int, least_rate: float) -> bool:
    """Whether torch's ``powerSGD_hook`` compresses a matrix of this form."""
    return bool(_part(powerSGD_hook, "_should_compress")(rows, columns, rank, least_rate)[0])


def report_compression(bucket: Any, state: Any) -> None:
    """Log the statistics of a ``PowerSGDState`` when that is due."""
    _part(powerSGD_hook, "_report_compression_stats")(bucket, state)


def abort_groups() -> int:
    """Abort the communicators of all process groups, from any thread; the number of groups. Under NCCL a collective that is under
    way ends, with arbitrary values in its output; gloo's goes on waiting."""
    count = len(_part(_part(dist.distributed_c10d, "_world"), "pg_names"))
    _part(
        dist.distributed_c10d, "_abort_process_group"
    )()  # its NCCL group around all aborts keeps them from a deadlock
    return count


# Data


def forget_workers(loader: Any) -> None:
    """The next ``iter`` of a ``DataLoader`` with persistent workers starts new ones."""
    if not hasattr(loader, "_iterator"):
        raise missing("DataLoader._iterator")
    loader._iterator = None
