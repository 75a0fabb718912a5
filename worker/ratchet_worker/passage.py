"""How a recorded state gets into this group, where it does not simply come back: other ranks, another hook, other buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet_contract.resume import ComponentStatus
from ratchet_hooks.carry import carry
from ratchet_hooks.changes import HookChange
from ratchet_hooks.layout import ManagedDDP
from ratchet_hooks.managed import ManagedHook
from ratchet_hooks.registry import is_stateful
from ratchet_hooks.specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.states import redistribute
from ratchet_worker.snapshot import Tensors

HookState = tuple[Tensors, Any]


@dataclass(frozen=True)
class Passage:
    """``recorded``: the hook that made the state; None: it cannot be told any more. ``change``: from it to this group's hook.

    ``reset``: why the hook starts anew whatever was recorded. ``layout``: why DDP stands on other buckets than the recorded ones.
    Where replicas became one, ``averaged`` says by component why what is put back is not what one rank had saved, ``kept`` why it
    is all the same.
    """

    recorded: HookSpec | None = None
    change: HookChange | None = None
    reset: str | None = None
    layout: str | None = None
    averaged: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def relayout(self) -> bool:
        return self.layout is not None


def restore_hook(
    ddp: ManagedDDP, hook: ManagedHook, states: Sequence[HookState], how: Passage, *, resized: bool
) -> tuple[ComponentStatus, str | None]:
    """Put the hook's state back: this rank's own, or with ``resized`` one for all out of those of all old ranks. Returns what the
    report says of it. Raises ``HookStateError`` for what does not fit."""
    change = how.change
    if how.reset is not None:
        return "reset", how.reset
    if change is not None and change.state == "none" and hook.stateful:
        return "absent", f"{change.what}: the recorded hook kept no state; this one begins anew, a warm-up included"
    told = []
    state = states[0]
    if resized:
        state = redistribute(states, how.recorded)
        told.append(_merged(how.recorded or hook.spec))
    if change is not None and how.recorded is not None:
        tensors, data = state
        state = carry(tensors, data, change, how.recorded, hook.spec, ddp.trained())
        told.append(f"{change.what}: {change.reason}")
    hook.restore(*state, relayout=how.relayout)
    if change is not None and change.state == "none":
        return "absent", f"{change.what}: no state was recorded, and none is kept"
    if not hook.stateful:
        return "exact", None
    if how.relayout and isinstance(hook.spec, PowerSGDSpec | BatchedPowerSGDSpec):
        batched = (
            "; what belongs to a bucket as a whole begins anew" if isinstance(hook.spec, BatchedPowerSGDSpec) else ""
        )
        told.append(f"laid into other buckets by parameter name{batched}")
    return ("redistributed", "; ".join(told)) if told else ("exact", None)


def _merged(spec: HookSpec) -> str:
    if isinstance(spec, CustomSpec):
        return f"made of the old ranks' states by {spec.state}.redistribute"
    if isinstance(spec, PostLocalSGDSpec):
        return "the iteration and the averager's step, equal on all old ranks, go on"
    return "the mean of the old residuals, on every rank; all else was equal on all old ranks"


def reset_by_policy(policy: str, recorded: HookSpec | None, why: str) -> str | None:
    """The reason to start the hook anew because of ``why``, where ``policy`` wants that and a state was recorded."""
    if policy != "reset" or (recorded is not None and not is_stateful(recorded)):
        return None
    return f"{why}, and on_hook_mismatch is reset"


def batches(old: Any, new: Any) -> str | None:
    """What becomes of the number of samples in a step, from two states of a ``TrainLoader``; None: that is not known."""
    sizes = []
    for state in (old, new):
        if not isinstance(state, dict) or state.get("kind") != "map":
            return None
        ranks, size = state["world_size"], state["batch_size"]
        whole = size * ranks if state["batch_is"] == "per_rank" else size
        sizes.append((whole, whole // ranks))
    (before, each_before), (after, each) = sizes
    if before == after:
        return (
            f"the global batch stays {after}: {each} instead of {each_before} per rank" if each != each_before else None
        )
    return f"the global batch was {before} and is {after}: {each_before} per rank then, {each} now"
