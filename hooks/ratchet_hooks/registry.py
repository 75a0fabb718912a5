"""Every hook by name: spec model, availability, what it promises. Torch-free; builders are named by import string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ratchet_hooks.specs import AllreduceSpec, Fp16CompressSpec, HookSpecBase, PowerSGDSpec

Replicas = Literal["equal", "subgroup", "rank"]


@dataclass(frozen=True)
class HookEntry:
    """One row of the registry.

    ``builder`` is ``"module:callable"``, resolved lazily in a process that has torch; ``None`` means the hook is named but
    not available yet. ``replicas`` says whether parameters stay equal on all ranks between two steps.
    """

    name: str
    title: str
    spec: type[HookSpecBase] | None
    builder: str | None
    replicas: Replicas
    stateful: bool
    backends: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        return self.builder is not None

    def parameter_schema(self) -> dict[str, Any] | None:
        """JSON schema of the spec model, or None while the hook is not available."""
        return None if self.spec is None else self.spec.model_json_schema()


_BOTH = ("gloo", "nccl")
_NOT_YET = ("Not available yet in this version; a spec that names it is refused.",)


def _later(name: str, title: str, replicas: Replicas, stateful: bool) -> HookEntry:
    return HookEntry(name, title, None, None, replicas, stateful, (), _NOT_YET)


HOOKS: dict[str, HookEntry] = {
    entry.name: entry
    for entry in (
        HookEntry(
            "allreduce", "Plain all-reduce", AllreduceSpec, "ratchet_hooks.build:build_allreduce", "equal", False, _BOTH
        ),
        HookEntry(
            "fp16_compress",
            "Half-precision all-reduce",
            Fp16CompressSpec,
            "ratchet_hooks.build:build_fp16",
            "equal",
            False,
            _BOTH,
            ("Gradients above 65504 on any rank become inf in float16.",),
        ),
        HookEntry(
            "powerSGD",
            "PowerSGD low-rank compression",
            PowerSGDSpec,
            "ratchet_hooks.build:build_powersgd",
            "equal",
            True,
            _BOTH,
            (
                "Needs memory of the size of the gradients for the residuals (error feedback).",
                "Half-precision gradients may overflow in torch's implementation; use native AMP with float32 parameters.",
            ),
        ),
        _later("bf16_compress", "bfloat16 all-reduce", "equal", False),
        _later("batched_powerSGD", "PowerSGD on one matrix per bucket", "equal", True),
        _later("post_localSGD", "Local SGD after a warm-up", "subgroup", True),
        _later("quantization_pertensor", "8-bit quantization per tensor", "equal", False),
        _later("quantization_perchannel", "8-bit quantization per channel", "equal", False),
        _later("noop", "No communication (debugging only)", "rank", False),
        _later("custom", "A hook of the user's own", "rank", True),
    )
}
