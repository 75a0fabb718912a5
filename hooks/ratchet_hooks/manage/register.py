"""Hooks on an existing DistributedDataParallel: one made by a framework, or by a script that calls torch itself.

PyTorch's page on communication hooks ends with an example that saves a PowerSGD state from rank 0 and loads it everywhere. These
three lines correct it::

    register(ddp_model, (powersgd_state, powerSGD.powerSGD_hook))      # instead of ddp_model.register_comm_hook(...)
    save_state(f"rank-{rank}.safetensors", {**state, "hook": capture(ddp_model)})        # every rank, instead of torch.save
    restore(ddp_model, load_state(f"rank-{rank}.safetensors")["hook"])      # every rank, before the first forward

``save_state`` and ``load_state`` are those of ``ratchet_hooks.files``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.algorithms.base import Algorithm, Setup
from ratchet_hooks.algorithms.custom import ExistingObjectsHook, describe_hook
from ratchet_hooks.algorithms.state_version import check_data
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.manage import from_torch
from ratchet_hooks.manage.managed_ddp import ManagedDDP, ManagedHook, UnsupportedModel, attach, check_module
from ratchet_hooks.specs.hook_specs import CustomSpec, HookSpec, HookSpecBase, hook_spec, normalise_hook
from ratchet_hooks.state.encode import Tensors
from ratchet_hooks.torch_compat import comm_hooks

__all__ = ["Captured", "Hook", "capture", "hook_of", "register", "resolve", "restore"]

Captured = tuple[Mapping[str, torch.Tensor], JsonValue]
"""Tensors by name, and the JSON part."""
Hook = HookSpec | str | Mapping[str, Any] | Callable[..., Any] | tuple[object, Callable[..., Any]]
"""A spec; its name; its keys and values; a function as ``register_comm_hook`` takes it, or a state and that function."""


def register(
    ddp_model: DistributedDataParallel,
    hook: Hook | None = None,
    *,
    wrapper: str | Callable[..., Any] | None = None,
    node_ranks: int | None = None,
    **parameters: Any,
) -> ManagedHook:
    """Put a managed hook, whose state can be captured and restored bit for bit, on ``ddp_model``; returns the hook. A collective:
    on every rank, right after the construction of ``ddp_model``, before its first forward.

    ``hook``: a spec of ``ratchet_hooks.specs``, its name or its values; or a function as ``ddp_model.register_comm_hook`` takes
    it, or a pair of state and function. None: the hook that torch's ``register_comm_hook`` has already put on ``ddp_model``.
    torch's own functions select Ratchet's implementations of them. A user's own state must have ``__getstate__`` and
    ``__setstate__``, or ``state_dict`` and ``load_state_dict``.

    ``wrapper``: fp16_compress_wrapper or bf16_compress_wrapper, by name or as torch's function. ``node_ranks``: as in
    ``managed_ddp``. ``parameters``: of the spec; they override those of ``hook``. Under post_localSGD, call the hook's
    ``average_parameters()`` after every optimizer step in place of torch's averager.

    The class of ``ddp_model`` becomes ``ManagedDDP``. Raises ``UnsupportedModel`` for a DDP, a model or a hook that cannot be
    managed, ``ValueError`` for parameters that do not fit, ``CustomHookError`` or ``HookStateError`` for a user's own hook that
    cannot be used. After an error ``ddp_model`` may have no hook at all.
    """
    if isinstance(ddp_model, ManagedDDP) and ddp_model.hook is not None:
        raise UnsupportedModel(f"hook {ddp_model.hook.spec.name} is registered on this DDP; one DDP has one hook")
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UnsupportedModel(
            f"a {type(ddp_model).__name__} is no DistributedDataParallel; wrap the model in that first"
        )
    hook = _registered_hook(ddp_model) if hook is None else hook
    spec = resolve(ddp_model, hook, wrapper=wrapper, **parameters)
    check_module(ddp_model.module, spec)
    adopted = ddp_model if isinstance(ddp_model, ManagedDDP) else ManagedDDP.adopt(ddp_model)
    return attach(adopted, spec, node_ranks=node_ranks, build=_builder_for(hook, spec))


def capture(ddp_model: torch.nn.Module) -> tuple[Tensors, JsonValue]:
    """Return copies of the hook's state on this rank: tensors by name, and a JSON part. Call it between two steps, on every rank;
    it may be a collective. Each rank keeps its own result. Raises ``UnsupportedModel`` if there is no managed hook, and
    the errors of ``ManagedHook.capture``."""
    return hook_of(ddp_model).capture()


def restore(ddp_model: torch.nn.Module, captured: Captured) -> None:
    """Continue from the result of ``capture`` on the same rank of a group of the same size. A collective, before the first
    forward. The caller restores model, optimizer, buffers and generators. Raises ``HookStateError`` for a state that does not
    fit (the buckets may have changed), ``UnsupportedModel`` without a managed hook."""
    hook = hook_of(ddp_model)
    tensors, data = captured
    recorded = check_data(data, hook.spec)["layout"]
    if recorded is not None and recorded != hook.layout():
        hook.apply_layout(recorded)
    hook.restore(tensors, data)


def hook_of(ddp_model: torch.nn.Module) -> ManagedHook:
    """Return the managed hook of a DDP, for its summary, warnings and averaging. Raises ``UnsupportedModel`` if there is none."""
    hook: ManagedHook | None = ddp_model.hook if isinstance(ddp_model, ManagedDDP) else None
    if hook is None:
        raise UnsupportedModel(
            f"no managed hook is registered on this {type(ddp_model).__name__}: call ratchet_hooks.register(ddp_model, hook) "
            "right after the construction of DDP"
        )
    return hook


def resolve(
    ddp_model: DistributedDataParallel,
    hook: Hook | None = None,
    *,
    wrapper: str | Callable[..., Any] | None = None,
    **parameters: Any,
) -> HookSpec:
    """Return the spec that ``register`` would use with the same arguments; nothing is registered. Raises ``UnsupportedModel``, or
    ``ValueError`` for parameters that do not fit. The model and a user's own hook are not checked."""
    values: Any
    hook = _registered_hook(ddp_model) if hook is None else hook
    if isinstance(hook, HookSpecBase):
        values = hook.values()
    elif callable(hook) or isinstance(hook, tuple):
        values = _values_of_objects(*((None, hook) if callable(hook) else hook), ddp_model)
    else:
        values = normalise_hook(dict(hook) if isinstance(hook, Mapping) else hook)
    name = from_torch.wrapper_name(wrapper)
    if name is not None and values.get("wrapper") is not None:
        raise UnsupportedModel(f"wrapper {values['wrapper']} is around the hook already; give one wrapper")
    return hook_spec({**values, **parameters, **({} if name is None else {"wrapper": name})})


def _registered_hook(ddp: DistributedDataParallel) -> tuple[object, Callable[..., Any]]:
    """Return state and function of the hook that is registered on ``ddp``. Raises ``UnsupportedModel`` if there is none."""
    hooks = comm_hooks(ddp)
    if not hooks:
        raise UnsupportedModel("no hook is registered on this DDP; name one, such as register(ddp_model, 'allreduce')")
    function, state = hooks[0]
    return state, function


def _values_of_objects(state: object, function: Callable[..., Any], ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return the values of the spec for a state and a hook function, torch's or the user's own."""
    inner, wrapper = from_torch.unwrap(function)
    values = from_torch.spec_of(state, inner, ddp.process_group)
    return {**(describe_hook(state, inner) if values is None else values), "wrapper": wrapper}


def _builder_for(hook: Hook, spec: HookSpec) -> Callable[[Setup], Algorithm] | None:
    """Return a function that builds a user's own hook from the objects in ``hook``; None if the spec alone suffices."""
    if not isinstance(spec, CustomSpec) or not (callable(hook) or isinstance(hook, tuple)):
        return None
    state, function = (None, hook) if callable(hook) else hook
    return partial(ExistingObjectsHook, from_torch.unwrap(function)[0], state, spec)
