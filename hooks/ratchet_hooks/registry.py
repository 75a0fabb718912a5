"""Every hook by name: spec's class, availability, what it promises. Torch-free; builders are named by import string."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ratchet_hooks import specs
from ratchet_hooks.specs import HookSpec, HookSpecBase

Replicas = Literal["equal", "subgroup", "rank"]


@dataclass(frozen=True)
class Caution:
    """What a hook costs or risks. The hook's page has every one; a job is warned of those that ``applies`` to its hook's spec and
    its number of ranks."""

    text: str
    applies: Callable[[Any, int], bool] = lambda spec, ranks: True


@dataclass(frozen=True)
class HookEntry:
    """One row of the registry.

    ``builder`` is ``"module:callable"``, called with the spec and a ``ratchet_hooks.algorithm.Setup`` where there is torch; None
    means the hook is named but not available yet. ``replicas`` says whether parameters stay equal on all ranks between
    two steps; a custom hook's spec says it itself (``replicas_of``). ``wrappers``: it can run under a 16-bit wrapper.
    """

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
    """Whether parameters stay equal on all ranks between two steps under this very spec."""
    return spec.replicas if isinstance(spec, specs.CustomSpec) else HOOKS[spec.name].replicas


def is_stateful(spec: HookSpec) -> bool:
    """Whether this very spec's hook keeps a state between two steps."""
    return spec.state is not None if isinstance(spec, specs.CustomSpec) else HOOKS[spec.name].stateful


def _on_several(spec: Any, ranks: int) -> bool:
    return ranks > 1


def _not_for_a_spec(spec: Any, ranks: int) -> bool:
    """Only the ranks see whether it applies, and report what happens (``ratchet_hooks.watch``); or a rule of the pre-flight says
    it with the job's own numbers."""
    return False


_HALF = Caution("Gradients above 65504 on any rank become inf in float16.")
_RESIDUALS = Caution(
    "Needs memory of the size of the gradients for the residuals (error feedback).",
    lambda spec, _: spec.use_error_feedback,
)
_HALF_POWERSGD = Caution(
    "Half-precision gradients may overflow in P and Q; use torch's native AMP with float32 parameters, not Apex.",
    _not_for_a_spec,
)
_EIGHT_BITS = (
    Caution(
        "Every rank receives all ranks' gradients: with many ranks that is more traffic than an all-reduce.",
        _not_for_a_spec,
    ),
    Caution(
        "Float32 gradients only. The steps of a scale are never finer than 1.2e-7: scale the loss up where gradients are that "
        "small."
    ),
)

HOOKS: dict[str, HookEntry] = {
    entry.name: entry
    for entry in (
        HookEntry(
            "allreduce",
            "Plain all-reduce",
            specs.AllreduceSpec,
            "ratchet_hooks.algorithms:Allreduce",
            "equal",
            False,
            True,
        ),
        HookEntry(
            "fp16_compress",
            "Half-precision all-reduce",
            specs.Fp16CompressSpec,
            "ratchet_hooks.algorithms:Fp16Compress",
            "equal",
            False,
            False,
            (_HALF,),
        ),
        HookEntry(
            "bf16_compress",
            "bfloat16 all-reduce",
            specs.Bf16CompressSpec,
            "ratchet_hooks.algorithms:Bf16Compress",
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
            specs.PowerSGDSpec,
            "ratchet_hooks.low_rank:PowerSGD",
            "equal",
            True,
            True,
            (_RESIDUALS, _HALF_POWERSGD),
        ),
        HookEntry(
            "batched_powerSGD",
            "PowerSGD on one matrix per bucket",
            specs.BatchedPowerSGDSpec,
            "ratchet_hooks.batched_low_rank:BatchedPowerSGD",
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
            specs.PostLocalSGDSpec,
            "ratchet_hooks.local_sgd:PostLocalSGD",
            "subgroup",
            True,
            True,
            (
                Caution(
                    "Replicas differ between two averagings; checkpoints hold every rank's parameters and optimizer.",
                    lambda spec, ranks: ranks > 1 and spec.period > 1,
                ),
                Caution("Averaging takes memory for one more copy of the parameters.", _on_several),
            ),
        ),
        HookEntry(
            "quantization_pertensor",
            "8-bit quantization per tensor",
            specs.QuantizationPertensorSpec,
            "ratchet_hooks.quantization:PerTensor",
            "equal",
            False,
            False,
            _EIGHT_BITS,
        ),
        HookEntry(
            "quantization_perchannel",
            "8-bit quantization per channel",
            specs.QuantizationPerchannelSpec,
            "ratchet_hooks.quantization:PerChannel",
            "equal",
            False,
            False,
            _EIGHT_BITS,
        ),
        HookEntry(
            "noop",
            "No communication (debugging only)",
            specs.NoopSpec,
            "ratchet_hooks.algorithms:Noop",
            "rank",
            False,
            True,
            (Caution("For debugging and measuring only: ranks train apart, and the result is wrong.", _on_several),),
        ),
        HookEntry(
            "custom",
            "A hook of the user's own",
            specs.CustomSpec,
            "ratchet_hooks.custom:Custom",
            "equal",
            True,
            True,
            (
                Caution(
                    "Exact only if its state is all that it carries from step to step. What it sends is known only if its state "
                    "tells."
                ),
            ),
        ),
    )
}
