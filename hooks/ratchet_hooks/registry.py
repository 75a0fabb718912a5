"""Every hook by name: spec model, availability, what it promises. Torch-free; builders are named by import string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ratchet_hooks import specs
from ratchet_hooks.specs import HookSpec, HookSpecBase

Replicas = Literal["equal", "subgroup", "rank"]


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
    warnings: tuple[str, ...] = ()
    backends: tuple[str, ...] = ("gloo", "nccl")

    @property
    def available(self) -> bool:
        return self.builder is not None

    def parameter_schema(self) -> dict[str, Any]:
        """JSON schema of the spec model."""
        return self.spec.model_json_schema()


def replicas_of(spec: HookSpec) -> Replicas:
    """Whether parameters stay equal on all ranks between two steps under this very spec."""
    return spec.replicas if isinstance(spec, specs.CustomSpec) else HOOKS[spec.name].replicas


def is_stateful(spec: HookSpec) -> bool:
    """Whether this very spec's hook keeps a state between two steps."""
    return spec.state is not None if isinstance(spec, specs.CustomSpec) else HOOKS[spec.name].stateful


_HALF = "Gradients above 65504 on any rank become inf in float16."
_RESIDUALS = "Needs memory of the size of the gradients for the residuals (error feedback)."
_HALF_POWERSGD = (
    "Half-precision gradients may overflow in P and Q; use torch's native AMP with float32 parameters, not Apex."
)
_EIGHT_BITS = (
    "Every rank receives all ranks' gradients: with many ranks that is more traffic than an all-reduce.",
    "Float32 gradients only. The steps of a scale are never finer than 1.2e-7: scale the loss up where gradients are that small.",
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
            ("Eight significant bits: each rank's gradients are rounded to three digits before they are added up.",),
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
                "Usually much less exact than powerSGD, since its matrices cut across the parameters.",
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
                "Replicas differ between two averagings; checkpoints hold every rank's parameters and optimizer.",
                "Averaging takes memory for one more copy of the parameters.",
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
            ("For debugging and measuring only: ranks train apart, and the result is wrong.",),
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
                "Exact only if its state is all that it carries from step to step. What it sends is known only if its state "
                "tells.",
            ),
        ),
    )
}
