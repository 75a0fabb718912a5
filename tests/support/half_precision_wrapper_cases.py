"""Hooks under a 16-bit wrapper, as functions for the ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec
from tests.support.hook_averages import Gradients, gradients_after_steps, random_vector
from tests.support.hook_cases import SPECS, Case, Run, bitwise_equal

Seen = list[tuple[str, str, int]]


PLAIN: dict[str, HookSpec] = {
    **{name: SPECS[name] for name in ("allreduce", "powerSGD", "noop")},
    "batched_powerSGD": BatchedPowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3),
    "post_localSGD": PostLocalSGDSpec(start_localSGD_iter=2, model_averaging_period=2, subgroup_size=1),
    "custom": CustomSpec(hook=f"{__name__}:thorough"),
}


def wrapped_spec(hook: str, wrapper: str) -> HookSpec:
    """A spec whose every phase is reached within a few steps."""
    return replace(PLAIN[hook], wrapper=f"{wrapper}_compress_wrapper")


def summary_and_dtypes(rank: int, case: Case, steps: int) -> tuple[dict[str, Any], set[torch.dtype]]:
    """(the summary, dtypes of the captured tensors but those of generators)."""
    run = Run(rank, case)
    run.train(steps)
    tensors = {name: t for name, t in run.hook.capture()[0].items() if not name.startswith("state/")}
    return run.hook.summary(rank=rank, step=steps).values(), {t.dtype for t in tensors.values()}


def collect_overflows(rank: int, spec: HookSpec, value: float, steps: int) -> tuple[Seen, list[bool]]:
    """Gradients of up to ``value`` on all ranks in the last step: what is reported, and which averages are finite."""
    shape = (40, 30)
    given: list[Gradients] = [
        {"wide": random_vector(rank, s, 1200).view(shape), "thin": random_vector(rank, s, 7)} for s in range(steps)
    ]
    some = torch.rand(shape, generator=torch.Generator().manual_seed(rank))
    some[0, 0] = 0.0
    given[-1]["wide"] = value * (1 - 0.2 * some)  # much alike, so that sums are large, but of full rank
    out, hook = gradients_after_steps(spec, given)
    return [(w.code, w.parameter, w.iteration) for w in hook.warnings()], [
        all(bool(g.isfinite().all()) for g in got.values()) for got in out
    ]


def thorough(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A user's hook whose result depends on all that a bucket offers."""
    flat = bucket.buffer()
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.dtype is flat.dtype and gradient.shape == parameter.shape
        gradient.mul_(1 + parameter.dim())  # through a view of the buffer
    bucket.set_buffer(flat + 0.01 * bucket.index() + 0.1 * bucket.is_last())
    bucket.gradients()[-1].div_(2)  # a view of what was set
    dist.all_reduce(bucket.buffer(), group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def adds_parameters(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Element by element: right only if gradients lie as their parameters do."""
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        gradient.add_(parameter.detach())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Times(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3))
        self.kernel = nn.Parameter(torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.kernel * x).sum() + self.first.sum()


def sees_channels_last_gradients(rank: int) -> bool:
    """Does a hook of one's own see each gradient in the order of its parameter's memory?"""
    module, x = _Times(), torch.randn(4, 3, 2, 5)
    ddp, _ = managed_ddp(module, CustomSpec(hook=f"{__name__}:adds_parameters", wrapper="bf16_compress_wrapper"))
    ddp(x).backward()
    wanted = x.bfloat16().add_(module.kernel.detach()).float()
    return module.kernel.grad is not None and torch.equal(module.kernel.grad, wanted)


def average_float16_model(rank: int, spec: HookSpec) -> tuple[bool, int]:
    """A model in float16 already: (whether its gradients are averaged as they are, bytes sent)."""
    size = dist.get_world_size()
    given = [torch.arange(16, dtype=torch.float16) * size * (r + 1) for r in range(size)]
    (got,), hook = gradients_after_steps(spec, [{"weight": given[rank]}])
    right = bitwise_equal(got["weight"], torch.stack(given).sum(0) / size)
    return right, hook.summary(rank=rank, step=1).bytes_after


class Optional(nn.Module):
    """Its second layer is left out where ``both`` is false."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        made: torch.Tensor = self.first(x)
        return made + self.second(x) if both else made


def dtypes_of_remote_gradients(rank: int, spec: HookSpec) -> set[torch.dtype | None]:
    """Dtypes of gradients where a parameter has one from another rank alone."""
    net = Optional()
    ddp, _ = managed_ddp(net, spec, ddp={"find_unused_parameters": True}, device=torch.device("cpu"))
    ddp(torch.ones(2, 4), rank == 0).sum().backward()
    return {None if p.grad is None else p.grad.dtype for p in net.parameters()}
