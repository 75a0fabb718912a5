"""What a user asks for: one pydantic model per DDP communication hook, under torch's own names.

Torch-free, so that the control plane can validate a hook without importing torch. Defaults and parameter names are those
of ``torch.distributed.algorithms.ddp_comm_hooks`` in torch 2.13.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class HookSpecBase(BaseModel):
    """Common base; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AllreduceSpec(HookSpecBase):
    """Average the gradients of every bucket with one all-reduce; what DDP does without a hook."""

    name: Literal["allreduce"] = "allreduce"
    wrapper: None = Field(None, description="allreduce carries no wrapper; use fp16_compress for half-size gradients.")


class Fp16CompressSpec(HookSpecBase):
    """Cast gradients to float16, divide by the world size, all-reduce, cast back."""

    name: Literal["fp16_compress"] = "fp16_compress"
    wrapper: None = Field(None, description="fp16_compress is itself a compression; it carries no wrapper.")


class PowerSGDSpec(HookSpecBase):
    """PowerSGD (Vogels et al., arXiv 1905.13727): low-rank gradient compression with error feedback.

    Parameters are those of ``PowerSGDState`` in torch 2.13, with its defaults.
    """

    name: Literal["powerSGD"] = "powerSGD"
    wrapper: None = Field(None, description="Wrappers around PowerSGD are not available yet.")
    matrix_approximation_rank: int = Field(
        1, ge=1, le=4096, description="Rank r of the approximation; more is exacter."
    )
    start_powerSGD_iter: int = Field(
        1000,
        ge=0,
        description="Iterations of plain all-reduce before compression; > 1 with error feedback or warm start.",
    )
    min_compression_rate: float = Field(
        2.0,
        gt=0,
        allow_inf_nan=False,
        description="Compress a tensor of n x m only if (n + m) * rank * min_compression_rate < n * m.",
    )
    use_error_feedback: bool = Field(True, description="Keep what compression lost and add it to the next gradient.")
    warm_start: bool = Field(True, description="Start each power iteration from the previous step's Q.")
    orthogonalization_epsilon: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Added to the norms when orthogonalising; > 0 guards zero gradients.",
    )
    random_seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the generator that draws the first Q.")
    compression_stats_logging_frequency: int = Field(
        10_000, ge=1, description="Iterations between torch's own log lines about the compression rate."
    )
    batch_tensors_with_same_shape: bool = Field(
        False, description="Compress tensors of equal shape in one batched matmul; other bits than one by one."
    )

    @model_validator(mode="after")
    def _start_after_rebuild(self) -> PowerSGDSpec:
        if self.start_powerSGD_iter <= 1 and (self.use_error_feedback or self.warm_start):
            raise ValueError(
                "start_powerSGD_iter must be > 1 when use_error_feedback or warm_start is on: DDP rebuilds its buckets "
                "after the first iteration, so state made before that would belong to other gradients"
            )
        return self


HookSpec = Annotated[AllreduceSpec | Fp16CompressSpec | PowerSGDSpec, Field(discriminator="name")]

_ALIASES = {"powersgd_hook": "powerSGD", "powersgd": "powerSGD", "power_sgd": "powerSGD"}


def canonical_hook_name(name: str) -> str:
    """torch's name without ``_hook``: ``powerSGD_hook`` -> ``powerSGD``; an unknown name is returned unchanged."""
    if name.lower() in _ALIASES:
        return _ALIASES[name.lower()]
    return name.removesuffix("_hook")


def normalise_hook(value: Any) -> Any:
    """Accept ``"powerSGD"`` or ``{"name": "powerSGD_hook", ...}``; returns the mapping with the canonical name."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        value = {**value, "name": canonical_hook_name(value["name"])}
    return value
