"""Hooks on a DistributedDataParallel that somebody else made: a framework, or a script that calls torch itself.

PyTorch's page on communication hooks ends with an example that saves a PowerSGD state from rank 0 and loads it everywhere. These
three lines make it right; all else of it may stay::

    register(ddp_model, (powersgd_state, powerSGD.powerSGD_hook))      # instead of ddp_model.register_comm_hook(...)
    save_state(f"rank-{rank}.safetensors", {**state, "hook": capture(ddp_model)})        # every rank, instead of torch.save
    restore(ddp_model, load_state(f"rank-{rank}.safetensors")["hook"])      # every rank, before the first forward

``save_state`` and ``load_state`` are those of ``ratchet_hooks.files``; any other way to keep tensors and JSON will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks import stock
from ratchet_hooks.algorithm import Algorithm, Setup
from ratchet_hooks.build import ManagedDDP, ManagedHook, UnsupportedModel, attach, check_module
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.codec import Tensors
from ratchet_hooks.given import Given, describe
from ratchet_hooks.specs import CustomSpec, HookSpec, HookSpecBase, hook_spec, normalise_hook
from ratchet_hooks.states import check_data
from ratchet_hooks.torch_compat import hooks_of

__all__ = ["Captured", "Hook", "capture", "hook_of", "register", "resolve", "restore"]

Captured = tuple[Mapping[str, torch.Tensor], JsonValue]
"""Tensors by name and the JSON part."""
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
    """Put ``ddp_model`` under a hook whose state can be captured and restored bit for bit. A collective: on every rank, right
    after the model's construction, before its first forward.

    ``hook``: what Lightning's ``register_ddp_comm_hook`` takes as ddp_comm_state and ddp_comm_hook, as a pair, or a spec of
    ``ratchet_hooks.specs``. torch's own functions stand for Ratchet's implementations of them, with the parameters of the
    state object. Another function runs as it is; its state offers ``__getstate__`` and ``__setstate__``, or ``state_dict`` and
    ``load_state_dict``, of tensors, numbers, strings, lists and dicts. None: the one that ``ddp_model.register_comm_hook`` was
    given, by a framework perhaps, is taken over. ``wrapper``: fp16_compress_wrapper or bf16_compress_wrapper, by name or as
    torch's function. ``node_ranks``: see ``managed_ddp``. ``parameters``: of the spec, over those that ``hook`` gives, such as
    ``model_averaging_period`` for post_localSGD, whose ``average_parameters()`` is to be called after every optimizer step in
    place of torch's averager.

    ``ddp_model`` stays the same object; its class is ``ManagedDDP`` from now on, and its reducer a new one. Raises
    ``UnsupportedModel`` for a DDP, a model or a hook that cannot be managed, ``ValueError`` for parameters that do not fit.
    """
    if isinstance(ddp_model, ManagedDDP) and ddp_model.hook is not None:
        raise UnsupportedModel(f"hook {ddp_model.hook.spec.name} is registered on this DDP; one DDP has one hook")
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UnsupportedModel(
            f"a {type(ddp_model).__name__} is no DistributedDataParallel; wrap the model in that first"
        )
    hook = _registered(ddp_model) if hook is None else hook
    spec = resolve(ddp_model, hook, wrapper=wrapper, **parameters)
    check_module(ddp_model.module, spec)
    adopted = ddp_model if isinstance(ddp_model, ManagedDDP) else ManagedDDP.adopt(ddp_model)
    return attach(adopted, spec, node_ranks=node_ranks, make=_maker(hook, spec))


def capture(ddp_model: torch.nn.Module) -> tuple[Tensors, JsonValue]:
    """Copies of the hook's state on this rank, by parameter name, with the bucket layout and all counters in the JSON part.

    Between two steps, on every rank (the first time it may let DDP rebuild its buckets, a collective). Each rank keeps its own.
    """
    return hook_of(ddp_model).capture()


def restore(ddp_model: torch.nn.Module, captured: Captured) -> None:
    """Go on from what ``capture`` gave on this rank of a group of the same size: state and buckets, from the first iteration on.

    A collective, before the first forward that trains. Model, optimizer, buffers and generators are the caller's; order does not
    matter. Raises ``HookStateError`` naming what does not fit, ``RuntimeError`` after that forward.
    """
    hook = hook_of(ddp_model)
    tensors, data = captured
    recorded = check_data(data, hook.spec)["layout"]
    if recorded is not None and recorded != hook.layout():
        hook.lay_out(recorded)
    hook.restore(tensors, data)


def hook_of(ddp_model: torch.nn.Module) -> ManagedHook:
    """The managed hook of a DDP: its summary, warnings and averaging. Raises ``UnsupportedModel`` where there is none."""
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
    """The spec under which ``register``, with the same arguments, would put ``ddp_model``; raises what it raises for them."""
    values: Any
    hook = _registered(ddp_model) if hook is None else hook
    if isinstance(hook, HookSpecBase):
        values = hook.values()
    elif callable(hook) or isinstance(hook, tuple):
        values = _of_objects(*((None, hook) if callable(hook) else hook), ddp_model)
    else:
        values = normalise_hook(dict(hook) if isinstance(hook, Mapping) else hook)
    name = stock.wrapper_name(wrapper)
    if name is not None and values.get("wrapper") is not None:
        raise UnsupportedModel(f"wrapper {values['wrapper']} is around the hook already; give one wrapper")
    return hook_spec({**values, **parameters, **({} if name is None else {"wrapper": name})})


def _registered(ddp: DistributedDataParallel) -> tuple[object, Callable[..., Any]]:
    """State and function that are registered on ``ddp``."""
    hooks = hooks_of(ddp)
    if not hooks:
        raise UnsupportedModel("no hook is registered on this DDP; name one, such as register(ddp_model, 'allreduce')")
    function, state = hooks[0]
    return state, function


def _of_objects(state: object, function: Callable[..., Any], ddp: DistributedDataParallel) -> dict[str, Any]:
    inner, wrapper = stock.unwrapped(function)
    values = stock.spec_of(state, inner, ddp.process_group)
    return {**(describe(state, inner) if values is None else values), "wrapper": wrapper}


def _maker(hook: Hook, spec: HookSpec) -> Callable[[Setup], Algorithm] | None:
    """What builds a hook of the caller's own from its objects; None where the spec says it all."""
    if not isinstance(spec, CustomSpec) or not (callable(hook) or isinstance(hook, tuple)):
        return None
    state, function = (None, hook) if callable(hook) else hook
    return partial(Given, stock.unwrapped(function)[0], state, spec)
