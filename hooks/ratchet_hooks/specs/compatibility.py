"""Determines what happens to a recorded hook state under another hook, wrapper or parameter. Torch-free; ``manage.convert_state``
carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ratchet_hooks.specs.hook_specs import (
    BatchedPowerSGDSpec,
    CustomSpec,
    HookSpec,
    PostLocalSGDSpec,
    PowerSGDSpec,
    hook_spec,
)
from ratchet_hooks.specs.registry import is_stateful, replicas_of

WITHOUT_EFFECT = frozenset({"compression_stats_logging_frequency", "random_seed"})
"""Parameters that cannot change a running hook's bits: its generator is restored with its state."""

_LOW_RANK = (PowerSGDSpec, BatchedPowerSGDSpec)


@dataclass(frozen=True)
class HookChange:
    """What happens to a recorded state when the hook has changed. ``state`` is ``none`` if the old hook keeps no state,
    ``carried`` if some of the recorded state continues, and ``lost`` if the new hook cannot use the recorded state.
    ``averages``: True if the ranks' parameters become their mean."""

    description: str
    state: Literal["none", "carried", "lost"]
    continued: str = ""
    restarted: str = ""
    averages: bool = False

    def refusal(self, policy: str, key: str = "policy.on_hook_mismatch") -> str | None:
        """Return why ``policy``, the value of ``on_hook_mismatch``, forbids the change; None if it is allowed. ``key``: the
        policy's name for the message."""
        if policy == "reset" or (self.state == "none" and not self.averages):
            return None
        if self.state == "lost":
            return (
                f"{self.description}: the new hook cannot use the recorded state. Keep the hook as it was, or set {key} to reset "
                "(the hook starts from its initial state)"
            )
        if policy == "redistribute":
            return None
        means = ["the ranks' parameters become their mean"] if self.averages else []
        gives = "; ".join(([self.reason] if self.state == "carried" else []) + means)
        return (
            f"{self.description}: keep the hook as it was, or "
            f"set {key} to redistribute ({gives}) or reset (start without state)"
        )

    @property
    def reason(self) -> str:
        """Text for a change with the state ``carried``: which parts of the hook's state continue, and which are reset."""
        return f"{self.continued} continue" + (f"; reset: {self.restarted}" if self.restarted else "")


def recorded_spec(parameters: Mapping[str, Any]) -> HookSpec | None:
    """Return the spec of a recorded hook, or None if its values, which include the name, are no longer valid."""
    try:
        return hook_spec(parameters)
    except ValueError:
        return None


def hook_change(name: str, parameters: Mapping[str, Any], new: HookSpec) -> HookChange | None:
    """Return the change from the recorded hook ``name`` with ``parameters`` to ``new``. None: the hooks are equal, or differ only
    in parameters that cannot change a running hook's bits."""
    old = recorded_spec({**parameters, "name": name})
    if old is None:
        return HookChange(f"hook {name} was recorded with parameters that no longer exist", "lost")
    before, after = old.values(), new.values()
    idle = {"name", *WITHOUT_EFFECT, *new.unused}
    changed = {key for key in {*before, *after} - idle if before.get(key) != after.get(key)}
    other = old.name != new.name
    if not other and not changed:
        return None
    what = f"hook {old.name} -> {new.name}" if other else _changes_text(before, after, changed)
    if other and old.wrapper != new.wrapper:
        what += f", wrapper {old.wrapper} -> {new.wrapper}"
    return replace(_state_change(what, old, new), averages=_averages_parameters(old, new))


def _state_change(description: str, old: HookSpec, new: HookSpec) -> HookChange:
    """Return the change from ``old`` to ``new`` with what happens to the state; the caller sets ``averages``."""
    if not is_stateful(old):
        return HookChange(description, "none")
    if isinstance(old, _LOW_RANK) and isinstance(new, _LOW_RANK):
        return _low_rank_change(description, old, new)
    if isinstance(old, PostLocalSGDSpec) and isinstance(new, PostLocalSGDSpec):
        return HookChange(description, "carried", "the iteration and the averager's step")
    same_class = isinstance(old, CustomSpec) and isinstance(new, CustomSpec) and old.state == new.state
    if same_class and old.wrapper == new.wrapper:
        return HookChange(description, "carried", "all parts of the state")
    return HookChange(description, "lost")


def _averages_parameters(old: HookSpec, new: HookSpec) -> bool:
    """True if the ranks' parameters, which may differ under ``old``, must become their mean for ``new``."""
    if replicas_of(old) == "equal":
        return False
    if isinstance(new, PostLocalSGDSpec):
        # a subgroup keeps its parameters equal
        subgroups = ("subgroup_size", "post_local_gradient_allreduce")
        # a warm-up, here until a later start, does not bring replicas together
        if not isinstance(old, PostLocalSGDSpec) or old.start_localSGD_iter < new.start_localSGD_iter:
            return True
        return any(getattr(old, key) != getattr(new, key) for key in subgroups)
    return replicas_of(new) == "equal"


def _changes_text(before: Mapping[str, Any], after: Mapping[str, Any], changed: set[str]) -> str:
    """Return the changed parameters with both values, such as ``hook.matrix_approximation_rank 1 -> 2``."""
    return ", ".join(f"hook.{key} {before.get(key)} -> {after.get(key)}" for key in sorted(changed))


def _low_rank_change(
    description: str, old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec
) -> HookChange:
    """Return the change between two PowerSGD hooks, with the state ``carried``: which parts of it continue, and which start
    again."""
    continued, restarted = ["the iteration and the generator"], []
    if keeps_residuals(old, new):
        cast = "" if old.wrapper == new.wrapper else ", in the other dtype"
        continued.insert(0, f"the residuals of all parameters{cast}")
    elif new.use_error_feedback:
        restarted.append("the residuals, of which none were kept")
    elif old.use_error_feedback:
        restarted.append("the residuals, whose values are lost because error feedback is off now")
    if keeps_factors(old, new):
        continued.append("P and Q")
    elif new.warm_start:
        restarted.append("P and Q")
    start = new.start_powerSGD_iter
    if start > old.start_powerSGD_iter:
        restarted.append(f"the warm-up, if iteration {start} is not reached yet")
    return HookChange(description, "carried", ", ".join(continued), ", ".join(restarted))


def keeps_residuals(old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec) -> bool:
    """True if the residuals are carried over, which requires error feedback in both specs."""
    return old.use_error_feedback and new.use_error_feedback


def keeps_factors(old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec) -> bool:
    """True if P and Q are carried over: same hook, same matrices and rank, and warm start in both specs."""
    same = old.matrix_approximation_rank == new.matrix_approximation_rank
    if isinstance(new, PowerSGDSpec):  # leaves out matrices below the rate; batched_powerSGD compresses every bucket
        same = same and old.min_compression_rate == new.min_compression_rate
    return old.name == new.name and same and old.warm_start and new.warm_start
