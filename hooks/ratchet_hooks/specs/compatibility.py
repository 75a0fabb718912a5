"""Determines, before anything is loaded, what happens to a recorded state under another hook, wrapper or parameter.

Torch-free; ``carry`` of ``convert_state`` carries it out.
"""

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
    """``description`` differs between the recorded hook and the requested one.

    ``state``: ``none`` was recorded; ``carried``: it is carried over, apart from the parts in ``restarted`` (``continued`` names
    the others); ``lost``: the new hook cannot use any of it. ``averages``: replicas differed under the old hook and may not under
    the new one, so that they become their mean.
    """

    description: str
    state: Literal["none", "carried", "lost"]
    continued: str = ""
    restarted: str = ""
    averages: bool = False

    def refusal(self, policy: str, key: str = "policy.on_hook_mismatch") -> str | None:
        """Why ``policy.on_hook_mismatch`` forbids the change, and what allows it; None if it is allowed. ``key``: the policy's
        name where it is set."""
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
        """Which parts of a state that is carried over continue, and which start over."""
        return f"{self.continued} continue" + (f"; reset: {self.restarted}" if self.restarted else "")


def recorded_spec(parameters: Mapping[str, Any]) -> HookSpec | None:
    """The spec that a manifest recorded, with today's defaults for keys that it does not have; None if it is no longer valid."""
    try:
        return hook_spec(parameters)
    except ValueError:
        return None


def hook_change(name: str, parameters: Mapping[str, Any], new: HookSpec) -> HookChange | None:
    """The change from the recorded hook ``name`` (``parameters``: its spec, as in a manifest) to ``new``; None if it is the same
    hook."""
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
    """True if replicas must become their mean, since they may differ under ``old`` and ``new`` cannot begin with that: it keeps
    them equal; or it is post_localSGD where ``old`` is not, or with other subgroups (each keeps its parameters equal), or with a
    later start (the warm-up until then does not bring replicas together)."""
    if replicas_of(old) == "equal":
        return False
    if isinstance(new, PostLocalSGDSpec):
        subgroups = ("subgroup_size", "post_local_gradient_allreduce")
        if not isinstance(old, PostLocalSGDSpec) or old.start_localSGD_iter < new.start_localSGD_iter:
            return True
        return any(getattr(old, key) != getattr(new, key) for key in subgroups)
    return replicas_of(new) == "equal"


def _changes_text(before: Mapping[str, Any], after: Mapping[str, Any], changed: set[str]) -> str:
    return ", ".join(f"hook.{key} {before.get(key)} -> {after.get(key)}" for key in sorted(changed))


def _low_rank_change(
    description: str, old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec
) -> HookChange:
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
    """Residuals belong to parameters, regardless of how a hook groups these."""
    return old.use_error_feedback and new.use_error_feedback


def keeps_factors(old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec) -> bool:
    """P and Q belong to matrices: the same ones, of the same rank, under the same hook."""
    same = old.matrix_approximation_rank == new.matrix_approximation_rank
    if isinstance(new, PowerSGDSpec):  # leaves out matrices below the rate; batched_powerSGD compresses every bucket
        same = same and old.min_compression_rate == new.min_compression_rate
    return old.name == new.name and same and old.warm_start and new.warm_start
