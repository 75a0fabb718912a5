"""Private parts of torch that Ratchet uses, some with substitutes. Where there is none, the function raises
``TorchUnsupported``."""

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
# Names that ManagedDDP overrides, calls or assigns. An override that torch no longer calls would have no effect, so these are
# checked before a ManagedDDP is made.
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
    """The installed torch is too old, or lacks a private part for which Ratchet has no substitute."""


def check_torch_version() -> None:
    """Raise ``TorchUnsupported`` if the installed torch is too old, or lacks a method of DDP or its reducer that is needed."""
    if _parse_release(torch.__version__) < _parse_release(OLDEST):
        raise TorchUnsupported(f"torch {torch.__version__} is too old for Ratchet: {_CURE}")
    for owner, names in ((_get_part(dist, "Reducer"), _REDUCER), (DistributedDataParallel, _DDP)):
        for name in names:
            if not hasattr(owner, name):
                raise missing(f"{owner.__name__}.{name}")


def check_ddp_attributes(ddp: DistributedDataParallel) -> None:
    """Raise ``TorchUnsupported`` if ``ddp`` lacks one of the attributes in ``_OF_A_DDP``."""
    for name in _OF_A_DDP:
        if not hasattr(ddp, name):
            raise missing(f"DistributedDataParallel().{name}")


def missing(part: str) -> TorchUnsupported:
    """Return the error to raise for a part that the installed torch does not have."""
    return TorchUnsupported(f"torch {torch.__version__} has no {part}, which Ratchet needs: {_CURE}")


_CURE: Final = f"install one of the tested versions, torch {', '.join(TESTED)}"


def _parse_release(version: str) -> tuple[int, int]:
    """Return major and minor version: ``(2, 13)`` for ``2.13.1+cu130``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _get_part(owner: Any, name: str) -> Any:
    """Return the attribute ``name`` of ``owner``. Raises ``TorchUnsupported`` if it is missing or None."""
    found = getattr(owner, name, None)
    if found is None:
        raise missing(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    return found


# Tensors


def foreach_copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target at the same index; the lists have the same length."""
    if not targets:
        return
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the vector norm of order ``order`` of each tensor, as tensors without dimensions."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None or not tensors:
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
    return list(together(list(tensors), order))


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` whose elements read as the negated ones; no data is copied."""
    view: torch.Tensor = _get_part(torch, "_neg_view")(tensor)
    return view


def version_of(tensor: torch.Tensor) -> int | None:
    """Return torch's counter of in-place changes of ``tensor``; None for an inference tensor, which has no counter."""
    if tensor.is_inference():
        return None
    version: int = _get_part(tensor, "_version")
    return version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the result of ``version_of`` for each tensor, in order."""
    try:
        return [*map(_VERSION, tensors)]
    except (RuntimeError, AttributeError):  # one is an inference tensor, or torch has no such attribute
        return [*map(version_of, tensors)]


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for all views of one memory. Valid only while the memory is in use."""
    storage = tensor.untyped_storage()
    number: int | None = getattr(storage, "_cdata", None)
    if number is None:
        from torch.multiprocessing.reductions import StorageWeakRef

        number = StorageWeakRef(storage).cdata  # type: ignore[no-untyped-call]
    assert number is not None
    return number


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks that are registered on a tensor for its gradient. Empty if there is none."""
    before, after = getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*(before.values() if before else ()), *(after.values() if after else ())]


def in_backward() -> bool:
    """True if the calling thread is inside a backward pass."""
    return bool(_get_part(torch._C, "_current_graph_task_id")() != -1)


# Modules


def state_dict_hooks(module: nn.Module) -> tuple[Sized, Sized]:
    """Return a module's ``state_dict`` hooks: the container of those that run after it, and of those that run before it."""
    return _get_part(module, "_state_dict_hooks"), _get_part(module, "_state_dict_pre_hooks")


MODULE_TABLES: Final = ("_parameters", "_buffers", "_modules")
"""Attributes of a module: the dictionaries of its own parameters, buffers and modules by name."""


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the module's own set, not a copy, of the names of its buffers that ``state_dict`` leaves out."""
    names: set[str] = _get_part(module, "_non_persistent_buffers_set")
    return names


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """True if ``state_dict`` contains the module's own buffer named ``buffer``. That the module has it is not checked."""
    return buffer not in non_persistent_buffers(module)


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own dictionary, not a copy, of its buffers by name, without those of its submodules."""
    buffers: dict[str, torch.Tensor | None] = _get_part(module, "_buffers")
    return buffers


def has_state_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if a hook is registered on the optimizer's ``state_dict``."""
    names = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return any(_get_part(optimizer, name) for name in names)


def is_compiled(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called on this module itself; its submodules are not considered."""
    if not hasattr(module, "_compiled_call_impl"):
        raise missing("Module._compiled_call_impl")
    return module._compiled_call_impl is not None


# Settings


def recompute_with_default_generators() -> None:
    """Make code that torch.compile generates from now on recompute random values with torch's default generators, whose state
    checkpoints have."""
    config: Any = importlib.import_module("torch._functorch.config")
    entry = config._config.get("graphsafe_rng_functionalization")
    if entry is not None:
        # the default holds for all threads; from torch 2.13 on, an assigned value holds only in the assigning thread
        entry.default = False


def matmul_precision() -> str:
    """Return ``torch.get_float32_matmul_precision()``, without a warning that old versions of torch give."""
    if _parse_release(torch.__version__) >= (2, 11):
        return torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        # torch before 2.11 warns about settings that were never made
        warnings.simplefilter("ignore", UserWarning)
        return torch.get_float32_matmul_precision()


# torch.distributed


def all_gather_single(output: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start to gather every rank's ``sent`` into ``output``, in rank order; returns the ``Work`` to wait for. A collective."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to 2.11
    return gather(output, sent, group=group, async_op=True)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the time limit of a collective on ``device`` in ``group``."""
    limit: timedelta = _get_part(_get_part(group, "_get_backend")(device).options, "_timeout")
    return limit


def first_bucket_bytes() -> int:
    """Return DDP's default limit, in bytes, for the first bucket: that of the gradients that are ready first."""
    limit: int = _get_part(dist, "_DEFAULT_FIRST_BUCKET_BYTES")
    return limit


def assign_buckets(tensors: Sequence[torch.Tensor], limits: Sequence[int], indices: Sequence[int]) -> list[list[int]]:
    """Return the buckets into which DDP divides ``tensors``, as lists of their ``indices``. ``limits``: bytes of each
    bucket; the last holds for all further ones."""
    assign = _get_part(dist, "_compute_bucket_assignment_by_size")
    buckets, _ = assign(list(tensors), list(limits), [False] * len(tensors), list(indices))
    return [list(bucket) for bucket in buckets]


def after_collectives(callback: Callable[[str, Any], None]) -> AbstractContextManager[Any]:
    """Context manager in which ``callback(name, result)`` is called after each of c10d's operators, such as ``allreduce_``, that
    this thread calls."""
    mode: AbstractContextManager[Any] = _after_collectives()(callback)
    return mode


@cache
def _after_collectives() -> type:
    """Return the class of the context manager of ``after_collectives``. Raises ``TorchUnsupported``."""
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        raise missing("torch.utils._python_dispatch.TorchDispatchMode") from None

    class AfterCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, observe: Callable[[str, Any], None]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._observe = observe

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "c10d":
                self._observe(func.overloadpacket.__name__, result)
            return result

    return AfterCollectives


# DistributedDataParallel and its reducer


def bucket_limits(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Return the limits in bytes of the first bucket and of every further one. Call it before Ratchet changes
    ``ddp.bucket_bytes_cap``."""
    config = getattr(ddp, "_bucket_config", None)  # not in 2.11
    if config is not None:
        return config.first_bucket_bytes_cap, config.bucket_bytes_cap
    cap: int = _get_part(ddp, "bucket_bytes_cap")
    return (first_bucket_bytes() if _get_part(ddp, "bucket_bytes_cap_default") else cap), cap


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return DDP's own list of ``(function, state)`` of the communication hooks that are registered on ``ddp``."""
    hooks: list[tuple[Callable[..., Any], object]] = _get_part(ddp, "_comm_hooks")
    return hooks


def has_run_forward(ddp: DistributedDataParallel) -> bool:
    """True if ``ddp`` has begun a forward pass in this process."""
    return bool(_get_part(ddp, "_lazy_init_ran"))


def delays_parameters(ddp: DistributedDataParallel) -> bool:
    """True if ``ddp`` was made with ``delay_all_reduce_named_params``; the gradients of these parameters bypass the hook."""
    return bool(_get_part(ddp, "_delay_all_reduce_params"))


def reduces_in_python(ddp: DistributedDataParallel) -> bool:
    """True if ``torch._dynamo.config.optimize_ddp`` has replaced the reducer by one that calls no hook."""
    return bool(_get_part(ddp, "_use_python_reducer"))


def push_all_parameters(reducer: Any) -> None:
    """Make the reducer's next rebuild use the order in which the reducer was given the parameters. May have no effect after a
    backward pass."""
    _get_part(reducer, "_push_all_rebuilt_params")()


def rebuild_buckets(reducer: Any) -> bool:
    """Do the rebuild of the buckets that the next forward would do. Returns True if one was due. A collective."""
    return bool(_get_part(reducer, "_rebuild_buckets")())


def bucket_parameters(reducer: Any) -> list[list[torch.Tensor]]:
    """Return the parameters of each of the reducer's buckets. Temporarily allocates zeros of the size of all gradients."""
    return [bucket.parameters() for bucket in _get_part(reducer, "_get_zeros_like_grad_buckets")()]


# PowerSGD


def should_compress(rows: int, columns: int, rank: int, min_compression_rate: float) -> bool:
    """True if torch's ``powerSGD_hook`` compresses a matrix of ``rows`` x ``columns`` with approximation rank ``rank``."""
    return bool(_get_part(powerSGD_hook, "_should_compress")(rows, columns, rank, min_compression_rate)[0])


def report_compression(bucket: Any, state: Any) -> None:
    """Log the compression statistics of a ``PowerSGDState``, as torch's hook does, in the iterations that its logging
    frequency selects."""
    _get_part(powerSGD_hook, "_report_compression_stats")(bucket, state)


def abort_groups() -> int:
    """Abort the communicators of all process groups; returns their number. Under NCCL, a collective in progress ends with
    arbitrary output; under gloo it continues to wait."""
    # under gloo a collective in progress continues to wait
    count = len(_get_part(_get_part(dist.distributed_c10d, "_world"), "pg_names"))
    _get_part(
        dist.distributed_c10d, "_abort_process_group"
    )()  # its NCCL group call around all aborts prevents a deadlock between them
    return count


# Data


def forget_workers(loader: Any) -> None:
    """Make the next ``iter`` of a ``DataLoader`` with persistent workers start new workers, in place of the running ones."""
    if not hasattr(loader, "_iterator"):
        raise missing("DataLoader._iterator")
    loader._iterator = None
