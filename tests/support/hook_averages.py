"""What the hooks make of given gradients, as functions for the ranks of ``tests.support.gloo_ranks``.

The module under DDP is one vector per parameter, and its loss a dot product: the gradients are the numbers of the case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as stock

from ratchet_hooks.manage.managed_ddp import ManagedHook, UnsupportedModel, managed_ddp
from ratchet_hooks.specs.hook_specs import HookSpec, QuantizationPerchannelSpec
from tests.support.hook_cases import ONE_BUCKET, bitwise_equal

CPU = torch.device("cpu")
Gradients = dict[str, torch.Tensor]


class Vectors(nn.Module):
    """Parameters of zeros like the tensors given."""

    def __init__(self, like: Gradients) -> None:
        super().__init__()
        for name, tensor in like.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))

    def forward(self, gradients: Gradients) -> torch.Tensor:
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            total = total + (parameter * gradients[name]).sum().float()
        return total


def gradients_after_steps(
    spec: HookSpec, steps: list[Gradients], group: dist.ProcessGroup | None = None
) -> tuple[list[Gradients], ManagedHook]:
    """What DDP leaves in the gradients of this rank after each step."""
    ddp, hook = managed_ddp(Vectors(steps[0]), spec, ddp={"bucket_cap_mb": ONE_BUCKET}, device=CPU, process_group=group)
    out = []
    for gradients in steps:
        ddp(gradients).backward()
        out.append({name: p.grad.clone() for name, p in ddp.module.named_parameters()})
        ddp.zero_grad()
    return out, hook


def random_vector(rank: int, seed: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * seed + rank))


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rank, n: random_vector(rank, 1, n),
    "zero": lambda rank, n: torch.zeros(n),
    "zero on one": lambda rank, n: random_vector(rank, 2, n) * (rank != 1),
    "constant": lambda rank, n: torch.full((n,), 0.3 + rank),
    "negative constant": lambda rank, n: torch.full((n,), -2.7),
    "far from zero": lambda rank, n: random_vector(rank, 3, n) * 1e-3 + 5.0,
    "huge": lambda rank, n: random_vector(rank, 4, n).clamp(-1, 1) * 1e38,
    "below a step": lambda rank, n: random_vector(rank, 5, n) * 1e-9,
    "denormal": lambda rank, n: random_vector(rank, 6, n) * 1e-40,
    "all sizes": lambda rank, n: random_vector(rank, 7, n) * torch.logspace(-8, 8, n),
}


def quantize_one_step(rank: int, spec: HookSpec, kind: str, n: int) -> dict[str, Any]:
    """One step on ``n`` numbers: whether the average has the bits of torch's arithmetic, and by how much of a step it is off."""
    given = [KINDS[kind](r, n) for r in range(dist.get_world_size())]
    (got,), hook = gradients_after_steps(spec, [{"weight": given[rank]}])
    average, exact = got["weight"], torch.stack(given).double().mean(0)
    steps = [_steps(spec, g) for g in given]
    allowed = torch.stack(steps).mean(0) / 2
    return {
        "torch's bits": bitwise_equal(average, _torch_average(spec, given)),
        "off": float(((average.double() - exact).abs() / allowed).max()),
        "sent": hook.summary(rank=rank, step=1).bytes_after,
        "bits": average.numpy().tobytes(),
        "warnings": hook.warnings(),
    }


def quantize_on_one_rank(rank: int, spec: HookSpec, n: int) -> tuple[bool, float]:
    """The same in a group of one rank."""
    mine = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    given = KINDS["normal"](rank, n)
    (got,), _ = gradients_after_steps(spec, [{"weight": given}], mine)
    off = (got["weight"] - given).abs().double() / (_steps(spec, given) / 2)
    return bitwise_equal(got["weight"], _torch_average(spec, [given])), float(off.max())


def _steps(spec: HookSpec, flat: torch.Tensor) -> torch.Tensor:
    """For every element the step of its channel: the range of the channel, with 0, by 255; at least epsilon."""
    size = spec.bucket_size if isinstance(spec, QuantizationPerchannelSpec) else flat.numel()
    out = []
    for channel in flat.double().split(size):
        ends = torch.cat([channel, torch.zeros(1)])
        step = max(float(ends.max() - ends.min()) / 255, torch.finfo(torch.float32).eps)
        out.append(torch.full((channel.numel(),), step, dtype=torch.float64))
    return torch.cat(out)


def _torch_average(spec: HookSpec, given: list[torch.Tensor]) -> torch.Tensor:
    """What torch's own hook makes of the gradients of all ranks. Its two all-gathers are answered here: it reads them in a form
    that gloo does not give."""
    name = "perchannel" if isinstance(spec, QuantizationPerchannelSpec) else "pertensor"
    hook = getattr(stock, f"quantization_{name}_hook")
    if isinstance(spec, QuantizationPerchannelSpec):
        hook = partial(hook, bucket_size=spec.bucket_size)
    sent: list[list[torch.Tensor]] = [[] for _ in given]
    for rank in range(len(given)):
        _run_stock(hook, given, rank, lambda part, mine=sent[rank]: _keep(part, mine, len(given)))
    calls = iter(range(2))
    return _run_stock(hook, given, 0, lambda _: [parts[call] for call in [next(calls)] for parts in sent])


def _keep(part: torch.Tensor, sent: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    sent.append(part.clone())
    return [part] * size  # a rank quantizes with what it sent itself


def _run_stock(hook: Any, given: list[torch.Tensor], rank: int, gather: Any) -> torch.Tensor:
    def all_gather(out: list[torch.Tensor], part: torch.Tensor, group: Any, async_op: bool) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        for place, tensor in zip(out, gather(part), strict=True):
            place.copy_(tensor)
        future.set_result([torch.stack(out)])  # as NCCL has it
        return SimpleNamespace(get_future=lambda: future)

    group = SimpleNamespace(rank=lambda: rank, size=lambda: len(given))
    bucket = SimpleNamespace(buffer=lambda: given[rank].clone())
    with patch.object(stock, "dist", SimpleNamespace(all_gather=all_gather)):
        result: torch.Tensor = hook(group, bucket).wait()
    return result


def average_spoiled_gradients(
    rank: int, spec: HookSpec, what: list[float]
) -> tuple[list[dict[str, list[bool]]], list[tuple[str, str, int]]]:
    """Three steps over two parameters of 64 elements; in the second, rank 1's gradient of ``b`` begins with ``what``. Which
    elements of the averages are finite, and what is reported."""
    steps = []
    for step in range(3):
        gradients = {name: random_vector(rank, step, 64) for name in ("a", "b")}
        if step == 1 and rank == 1:
            gradients["b"][: len(what)] = torch.tensor(what)
        steps.append(gradients)
    out, hook = gradients_after_steps(spec, steps)
    finite = [{name: g.isfinite().tolist() for name, g in got.items()} for got in out]
    return finite, [(w.code, w.parameter, w.iteration) for w in hook.warnings()]


def check_bfloat16_sums(rank: int, spec: HookSpec) -> tuple[bool, bool]:
    """(whether sums that bfloat16 can hold are exact, whether all others are within what the roundings may lose)."""
    size = dist.get_world_size()
    exact = [torch.arange(-20, 20).float() * size * (r + 1) for r in range(size)]
    some = [random_vector(r, 8, 1000) * 1e30 for r in range(size)]
    (got,), _ = gradients_after_steps(spec, [{"a": exact[rank], "b": some[rank]}])
    lost = torch.stack(some).double().abs().sum(0) * 2.0**-8
    off = (got["b"].double() - torch.stack(some).double().mean(0)).abs()
    return torch.equal(got["a"], torch.stack(exact).sum(0) / size), bool((off <= lost).all())


def refusal_message(rank: int, spec: HookSpec) -> str:
    gradients = {"first": torch.ones(3), "second": torch.ones(3, dtype=torch.float64)}
    try:
        gradients_after_steps(spec, [gradients])
    except UnsupportedModel as exc:
        return str(exc)
    return "accepted"


def check_gradient_unchanged(rank: int, spec: HookSpec) -> tuple[bool, str]:
    """(whether this rank's gradient comes back as it is, whose replicas are equal)."""
    given = {"weight": random_vector(rank, 9, 50)}
    (got,), hook = gradients_after_steps(spec, [given])
    return bitwise_equal(got["weight"], given["weight"]), hook.replicas
