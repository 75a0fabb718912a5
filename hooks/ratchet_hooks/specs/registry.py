"""Every hook by name: spec class, availability, properties. Torch-free; builders are named by import string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ratchet_hooks.specs import hook_specs
from ratchet_hooks.specs.hook_specs import HookSpec, HookSpecBase

Replicas = Literal["equal", "subgroup", "rank"]


@dataclass(frozen=True)
class Caution:
    """A cost or risk of a hook, as a text. A job gets it as a warning if ``applies(spec, ranks)``."""

    text: str
    applies: Callable[[Any, int], bool] = lambda spec, ranks: True


@dataclass(frozen=True)
class HookEntry:
    """One hook in the registry. ``builder``: ``"module:callable"``, called with the spec and a ``Setup``; None: not available
    yet. ``wrappers``: True if 16-bit wrappers are possible. For a custom hook, ``replicas_of`` and ``is_stateful`` replace
    ``replicas`` and ``stateful``."""

    name: str
    title: str
    spec: type[HookSpecBase]
    builder: str | None
    replicas: Replicas
    stateful: bool
    wrappers: bool
    cautions: tuple[Caution, ...] = ()
    backends: tuple[str, ...] = ("gloo", "nccl")

    @property
    def available(self) -> bool:
        return self.builder is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(caution.text for caution in self.cautions)


def replicas_of(spec: HookSpec) -> Replicas:
    """Return on which ranks parameters are sure to be equal between two steps: all (``equal``), at most those of a subgroup
    (``subgroup``), or none (``rank``)."""
    return spec.replicas if isinstance(spec, hook_specs.CustomSpec) else HOOKS[spec.name].replicas


def is_stateful(spec: HookSpec) -> bool:
    """True if the hook of this spec keeps a state from step to step, which checkpoints must contain."""
    return spec.state is not None if isinstance(spec, hook_specs.CustomSpec) else HOOKS[spec.name].stateful


def _has_several_ranks(spec: Any, ranks: int) -> bool:
    return ranks > 1


def _never_applies(spec: Any, ranks: int) -> bool:
    """Return False, for cautions that a running rank or the pre-flight reports in another way."""
    return False


_HALF = Caution("Gradients above 65504 on any rank become inf in float16.")
_RESIDUALS = Caution(
    "Needs memory of the size of the gradients for the residuals (error feedback).",
    lambda spec, _: spec.use_error_feedback,
)
_HALF_POWERSGD = Caution(
    "Half-precision gradients may overflow in P and Q; use torch's native AMP with float32 parameters, not Apex.",
    _never_applies,
)
_EIGHT_BITS = (
    Caution(
        "Every rank receives all ranks' gradients: with many ranks that is more traffic than an all-reduce.",
        _never_applies,
    ),
    Caution("Float32 gradients only. Gradients below 6e-8 become 0: scale the loss up if gradients are that small."),
)

HOOKS: dict[str, HookEntry] = {
    entry.name: entry
    for entry in (
        HookEntry(
            "allreduce",
            "Plain all-reduce",
            hook_specs.AllreduceSpec,
            "ratchet_hooks.algorithms.plain:Allreduce",
            "equal",
            False,
            True,
        ),
        HookEntry(
            "fp16_compress",
            "Half-precision all-reduce",
            hook_specs.Fp16CompressSpec,
            "ratchet_hooks.algorithms.plain:Fp16Compress",
            "equal",
            False,
            False,
            (_HALF,),
        ),
        HookEntry(
            "bf16_compress",
            "bfloat16 all-reduce",
            hook_specs.Bf16CompressSpec,
            "ratchet_hooks.algorithms.plain:Bf16Compress",
            "equal",
            False,
            False,
            (
                Caution(
                    "Eight significant bits: each rank's gradients are rounded to three digits before they are added up."
                ),
            ),
        ),
        HookEntry(
            "powerSGD",
            "PowerSGD low-rank compression",
            hook_specs.PowerSGDSpec,
            "ratchet_hooks.algorithms.powersgd.powersgd:PowerSGD",
            "equal",
            True,
            True,
            (_RESIDUALS, _HALF_POWERSGD),
        ),
        HookEntry(
            "batched_powerSGD",
            "PowerSGD on one matrix per bucket",
            hook_specs.BatchedPowerSGDSpec,
            "ratchet_hooks.algorithms.powersgd.batched:BatchedPowerSGD",
            "equal",
            True,
            True,
            (
                _RESIDUALS,
                _HALF_POWERSGD,
                Caution("Usually much less exact than powerSGD, since its matrices cut across the parameters."),
            ),
        ),
        HookEntry(
            "post_localSGD",
            "Local SGD after a warm-up",
            hook_specs.PostLocalSGDSpec,
            "ratchet_hooks.algorithms.local_sgd:PostLocalSGD",
            "subgroup",
            True,
            True,
            (
                Caution(
                    "Replicas differ between two averagings; checkpoints hold every rank's parameters and optimizer.",
                    lambda spec, ranks: ranks > 1 and spec.period > 1,
                ),
                Caution("Averaging takes memory for one more copy of the parameters.", _has_several_ranks),
            ),
        ),
        HookEntry(
            "quantization_pertensor",
            "8-bit quantization per tensor",
            hook_specs.QuantizationPertensorSpec,
            "ratchet_hooks.algorithms.quantization:PerTensor",
            "equal",
            False,
            False,
            _EIGHT_BITS,
        ),
        HookEntry(
            "quantization_perchannel",
            "8-bit quantization per channel",
            hook_specs.QuantizationPerchannelSpec,
            "ratchet_hooks.algorithms.quantization:PerChannel",
            "equal",
            False,
            False,
            _EIGHT_BITS,
        ),
        HookEntry(
            "noop",
            "No communication (debugging only)",
            hook_specs.NoopSpec,
            "ratchet_hooks.algorithms.plain:Noop",
            "rank",
            False,
            True,
            (
                Caution(
                    "For debugging and measuring only: ranks train independently, and the result is wrong.",
                    _has_several_ranks,
                ),
            ),
        ),
        HookEntry(
            "custom",
            "A hook of the user's own",
            hook_specs.CustomSpec,
            "ratchet_hooks.algorithms.custom:Custom",
            "equal",
            True,
            True,
            (
                Caution(
                    "Exact only if the state has everything that the hook carries from step to step. The traffic is known "
                    "only if the state reports it."
                ),
            ),
        ),
    )
}
