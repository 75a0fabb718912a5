"""Hook states taken from one group into another: other ranks, another hook. Run inside ranks of ``tests.support.gloo_ranks``.

The first ``n`` ranks of the test's group make a group of ``n``; the others only take part in making it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ratchet_hooks.errors import HookStateError
from ratchet_hooks.manage.convert_state import convert_state
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.compatibility import hook_change
from ratchet_hooks.specs.hook_specs import (
    AllreduceSpec,
    BatchedPowerSGDSpec,
    CustomSpec,
    HookSpec,
    NoopSpec,
    PostLocalSGDSpec,
    PowerSGDSpec,
)
from ratchet_worker.state.hook_transfer import StateTransfer, restore_hook
from tests.support.custom_hooks import import_example

State = tuple[dict[str, torch.Tensor], Any]
START = 2
LOW: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START}
SPECS: dict[str, HookSpec] = {
    "powerSGD": PowerSGDSpec(**LOW),
    "powerSGD, fp16": PowerSGDSpec(wrapper="fp16_compress_wrapper", **LOW),
    "batched_powerSGD": BatchedPowerSGDSpec(**LOW),
    "batched_powerSGD, bf16": BatchedPowerSGDSpec(wrapper="bf16_compress_wrapper", **LOW),
    "post_localSGD": PostLocalSGDSpec(start_localSGD_iter=START, subgroup_size=1, model_averaging_period=3),
    "custom": CustomSpec(hook="my_hooks:top_k_hook", state="my_hooks:TopKState", state_args={"density": 0.1}),
    "noop": NoopSpec(),
    "allreduce": AllreduceSpec(),
}
_groups: dict[int, Any] = {}


def first_ranks_group(ranks: int) -> Any:
    """The group of the first ``ranks`` ranks, made once; every rank calls it."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(range(ranks)))
    return _groups[ranks]


class Small:
    """A few steps of a small net under a hook, on the first ``ranks`` ranks."""

    def __init__(self, rank: int, ranks: int, spec: HookSpec, layout: Any = None, cap: float = 0.002) -> None:
        import_example()
        torch.manual_seed(7)
        self.rank, self.step = rank, 0
        self.module = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))
        self.ddp, self.hook = managed_ddp(
            self.module,
            spec,
            ddp={"bucket_cap_mb": cap},
            recorded_layout=layout,
            process_group=first_ranks_group(ranks),
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * self.step + self.rank))
            self.ddp(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.hook.average_parameters()
            self.step += 1

    def weights(self) -> bytes:
        return b"".join(p.detach().numpy().tobytes() for p in self.module.parameters())


def train_and_capture(rank: int, ranks: int, spec: HookSpec, steps: int) -> State | None:
    """This rank's state after some steps; None outside the group."""
    first_ranks_group(ranks)
    if rank >= ranks:
        return None
    run = Small(rank, ranks, spec)
    run.train(steps)
    return run.hook.capture()


def restore_in_new_group(
    rank: int, ranks: int, spec: HookSpec, state: State
) -> tuple[State, dict[str, Any], bool] | None:
    """What a new group has of ``state`` once it is back, its summary, and whether it trains on without a non-finite weight."""
    first_ranks_group(ranks)
    if rank >= ranks:
        return None
    run = Small(rank, ranks, spec, state[1]["layout"])
    run.hook.restore(*state)
    return _seen(run)


def carry_to_new_hook(
    rank: int, old: HookSpec, new: HookSpec, states: list[State]
) -> tuple[State, State, dict[str, Any], bool]:
    """(the state as carried over, as captured again, summary, sound) of this rank under the new hook."""
    run = Small(rank, len(states), new, states[rank][1]["layout"])
    change = hook_change(old.name, old.values(), new)
    assert change is not None
    tensors, data = states[rank]
    made = convert_state(tensors, data, change, old, new, run.ddp.trained_parameters())
    run.hook.restore(*made)
    return (made, *_seen(run))


def _seen(run: Small) -> tuple[State, dict[str, Any], bool]:
    again = run.hook.capture()
    summary = run.hook.summary(rank=run.rank, step=0).values()
    run.train(3)
    return again, summary, all(bool(torch.isfinite(p).all()) for p in run.module.parameters())


def hook_resume_report(
    rank: int, new: HookSpec, states: list[State], old: HookSpec, kind: str
) -> tuple[str, str | None]:
    """What a resume report says of the hook of one of two ranks; ``kind``: ranks, layout, reset, or hook (whatever differs)."""
    if rank >= 2:
        first_ranks_group(2)
        return "", None
    layout = states[rank][1]["layout"]
    run = Small(rank, 2, new, cap=1.0) if kind == "layout" else Small(rank, 2, new, layout)
    how = StateTransfer(
        recorded=old,
        change=hook_change(old.name, old.values(), new),
        reset="asked for" if kind == "reset" else None,
        layout="other buckets" if kind == "layout" else None,
    )
    resized = kind == "ranks"
    try:
        status, reason = restore_hook(
            run.ddp, run.hook, states if resized else states[rank : rank + 1], how, resized=resized
        )
    except HookStateError as error:
        return "refused", str(error)
    run.train(2)
    return status, reason
