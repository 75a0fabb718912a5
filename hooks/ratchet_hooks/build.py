"""Hooks on DDP instances: construction, exact capture and restore, summaries.

``managed_ddp`` is the door. See the package docstring for a complete script.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue

from ratchet_hooks import powersgd
from ratchet_hooks.algorithms import Algorithm, Allreduce, Fp16Compress, PowerSGD, TensorFuture
from ratchet_hooks.codec import Tensors
from ratchet_hooks.errors import HookStateError, LayoutMismatch, UnsupportedModel
from ratchet_hooks.layout import CountedBucket, Layout, ManagedDDP, check_names, mismatch
from ratchet_hooks.registry import HOOKS, HookEntry, Replicas
from ratchet_hooks.specs import AllreduceSpec, Fp16CompressSpec, HookSpec, PowerSGDSpec
from ratchet_hooks.summary import HookSummary
from ratchet_hooks.watch import HookWarning

STATE_VERSION = 1

_DDP_OPTIONS = frozenset(
    {"bucket_cap_mb", "static_graph", "gradient_as_bucket_view", "find_unused_parameters", "broadcast_buffers", "init_sync"}
)


def build_allreduce(spec: AllreduceSpec, group: dist.ProcessGroup) -> Algorithm:
    return Allreduce(spec, group)


def build_fp16(spec: Fp16CompressSpec, group: dist.ProcessGroup) -> Algorithm:
    return Fp16Compress(spec, group)


def build_powersgd(spec: PowerSGDSpec, group: dist.ProcessGroup) -> Algorithm:
    return PowerSGD(spec, group)


def managed_ddp(
    module: torch.nn.Module,
    spec: HookSpec,
    *,
    ddp: Mapping[str, object],
    device: torch.device,
    recorded_layout: Layout | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[ManagedDDP, ManagedHook]:
    """``module`` wrapped in DDP under the hook of ``spec``. A collective: all ranks of the group call it.

    ``ddp`` takes DDP's own keywords: bucket_cap_mb (MiB), static_graph, gradient_as_bucket_view, find_unused_parameters,
    broadcast_buffers, init_sync. DDP broadcasts rank 0's parameters and buffers here, so load per-rank state afterwards.

    ``recorded_layout`` is ``ManagedHook.layout()`` of the run that is continued; the reducer stands on it from the first
    iteration. Raises ``LayoutMismatch`` when it cannot, ``UnsupportedModel`` for what the hook cannot handle.
    """
    kwargs = _ddp_kwargs(ddp)
    entry = HOOKS[spec.name]
    _check_module(module, spec)
    if entry.builder is None:
        raise UnsupportedModel(f"hook {spec.name} is not available in this version")
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised; call init_process_group first")
    device_ids = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else None
    with warnings.catch_warnings():
        # broadcast_buffers=False is deprecated, but what replaces it still broadcasts buffers once.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        wrapped = ManagedDDP(module, recorded=recorded_layout, device_ids=device_ids, process_group=group, **kwargs)
    module_name, _, attribute = entry.builder.partition(":")
    algorithm: Algorithm = getattr(import_module(module_name), attribute)(spec, group)
    hook = ManagedHook(spec, entry, wrapped, algorithm)
    wrapped.register_comm_hook(None, hook.on_bucket)
    return wrapped, hook


def _ddp_kwargs(ddp: Mapping[str, object]) -> dict[str, Any]:
    unknown = sorted(set(ddp) - _DDP_OPTIONS)
    if unknown:
        raise UnsupportedModel(f"DDP option {unknown[0]} is not managed; known: {', '.join(sorted(_DDP_OPTIONS))}")
    kwargs = {key: value for key, value in ddp.items() if value is not None}
    if kwargs.get("broadcast_buffers") is True:
        del kwargs["broadcast_buffers"]
    if kwargs.get("static_graph") and kwargs.get("find_unused_parameters"):
        raise UnsupportedModel("static_graph finds unused parameters itself; give only one of the two")
    return kwargs


def _check_module(module: torch.nn.Module, spec: HookSpec) -> None:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if parameter.is_complex() and spec.name != "allreduce":
            raise UnsupportedModel(f"{name} is complex, which {spec.name} would corrupt; use allreduce")
    if spec.name == "powerSGD":
        powersgd.check_parameters(trained)


class ManagedHook:
    """The hook of one DDP instance on one rank: runs it, captures and restores its state, tells what it does.

    ``replicas`` says whether parameters are equal on all ranks between two steps.
    """

    def __init__(self, spec: HookSpec, entry: HookEntry, ddp: ManagedDDP, algorithm: Algorithm) -> None:
        self.spec = spec
        self.entry = entry
        self.replicas: Replicas = entry.replicas
        self._ddp = ddp
        self._algorithm = algorithm
        self._parameters = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._fixed: Layout | None = ddp.read_layout() if ddp.fixed else None
        self._seen: Layout = []
        self._here = 0  # complete iterations of this process
        self._before = 0  # complete iterations of the processes before it
        self._bytes = self._bytes_running = (0, 0)

    @property
    def iteration(self) -> int:
        """Complete iterations (backward passes that synchronised) since the job began."""
        return self._before + self._here

    def layout(self) -> Layout | None:
        """Parameter names per bucket as the next iteration will reduce them; None before the first one of a fresh run.

        A collective the first time it is called after an iteration: DDP's one rebuild, due at the next forward, happens here.
        """
        self._between_steps("layout")
        if self._fixed is None and self._here:
            self._ddp.settle()
            if self._ddp.fixed:
                self._fixed = self._ddp.read_layout()
        return None if self._fixed is None else [list(bucket) for bucket in self._fixed]

    def warnings(self) -> list[HookWarning]:
        """What went wrong without an error: overflow, non-finite averages; one entry per parameter and kind."""
        return self._algorithm.watch.warnings()

    def capture(self) -> tuple[Tensors, JsonValue]:
        """Copies of this rank's whole state, by parameter name, and its JSON part. Call between steps, on every rank."""
        layout = self.layout()
        data: dict[str, JsonValue] = {
            "version": STATE_VERSION,
            "hook": self.spec.name,
            "iteration": self.iteration,
            "layout": None if layout is None else [list[JsonValue](bucket) for bucket in layout],
            "state": None,
        }
        tensors: Tensors = {}
        if self._algorithm.state is not None:
            tensors, data["state"] = powersgd.capture(self._algorithm.state, layout, self._parameters)
        return tensors, data

    def restore(self, tensors: Mapping[str, torch.Tensor], data: JsonValue, *, relayout: bool = False) -> None:
        """Continue from a captured state, bit for bit. Call before the first forward, after model and optimizer are loaded.

        The DDP must stand on the recorded layout (``managed_ddp(recorded_layout=...)``). With ``relayout`` it may stand on
        another: residuals, P and Q are laid by parameter name into it, which loses nothing but is no longer bit for bit.
        Raises ``HookStateError`` naming the key that does not fit; the hook is then unchanged.
        """
        checked = _check_data(data, self.spec.name)
        if self._here:
            raise RuntimeError("restore comes before the first forward of a newly built DDP")
        recorded = checked["layout"]
        if recorded is not None:
            check_names([name for bucket in recorded for name in bucket], list(self._parameters))
            if relayout:
                self._ddp.fix_layout()
                self._fixed = self._ddp.read_layout()
            if self._fixed is None:
                raise LayoutMismatch("layout", "pass the recorded layout to managed_ddp(recorded_layout=...)")
            if self._fixed != recorded and not relayout:
                raise mismatch(recorded, self._fixed, "of the restored state")
        if self._algorithm.state is not None:
            if not isinstance(checked["state"], dict):
                raise HookStateError("state", "missing from the recorded state")
            layout = self._fixed if recorded is not None else None
            powersgd.restore(self._algorithm.state, tensors, checked["state"], layout, self._parameters)
        elif tensors:
            raise HookStateError(min(tensors), f"recorded, but {self.spec.name} keeps no tensors")
        self._before = checked["iteration"]

    def summary(self, *, rank: int, step: int) -> HookSummary:
        """JSON view of this rank's hook after ``step`` steps."""
        state = self._algorithm.state
        elements = sum(p.numel() for p in self._parameters.values())
        values: dict[str, Any] = {"phase": "steady", "compression_rate": 1.0, "elements_before": elements}
        values |= {"elements_after": elements}
        if state is not None:
            rate, before, after = state.compression_stats()
            warm_up = state.iter < state.start_powerSGD_iter
            values |= {
                "phase": "warm-up" if warm_up else "compressing",
                "compression_rate": rate if after else 1.0,
                "elements_before": before,
                "elements_after": after,
                "residual_norm": powersgd.residual_norm(state),
                "memory_bytes": powersgd.memory_bytes(state),
            }
        return HookSummary(
            name=self.spec.name,
            wrapper=self.spec.wrapper,
            parameters=self.spec.model_dump(exclude={"name", "wrapper"}),
            rank=rank,
            step=step,
            iteration=self.iteration if state is None else state.iter,
            bytes_before=self._bytes[0],
            bytes_after=self._bytes[1],
            buckets=len(self._fixed or self._seen),
            **values,
        )

    def on_bucket(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not names
        """What DDP calls for every bucket. Raises ``LayoutMismatch`` before a gradient could meet another's state."""
        return self._on_bucket(bucket)

    def _on_bucket(self, bucket: Any) -> TensorFuture:
        if self._ddp.static_graph and self._here == 0:
            bucket = self._counted(bucket)
        names = [self._ddp.name_of(p) for p in bucket.parameters()]
        self._check(bucket, names)
        self._seen.append(names)
        self._algorithm.watch.iteration = self.iteration + 1
        last, before = bucket.is_last(), bucket.buffer().nbytes
        future, sent = self._algorithm.run(bucket, names)
        self._bytes_running = (self._bytes_running[0] + before, self._bytes_running[1] + sent)
        if last:
            self._complete()
        return future

    def _counted(self, bucket: dist.GradBucket) -> CountedBucket:
        assert self._fixed is not None
        index = len(self._seen)
        parameters = [self._parameters[name] for name in self._fixed[index]]
        return CountedBucket(bucket, index, list(parameters), index == len(self._fixed) - 1)

    def _check(self, bucket: Any, names: list[str]) -> None:
        if bucket.index() == 0 and self._seen:
            self._seen = []  # a backward before this one failed half-way
        if self._fixed is None:
            return
        expected = self._fixed[bucket.index()] if bucket.index() < len(self._fixed) else []
        size = sum(self._parameters[name].numel() for name in expected)
        if names != expected or bucket.buffer().numel() != size:
            raise mismatch([*self._seen, expected], [*self._seen, names], f"in iteration {self.iteration + 1}")

    def _complete(self) -> None:
        if self._fixed is None and self._ddp.fixed:
            self._fixed = self._seen
        self._buckets = len(self._seen)
        self._seen = []
        self._here += 1
        self._bytes, self._bytes_running = self._bytes_running, (0, 0)

    def _between_steps(self, what: str) -> None:
        if self._seen:
            raise RuntimeError(f"{what} was called while a backward pass was under way; call it between steps")


def _check_data(data: JsonValue, hook: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not isinstance(data.get("version"), int):
        raise HookStateError("version", "not a recorded hook state")
    if data["version"] > STATE_VERSION:  # type: ignore[operator]
        raise HookStateError("version", f"recorded in format {data['version']}; this version reads up to {STATE_VERSION}")
    if data.get("hook") != hook:
        raise HookStateError("hook", f"recorded under {data.get('hook')!r}, but the hook asked for is {hook!r}")
    layout = data.get("layout")
    buckets = layout if isinstance(layout, list) else []
    if layout is not None and not (buckets and all(isinstance(b, list) and b for b in buckets)):
        raise HookStateError("layout", "malformed: expected a list of non-empty lists of parameter names")
    if not isinstance(data.get("iteration"), int) or "state" not in data:
        raise HookStateError("iteration", "missing from the recorded state")
    return dict(data)


def redistribute(states: Sequence[tuple[Mapping[str, torch.Tensor], JsonValue]]) -> tuple[Tensors, JsonValue]:
    """One state for every rank of a group of any size, out of the states of all ranks of the old one (in rank order).

    Residuals become their mean over the old ranks (added up in float64), so the averaged residual, on which error feedback
    rests, is kept. Everything else is equal on all ranks and taken from rank 0. Raises ``HookStateError`` where it is not equal.
    """
    if not states:
        raise HookStateError("states", "at least one rank's state is needed")
    first, data = states[0]
    out: Tensors = {}
    for rank, (tensors, other) in enumerate(states):
        if other != data:
            raise HookStateError(f"rank {rank}", "the JSON part differs from rank 0's; these states are not of one checkpoint")
        if (odd := set(tensors) ^ set(first)):
            raise HookStateError(min(odd), f"not in the states of both rank 0 and rank {rank}")
    for name, tensor in first.items():
        parts = [tensors[name] for tensors, _ in states]
        if name.startswith("residual/"):
            out[name] = torch.stack([p.double() for p in parts]).mean(0).to(tensor.dtype)
        elif all(_same_bits(p, tensor) for p in parts):
            out[name] = tensor.clone()
        else:
            raise HookStateError(name, "differs between ranks, but must be equal on all of them")
    return out, data


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def close_group() -> None:
    """Leave ``torch.distributed`` cleanly: wait for all ranks, then destroy the group.

    Without the barrier a rank may tear down connections that another still reads, which aborts that process at its exit.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
