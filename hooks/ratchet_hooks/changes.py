"""What becomes of a recorded state when another hook, wrapper or parameter is asked for, said before anything is loaded.

Torch-free; ``carry`` does what is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ratchet_hooks.registry import is_stateful, replicas_of
from ratchet_hooks.specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PostLocalSGDSpec, PowerSGDSpec, hook_spec

WITHOUT_EFFECT = frozenset({"compression_stats_logging_frequency", "random_seed"})
"""Parameters that cannot change a running hook's bits: its generator comes back with its state."""

_LOW_RANK = (PowerSGDSpec, BatchedPowerSGDSpec)


@dataclass(frozen=True)
class HookChange:
    """``what`` differs between the recorded hook and the one asked for.

    ``state``: ``none`` was recorded, it is ``carried`` over as far as ``kept`` and ``anew`` say, or it would be ``lost``, since
    nothing of it means anything to the new hook. ``averages``: replicas differed under the old hook and may not under the new
    one, so that they become their mean.
    """

    what: str
    state: Literal["none", "carried", "lost"]
    kept: str = ""
    anew: str = ""
    averages: bool = False

    def refusal(self, policy: str, key: str = "policy.on_hook_mismatch") -> str | None:
        """Why ``policy.on_hook_mismatch`` forbids it, and what allows it; None: it may be. ``key``: its name where it is set."""
        if policy == "reset" or (self.state == "none" and not self.averages):
            return None
        if self.state == "lost":
            return (
                f"{self.what}: the recorded state means nothing to the new hook. Keep the hook as it was, or set {key} to reset "
                "(the hook starts anew)"
            )
        if policy == "redistribute":
            return None
        means = ["the ranks' parameters become their mean"] if self.averages else []
        gives = "; ".join(([self.reason] if self.state == "carried" else []) + means)
        return f"{self.what}: keep the hook as it was, or set {key} to redistribute ({gives}) or reset (the hook starts anew)"

    @property
    def reason(self) -> str:
        """What becomes of the state where it is carried over."""
        return f"{self.kept} go on" + (f"; anew: {self.anew}" if self.anew else "")


def hook_of(parameters: Mapping[str, Any]) -> HookSpec | None:
    """The spec that a manifest recorded, with today's defaults for what it does not name; None: no longer one."""
    try:
        return hook_spec(parameters)
    except ValueError:
        return None


def change_of(name: str, parameters: Mapping[str, Any], new: HookSpec) -> HookChange | None:
    """From the recorded hook ``name`` (``parameters``: its spec, as a manifest has it) to ``new``; None: it is the same hook."""
    old = hook_of({**parameters, "name": name})
    if old is None:
        return HookChange(f"hook {name} was recorded with parameters that are none any more", "lost")
    before, after = old.values(), new.values()
    idle = {"name", *WITHOUT_EFFECT, *new.unused}
    changed = {key for key in {*before, *after} - idle if before.get(key) != after.get(key)}
    other = old.name != new.name
    if not other and not changed:
        return None
    what = f"hook {old.name} -> {new.name}" if other else _listed(before, after, changed)
    if other and old.wrapper != new.wrapper:
        what += f", wrapper {old.wrapper} -> {new.wrapper}"
    return replace(_of_state(what, old, new), averages=_averages(old, new))


def _of_state(what: str, old: HookSpec, new: HookSpec) -> HookChange:
    if not is_stateful(old):
        return HookChange(what, "none")
    if isinstance(old, _LOW_RANK) and isinstance(new, _LOW_RANK):
        return _low_rank(what, old, new)
    if isinstance(old, PostLocalSGDSpec) and isinstance(new, PostLocalSGDSpec):
        return HookChange(what, "carried", "the iteration and the averager's step")
    same_class = isinstance(old, CustomSpec) and isinstance(new, CustomSpec) and old.state == new.state
    if same_class and old.wrapper == new.wrapper:
        return HookChange(what, "carried", "all parts of the state")
    return HookChange(what, "lost")


def _averages(old: HookSpec, new: HookSpec) -> bool:
    """Under post_localSGD the ranks of a subgroup have equal parameters, so other subgroups need equal replicas to begin with. So
    does a later start: it may lie ahead, and nothing brings replicas together in a warm-up."""
    if replicas_of(old) == "equal":
        return False
    if isinstance(new, PostLocalSGDSpec):
        subgroups = ("subgroup_size", "post_local_gradient_allreduce")
        if not isinstance(old, PostLocalSGDSpec) or old.start_localSGD_iter < new.start_localSGD_iter:
            return True
        return any(getattr(old, key) != getattr(new, key) for key in subgroups)
    return replicas_of(new) == "equal"


def _listed(before: Mapping[str, Any], after: Mapping[str, Any], changed: set[str]) -> str:
    return ", ".join(f"hook.{key} {before.get(key)} -> {after.get(key)}" for key in sorted(changed))


def _low_rank(
    what: str, old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec
) -> HookChange:
    kept, anew = ["the iteration and the generator"], []
    if keeps_residuals(old, new):
        cast = "" if old.wrapper == new.wrapper else ", in the other dtype"
        kept.insert(0, f"the residuals of all parameters{cast}")
    elif new.use_error_feedback:
        anew.append("the residuals, of which none were kept")
    elif old.use_error_feedback:
        anew.append("all that the residuals hold is lost, since there is no error feedback any more")
    if keeps_factors(old, new):
        kept.append("P and Q")
    elif new.warm_start:
        anew.append("P and Q")
    start = new.start_powerSGD_iter
    if start > old.start_powerSGD_iter:
        anew.append(f"the warm-up, if iteration {start} is not reached yet")
    return HookChange(what, "carried", ", ".join(kept), ", ".join(anew))


def keeps_residuals(old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec) -> bool:
    """They belong to parameters, whatever is made of these."""
    return old.use_error_feedback and new.use_error_feedback


def keeps_factors(old: PowerSGDSpec | BatchedPowerSGDSpec, new: PowerSGDSpec | BatchedPowerSGDSpec) -> bool:
    """P and Q belong to matrices: the same ones, of the same rank, under the same hook."""
    same = old.matrix_approximation_rank == new.matrix_approximation_rank
    if isinstance(new, PowerSGDSpec):  # which leaves out what is not worth it; batched_powerSGD compresses every bucket
        same = same and old.min_compression_rate == new.min_compression_rate
    return old.name == new.name and same and old.warm_start and new.warm_start
