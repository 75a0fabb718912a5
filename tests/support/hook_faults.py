"""What goes wrong or must be refused, as functions for the ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn

import ratchet_hooks
from ratchet_hooks.errors import advice_on
from ratchet_hooks.manage.managed_ddp import HookStateError, UnsupportedModel, managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec, BatchedPowerSGDSpec, Fp16CompressSpec, HookSpec, PowerSGDSpec
from ratchet_worker.host.exit import cause_of
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, SPECS, Case, Net, Run
from tests.support.hook_properties import CPU


def overflow_warnings(rank: int) -> list[tuple[str, str, int]]:
    """A loss that is too large on rank 1 only, at the second step."""
    module = nn.Linear(4, 4)
    ddp, hook = managed_ddp(module, Fp16CompressSpec(), ddp={}, device=CPU)
    for step in range(3):
        factor = 1e6 if step == 1 and rank == 1 else 1.0
        (ddp(torch.ones(2, 4)).sum() * factor).backward()
        ddp.zero_grad()
    return [(w.code, w.parameter, w.iteration) for w in hook.warnings()]


def zero_gradient_warnings(rank: int, epsilon: float) -> tuple[set[tuple[str, str, int]], bool]:
    """A parameter that no rank uses, under PowerSGD: (warnings, whether the residuals stayed finite)."""
    spec = PowerSGDSpec(start_powerSGD_iter=2, orthogonalization_epsilon=epsilon)
    case = Case(hook="powerSGD", cap=MANY_BUCKETS, spec=spec, unused=True, ddp={"find_unused_parameters": True})
    run = Run(rank, case)
    run.train(4)
    tensors = run.hook.capture()[0]
    return {(w.code, w.parameter, w.iteration) for w in run.hook.warnings()}, all(
        bool(t.isfinite().all()) for t in tensors.values()
    )


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


REFUSALS: dict[str, tuple[Callable[[], nn.Module], HookSpec, dict[str, object], str]] = {
    "devices": (TwoDevices, AllreduceSpec(), {}, "here.weight is on cpu and there.weight on meta"),
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), AllreduceSpec(), {}, "weight produces sparse gradients"),
    "scalar": (Scalar, SPECS["powerSGD"], {}, "scale has shape"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), Fp16CompressSpec(), {}, "weight is complex"),
    "option": (
        lambda: nn.Linear(2, 2),
        AllreduceSpec(),
        {"mixed_precision": 1},
        "DDP option mixed_precision is not supported",
    ),
    "sync batch norm": (
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
        AllreduceSpec(),
        {},
        "1 is a SyncBatchNorm",
    ),
    "empty, powerSGD": (lambda: nn.Linear(0, 2), PowerSGDSpec(start_powerSGD_iter=2), {}, "requires_grad"),
    "empty, batched": (lambda: nn.Linear(0, 2), BatchedPowerSGDSpec(start_powerSGD_iter=2), {}, "requires_grad"),
    "both": (
        lambda: nn.Linear(2, 2),
        AllreduceSpec(),
        {"static_graph": True, "find_unused_parameters": True},
        "give only one",
    ),
}


def construction_refusal(rank: int, name: str) -> str:
    make, spec, ddp, _ = REFUSALS[name]
    try:
        managed_ddp(make(), spec, ddp=ddp, device=CPU)
    except UnsupportedModel as exc:
        return str(exc)
    return "accepted"


def refused_after_construction(rank: int) -> list[str]:
    """What torch allows on a DDP that stands, and no layout or state would survive."""
    ddp, _ = managed_ddp(nn.Linear(2, 2), AllreduceSpec(), device=CPU)
    said = []
    for act in (ddp._set_static_graph, lambda: ddp.join([])):
        try:
            act()
            said.append("accepted")
        except UnsupportedModel as exc:
            said.append(str(exc))
    return said


def sparse_gradient_error(rank: int) -> str:
    """A gradient that turns out to be sparse: the advice on torch's error."""
    module = nn.Linear(4, 10)
    ddp, _ = managed_ddp(_Looked(module), AllreduceSpec(), device=CPU)
    try:
        ddp(torch.tensor([1, 2])).sum().backward()
    except NotImplementedError as exc:
        return str(advice_on(exc))
    return "accepted"


class _Looked(nn.Module):
    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table.weight, sparse=True) + self.table.bias.sum()


def static_graph_no_sync_error(rank: int) -> str:
    ddp, _ = managed_ddp(nn.Linear(2, 2), AllreduceSpec(), ddp={"static_graph": True}, device=CPU)
    with torch.no_grad(), ddp.no_sync():
        ddp(torch.ones(1, 2))  # an evaluation is allowed
    try:
        with ddp.no_sync():
            ddp(torch.ones(1, 2)).sum().backward()
    except UnsupportedModel as exc:
        return str(exc)
    return "accepted"


def refusal_under_apex(rank: int, spec: HookSpec, late: bool) -> tuple[str, str]:
    """A stand-in for Apex, which is not installed here: the module in which ``apex.amp.initialize`` leaves its options."""
    options = SimpleNamespace(enabled=not late)
    stand_in = SimpleNamespace(_amp_state=SimpleNamespace(opt_properties=options))
    when = "construction"
    with patch.dict(sys.modules, {"apex.amp._amp_state": stand_in}):  # type: ignore[dict-item]
        try:
            ddp, _ = managed_ddp(nn.Linear(2, 2), spec, device=CPU)
            options.enabled, when = True, "first step"
            ddp(torch.ones(1, 2)).sum().backward()
        except UnsupportedModel as exc:
            return when, str(exc)
    return "", "accepted"


def detached_view_error(rank: int) -> tuple[str, str]:
    """What old training loops do in place of ``zero_grad``, under ``gradient_as_bucket_view``: the cause and the words in which
    the worker tells it."""
    ddp, _ = managed_ddp(nn.Linear(2, 2), AllreduceSpec(), ddp={"gradient_as_bucket_view": True}, device=CPU)
    ddp(torch.ones(1, 2)).sum().backward()
    try:
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.grad.detach_()
            parameter.grad.zero_()
    except RuntimeError as error:
        ddp.zero_grad()  # the advice
        ddp(torch.ones(1, 2)).sum().backward()
        return cause_of(error)
    return "", "accepted"


def restore_mismatches(rank: int) -> dict[str, tuple[str, str]]:
    """(key, message) of every way to restore into the wrong place."""
    case = Case(hook="powerSGD", cap=MANY_BUCKETS)
    run = Run(rank, case)
    run.train(5)
    tensors, data = run.hook.capture()
    layout = run.hook.layout()

    def attempt(act: Callable[[], object]) -> tuple[str, str]:
        try:
            act()
        except HookStateError as exc:
            return exc.key, str(exc)
        return "", "accepted"

    def build(
        module: nn.Module | None = None, spec: HookSpec | None = None, cap: float = MANY_BUCKETS, pin: bool = True
    ) -> Any:
        ddp = {"bucket_cap_mb": cap}
        recorded = layout if pin else None
        return managed_ddp(module or Net(), spec or case.hook_spec, ddp=ddp, device=CPU, recorded_layout=recorded)[1]

    wide = Net()
    wide.extra = nn.Linear(3, 3)
    without = {name: t for name, t in tensors.items() if name != "residual/left.weight"}
    reshaped = {**tensors, "residual/left.weight": tensors["residual/left.weight"].flatten()}
    return {
        "newer": attempt(lambda: build().restore(tensors, {**data, "version": 99})),
        "not a state": attempt(lambda: build().restore(tensors, [])),
        "other hook": attempt(lambda: build(spec=AllreduceSpec()).restore(tensors, data)),
        "other rank": attempt(lambda: build(spec=PowerSGDSpec(start_powerSGD_iter=3)).restore(tensors, data)),
        "missing": attempt(lambda: build().restore(without, data)),
        "reshaped": attempt(lambda: build().restore(reshaped, data)),
        "left over": attempt(lambda: build().restore({**tensors, "residual/none": torch.ones(1)}, data)),
        "other model": attempt(lambda: build(module=wide)),
        "other model at restore": attempt(lambda: build(module=wide, pin=False).restore(tensors, data)),
        "other cap": attempt(lambda: build(cap=ONE_BUCKET)),
        "not pinned": attempt(lambda: build(pin=False).restore(tensors, data)),
        "laid out anew": attempt(lambda: build(cap=ONE_BUCKET, pin=False).restore(tensors, data, relayout=True)),
    }


def run_docstring_script(rank: int, directory: str, steps: int) -> None:
    """The script of the package's docstring, up to ``steps``; goes on from what the directory holds."""
    text = ratchet_hooks.__doc__ or ""
    source = "\n".join(line[4:] for line in text[text.index("    from pathlib") :].splitlines())
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "ratchet_hooks.__doc__", "exec"), scope)
    scope["train"](Path(directory), steps)


def rank_environment(rank: int) -> tuple[int, int, int]:
    return rank, dist.get_world_size(), os.getppid()


def fail_or_wait(rank: int, how: str) -> None:
    """Rank 1 ends badly; rank 0 waits for it in a collective."""
    if rank == 1 and how == "raise":
        raise ValueError("said by rank one")
    if rank == 1 and how == "exit":
        os._exit(7)
    dist.barrier()
