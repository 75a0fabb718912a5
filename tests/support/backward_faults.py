"""Backward passes that a hook does not survive, or must not: to be run inside ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ratchet_hooks.errors import HookStateError, LayoutMismatch
from ratchet_hooks.manage.managed_ddp import managed_ddp
from tests.support.hook_cases import MANY_BUCKETS, Case, Run, bitwise_equal


class OtherBucket:
    """A bucket as another layout would hand it to the hook: in the place of bucket 0, with the parameters of bucket 1."""

    def __init__(self, run: Run) -> None:
        names = (run.hook.layout() or [])[1]
        self._parameters = [run.module.get_parameter(name) for name in names]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return torch.zeros(sum(p.numel() for p in self._parameters))


def run_hook_on_foreign_bucket(rank: int) -> tuple[str, bool]:
    """A bucket of another layout reaches the hook: (the error, whether the hook's state was left alone)."""
    run = Run(rank, Case(hook="powerSGD", cap=MANY_BUCKETS))
    run.train(5)
    before = run.hook.capture()[0]
    try:
        run.hook._on_bucket(OtherBucket(run))
    except LayoutMismatch as exc:
        return str(exc), all(bitwise_equal(t, before[name]) for name, t in run.hook.capture()[0].items())
    return "", False


def capture_during_backward(rank: int) -> str:
    run = Run(rank, Case(cap=MANY_BUCKETS))
    run.train(2)
    said: list[str] = []

    def probe(_: torch.Tensor) -> None:
        try:
            run.hook.capture()
        except RuntimeError as exc:
            said.append(str(exc))

    run.module.get_parameter("first.weight").register_hook(probe)  # reduced last: other buckets are under way
    run.one_step()
    return said[0] if said else ""


def capture_after_failed_backward(rank: int, ddp: dict[str, Any], train: int, where: str) -> dict[str, str]:
    """What capturing, and another step, are answered with behind a backward whose exception the script caught; ``train``: steps
    before, ``where``: the parameter whose gradient raised it."""
    run = Run(rank, Case(hook="powerSGD", cap=MANY_BUCKETS, ddp=ddp))
    run.train(train)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("of the script")

    handle = run.module.get_parameter(where).register_hook(fail)
    said = {}
    for what, act in {"backward": run.one_step, "capture": run.hook.capture, "step": run.one_step}.items():
        try:
            act()
            said[what] = "accepted"
        except (ValueError, RuntimeError) as exc:
            said[what] = str(exc)
        handle.remove()
    return said


def gradients_with_recomputed_forward(rank: int) -> list[float]:
    """What is left of the first parameter's gradient in three steps of a static graph whose forward is computed again in its
    backward, as checkpointed activations are, when the mean of both ranks' is taken away."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    ddp, _ = managed_ddp(module, Case().hook_spec, ddp={"static_graph": True}, device=torch.device("cpu"))
    left = []
    for _ in range(3):
        ddp.zero_grad()
        checkpoint(ddp, torch.full((1, 3), float(rank)), use_reentrant=False).sum().backward()
        assert module.weight.grad is not None
        left.append(float((module.weight.grad - 0.5).abs().max()))
    return left


def capture_incomplete_state(rank: int) -> str:
    """A state in which one bucket lacks what the others have."""
    run = Run(rank, Case(hook="powerSGD", cap=MANY_BUCKETS))
    run.train(4)
    del run.hook._algorithm.state.error_dict[1]  # type: ignore[attr-defined]
    try:
        run.hook.capture()
    except HookStateError as exc:
        return exc.key
    return "accepted"


def train_compiled_static_graph(rank: int, steps: int) -> None:
    """Trains a compiled DDP. Raises where its code is compiled anew again and again, until the compiler gives up."""
    from torch._dynamo import config

    run = Run(rank, Case(ddp={"static_graph": True}))
    run.ddp = torch.compile(run.ddp, backend="eager")  # type: ignore[assignment]
    with config.patch(fail_on_recompile_limit_hit=True):
        run.train(steps)
