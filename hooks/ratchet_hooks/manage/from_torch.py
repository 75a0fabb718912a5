"""Translate torch's own hook functions and state objects into the specs of Ratchet's implementations of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization

from ratchet_hooks.errors import UnsupportedModel

_WITHOUT_STATE: Final[dict[object, str]] = {
    default.allreduce_hook: "allreduce",
    default.fp16_compress_hook: "fp16_compress",
    default.bf16_compress_hook: "bf16_compress",
    quantization.quantization_pertensor_hook: "quantization_pertensor",
    quantization.quantization_perchannel_hook: "quantization_perchannel",
    debugging.noop_hook: "noop",
}
_LOW_RANK: Final[dict[object, str]] = {
    power_sgd.powerSGD_hook: "powerSGD",
    power_sgd.batched_powerSGD_hook: "batched_powerSGD",
}
_WRAPPERS: Final[tuple[Callable[..., Any], ...]] = (default.fp16_compress_wrapper, default.bf16_compress_wrapper)
_LOW_RANK_PARAMETERS: Final = (
    "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start",
    "orthogonalization_epsilon", "compression_stats_logging_frequency",
)  # fmt: skip


def wrapper_name(wrapper: object) -> str | None:
    """Return the name of torch's wrapper function ``wrapper``; a name or None is returned unchanged. Raises ``UnsupportedModel``
    for another function."""
    if wrapper is None or isinstance(wrapper, str):
        return wrapper
    if wrapper in _WRAPPERS:
        return str(wrapper.__name__)
    raise UnsupportedModel(
        f"wrapper {getattr(wrapper, '__qualname__', wrapper)!r} is none of torch's two; apply it to the function yourself"
    )


def unwrap(function: Callable[..., Any]) -> tuple[Callable[..., Any], str | None]:
    """Return the function inside torch's ``fp16_compress_wrapper`` or ``bf16_compress_wrapper``, and the wrapper's name; for any
    other function, itself and None."""
    for wrapper in _WRAPPERS:
        inner = f"{wrapper.__name__}.<locals>."
        if function.__module__ == wrapper.__module__ and function.__qualname__.startswith(inner):
            found: Callable[..., Any] = inspect.getclosurevars(function).nonlocals["hook"]
            return found, wrapper.__name__
    return function, None


def spec_of(state: object, function: Callable[..., Any], group: dist.ProcessGroup) -> dict[str, Any] | None:
    """Return the spec's name and parameters for torch's hook ``function`` with ``state``; None if no spec corresponds. Raises
    ``UnsupportedModel`` for an unsuitable state."""
    if function in _WITHOUT_STATE:
        _check_same_group(state, group)
        return {"name": _WITHOUT_STATE[function]}
    if function in _LOW_RANK:
        return {"name": _LOW_RANK[function], **_low_rank_parameters(state, _LOW_RANK[function], group)}
    if function is local_sgd.post_localSGD_hook:
        return {"name": "post_localSGD", **_local_sgd_parameters(state, group)}
    return None


def _low_rank_parameters(state: object, name: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the spec's parameters for a ``PowerSGDState``. Raises ``UnsupportedModel`` as ``spec_of`` does."""
    if not isinstance(state, power_sgd.PowerSGDState):
        raise UnsupportedModel(f"{name}_hook takes a PowerSGDState, not {type(state).__name__}")
    _check_same_group(state.process_group, group)
    if state.iter or state.error_dict or state.p_memory_dict:
        raise UnsupportedModel(
            "this PowerSGDState has been used; register a new one, and restore() the result of capture() on every rank"
        )
    parameters = {key: getattr(state, key) for key in _LOW_RANK_PARAMETERS}
    if name == "powerSGD":
        parameters["batch_tensors_with_same_shape"] = state.batch_tensors_with_same_shape
    return {**parameters, "random_seed": _seed_of(state.rng)}


def _seed_of(generator: np.random.RandomState) -> int:
    """Return the seed of a ``RandomState(seed)``. Raises ``UnsupportedModel`` if it has been used or seeded in another way."""
    state: Any = generator.get_state(legacy=False)
    seed = int(state["state"]["key"][0])
    first: Any = np.random.RandomState(seed).get_state(legacy=False)
    if not np.array_equal(first["state"]["key"], state["state"]["key"]):
        raise UnsupportedModel("the generator of this PowerSGDState has been used; register a new state")
    return seed


def _local_sgd_parameters(state: object, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the spec's parameters for a ``PostLocalSGDState``. Raises ``UnsupportedModel`` as ``spec_of`` does."""
    if not isinstance(state, local_sgd.PostLocalSGDState):
        raise UnsupportedModel(f"post_localSGD_hook takes a PostLocalSGDState, not {type(state).__name__}")
    _check_same_group(state.process_group, group)
    if state.iter:
        raise UnsupportedModel(
            "this PostLocalSGDState has been used; register a new one, and restore() the result of capture()"
        )
    return {
        "start_localSGD_iter": state.start_localSGD_iter,
        "post_local_gradient_allreduce": state.post_local_gradient_allreduce,
        "subgroup_size": None if state.subgroup is None else _consecutive_size(state.subgroup, group),
    }


def _consecutive_size(subgroup: dist.ProcessGroup, group: dist.ProcessGroup) -> int:
    """Return the size of ``subgroup``. Raises ``UnsupportedModel`` unless it has consecutive ranks of ``group``, and its first
    rank is a multiple of its size."""
    ranks = [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(subgroup)]
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] % len(ranks):
        raise UnsupportedModel(
            f"the subgroup has ranks {ranks}; only subgroups of consecutive ranks are supported, as new_subgroups of "
            "torch.distributed creates them"
        )
    return len(ranks)


def _check_same_group(requested: object, group: dist.ProcessGroup) -> None:
    """Raise ``UnsupportedModel`` unless the hook's process group ``requested`` is DDP's ``group``. ``requested`` None: the
    default group."""
    found = dist.group.WORLD if requested is None else requested
    if found is not group:
        raise UnsupportedModel("the hook's process group is not that of the DDP; give DDP the same process_group")
