"""Restores a hook's recorded state, also into a group that has other ranks, another hook or other buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet_contract.checkpoint.resume_report import ComponentStatus
from ratchet_hooks.algorithms.state_version import redistribute
from ratchet_hooks.ddp.bucket_layout import ManagedDDP
from ratchet_hooks.manage.convert_state import convert_state
from ratchet_hooks.manage.managed_hook import ManagedHook
from ratchet_hooks.specs.compatibility import HookChange
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec
from ratchet_hooks.specs.registry import is_stateful
from ratchet_worker.state.snapshot import Tensors

HookState = tuple[Tensors, Any]


@dataclass(frozen=True)
class StateTransfer:
    """How a checkpoint's state is transferred into this group. ``recorded``: the hook that made the checkpoint. ``change``: the
    change to this attempt's hook, if it is another one. ``reset``: why the hook's state is reset, if it is. ``layout``: why DDP
    has other buckets than the recorded ones, if it has. ``averaged``: by component, how different replicas became one.
    ``kept_per_rank``: by component, why each rank keeps its own state."""

    recorded: HookSpec | None = None
    change: HookChange | None = None
    reset: str | None = None
    layout: str | None = None
    averaged: dict[str, str] = field(default_factory=dict)
    kept_per_rank: dict[str, str] = field(default_factory=dict)

    @property
    def relayout(self) -> bool:
        """True if DDP has other buckets than the recorded ones."""
        return self.layout is not None


def restore_hook(
    ddp: ManagedDDP, hook: ManagedHook, states: Sequence[HookState], transfer: StateTransfer, *, resized: bool
) -> tuple[ComponentStatus, str | None]:
    """Restore the hook's state, unless the hook starts again; return status and reason for the report. ``states``: this rank's
    state alone, or the states of all old ranks if ``resized``. Raises ``HookStateError`` if the states do not fit."""
    change = transfer.change
    if transfer.reset is not None:
        return "reset", transfer.reset
    if change is not None and change.state == "none" and hook.stateful:
        return (
            "absent",
            f"{change.description}: the recorded hook kept no state; this one starts afresh, including a warm-up",
        )
    told = []
    state = states[0]
    if resized:
        state = redistribute(states, transfer.recorded)
        told.append(_merge_reason(transfer.recorded or hook.spec))
    if change is not None and transfer.recorded is not None:
        tensors, data = state
        state = convert_state(tensors, data, change, transfer.recorded, hook.spec, ddp.trained_parameters())
        told.append(f"{change.description}: {change.reason}")
    hook.restore(*state, relayout=transfer.relayout)
    if change is not None and change.state == "none":
        return "absent", f"{change.description}: no state was recorded, and none is kept"
    if not hook.stateful:
        return "exact", None
    if transfer.relayout and isinstance(hook.spec, PowerSGDSpec | BatchedPowerSGDSpec):
        batched = "; state of a whole bucket is reset" if isinstance(hook.spec, BatchedPowerSGDSpec) else ""
        told.append(f"moved to other buckets by parameter name{batched}")
    return ("redistributed", "; ".join(told)) if told else ("exact", None)


def _merge_reason(spec: HookSpec) -> str:
    """Return a clause for the report: how the state of all old ranks became one."""
    if isinstance(spec, CustomSpec):
        return f"built from the old ranks' states by {spec.state}.redistribute"
    if isinstance(spec, PostLocalSGDSpec):
        return "the iteration and the averager's step, equal on all old ranks, continue"
    return "the mean of the old residuals, on every rank; all else was equal on all old ranks"


def reset_by_policy(policy: str, recorded: HookSpec | None, why: str) -> str | None:
    """Return the reason to reset the hook because of ``why``; None unless ``policy`` (``on_hook_mismatch``) is ``reset``, or if
    the recorded hook keeps no state."""
    if policy != "reset" or (recorded is not None and not is_stateful(recorded)):
        return None
    return f"{why}, and on_hook_mismatch is reset"


def describe_batch_change(old: Any, new: Any) -> str | None:
    """Return the report's clause on a changed batch size, from two ``TrainLoader`` states; None if no change is known."""
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
