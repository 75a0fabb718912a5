"""Hooks on DDP instances: construction, exact capture and restore. ``managed_ddp`` is the entry point; the package docstring has
a script."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.algorithms.base import Algorithm, Setup
from ratchet_hooks.algorithms.half_precision_wrapper import DTYPES, Wrapped
from ratchet_hooks.algorithms.powersgd import state_by_name
from ratchet_hooks.algorithms.preconditions import check_no_apex, check_one_device
from ratchet_hooks.algorithms.state_version import STATE_VERSION, check_data, redistribute
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout, ManagedDDP
from ratchet_hooks.ddp.numeric_warnings import HookWarning
from ratchet_hooks.ddp.process_groups import close_group
from ratchet_hooks.errors import HookStateError, LayoutMismatch, UnsupportedModel
from ratchet_hooks.manage.managed_hook import ManagedHook
from ratchet_hooks.specs.hook_specs import CustomSpec, HookSpec
from ratchet_hooks.specs.registry import HOOKS, is_stateful
from ratchet_hooks.state.encode import Tensors

__all__ = [
    "STATE_VERSION", "HookStateError", "HookWarning", "LayoutMismatch", "ManagedDDP", "ManagedHook", "UnsupportedModel",
    "attach", "close_group", "managed_ddp", "redistribute",
]  # fmt: skip

_DDP_OPTIONS = frozenset(
    {
        "bucket_cap_mb",
        "static_graph",
        "gradient_as_bucket_view",
        "find_unused_parameters",
        "broadcast_buffers",
        "init_sync",
    }
)


def managed_ddp(
    module: torch.nn.Module,
    spec: HookSpec,
    *,
    ddp: Mapping[str, object] | None = None,
    device: torch.device | None = None,
    recorded_layout: Layout | None = None,
    captured: tuple[Tensors, JsonValue] | None = None,
    process_group: dist.ProcessGroup | None = None,
    node_ranks: int | None = None,
) -> tuple[ManagedDDP, ManagedHook]:
    """Wrap ``module`` in DDP with the hook of ``spec``; returns the DDP and its hook. A collective: all ranks of the group call
    it.

    ``ddp``: keywords of DDP, such as bucket_cap_mb (MiB) and static_graph. DDP may broadcast rank 0's parameters and buffers
    here, so load per-rank state afterwards. ``device``: the device of the module's parameters; None: that of the first one.
    ``node_ranks``: ranks per node; None: the variable LOCAL_WORLD_SIZE, or all ranks if it is not set.

    ``captured``: the result of ``ManagedHook.capture()`` on this rank, from which the hook continues; None: nothing is restored.
    ``recorded_layout``: the bucket layout of the run that is continued. Pass it in place of ``captured`` if the caller itself
    calls ``ManagedHook.restore``.

    Raises ``UnsupportedModel`` for a model or option that the hook cannot handle, ``HookStateError`` for a captured state or
    layout that does not fit, ``CustomHookError`` for a user's own hook that cannot be used.
    """
    kwargs = _ddp_kwargs(ddp or {})
    if captured is not None:
        if recorded_layout is not None:
            raise ValueError("pass captured, which contains the layout, or recorded_layout; not both")
        recorded_layout = check_data(captured[1], spec)["layout"]
    if device is None:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
    check_module(module, spec)
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised; call init_process_group first")
    device_ids = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else None
    )
    with warnings.catch_warnings():
        # broadcast_buffers=False is deprecated, but its replacement still broadcasts buffers once.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        wrapped = ManagedDDP(module, recorded=recorded_layout, device_ids=device_ids, process_group=group, **kwargs)
    hook = attach(wrapped, spec, node_ranks=node_ranks)
    if captured is not None:
        hook.restore(*captured)
    return wrapped, hook


def attach(
    ddp: ManagedDDP, spec: HookSpec, *, node_ranks: int | None = None, build: Callable[[Setup], Algorithm] | None = None
) -> ManagedHook:
    """Register the hook of ``spec`` on ``ddp``, which must have none yet; returns the hook. A collective. ``build`` replaces the
    spec's builder. Raises ``UnsupportedModel``; for a user's own hook also ``CustomHookError`` or ``HookStateError``."""
    group = ddp.process_group
    setup = Setup(
        group=group,
        parameters=ddp.trained_parameters(),
        device=ddp.device,
        node_ranks=node_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", group.size())),
        undefined=ddp.find_unused_parameters or ddp.static_graph,
    )
    algorithm = _build_algorithm(spec, setup, build)
    if isinstance(spec, CustomSpec) and is_stateful(spec):
        ddp.fix_layout()  # a user's state may use bucket indices, which DDP's rebuild after the first iteration would change
    hook = ddp.hook = ManagedHook(spec, ddp, algorithm)
    hook.register()
    return hook


def _build_algorithm(spec: HookSpec, setup: Setup, build: Callable[[Setup], Algorithm] | None) -> Algorithm:
    """Return the hook's algorithm, inside the wrapper if the spec has one. Raises ``UnsupportedModel`` if the hook is not
    available."""
    entry = HOOKS[spec.name]
    if entry.builder is None and build is None:
        raise UnsupportedModel(f"hook {spec.name} is not available in this version")
    if spec.wrapper is not None:
        setup = replace(setup, cast_dtype=DTYPES[spec.wrapper])
    if build is None:
        module, _, attribute = str(entry.builder).partition(":")
        build = partial(getattr(import_module(module), attribute), spec)
    made = build(setup)
    return made if spec.wrapper is None else Wrapped(made)


def _ddp_kwargs(ddp: Mapping[str, object]) -> dict[str, Any]:
    """Return the options ``ddp`` as keyword arguments for DDP. Raises ``UnsupportedModel`` for unknown or contradictory
    options."""
    unknown = sorted(set(ddp) - _DDP_OPTIONS)
    if unknown:
        raise UnsupportedModel(f"DDP option {unknown[0]} is not supported; known: {', '.join(sorted(_DDP_OPTIONS))}")
    kwargs = {key: value for key, value in ddp.items() if value is not None}
    if kwargs.get("broadcast_buffers") is True:
        del kwargs["broadcast_buffers"]
    if kwargs.get("static_graph") and kwargs.get("find_unused_parameters"):
        raise UnsupportedModel("static_graph finds unused parameters itself; give only one of the two")
    return kwargs


def check_module(module: torch.nn.Module, spec: HookSpec) -> None:
    """Raise ``UnsupportedModel`` for a module that cannot be trained under the hook, such as one with parameters on several
    devices."""
    check_one_device(module)
    check_no_apex(spec)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    on_cpu = all(p.device.type == "cpu" for p in module.parameters())
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm) and part.training and on_cpu:
            raise UnsupportedModel(
                f"{name or 'the model'} is a SyncBatchNorm, which trains on GPUs only; use BatchNorm on the CPU"
            )
    for name, parameter in trained.items():
        if parameter.is_complex() and (spec.name not in ("allreduce", "noop") or spec.wrapper is not None):
            raise UnsupportedModel(
                f"{name} is complex, which {spec.wrapper or spec.name} would corrupt; use allreduce without a wrapper"
            )
    if spec.name == "powerSGD":
        state_by_name.check_parameters(trained)
