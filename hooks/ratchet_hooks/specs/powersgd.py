"""Spec models of PowerSGD and batched PowerSGD. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ratchet_hooks.checked_dataclass import option
from ratchet_hooks.specs.base import HookSpecBase, Wrapper, wrapper_option


@dataclass(frozen=True, kw_only=True)
class _LowRankSpec(HookSpecBase):
    """The parameters that both PowerSGD hooks have: those of torch's ``PowerSGDState``, with its defaults."""

    wrapper: Wrapper | None = wrapper_option()
    matrix_approximation_rank: int = option(
        1, ge=1, le=4096, description="r, the rank of the approximating matrices; a higher r is more accurate."
    )
    start_powerSGD_iter: int = option(
        1000,
        ge=0,
        description="Iterations of plain all-reduce before compression starts, counted over all attempts of a job. "
        "Must be > 1 with error feedback or warm start.",
    )
    min_compression_rate: float = option(
        2.0,
        gt=0,
        allow_inf_nan=False,
        description="Compress a tensor of n x m only if (n + m) * r * min_compression_rate < n * m, with r = "
        "matrix_approximation_rank.",
    )
    use_error_feedback: bool = option(
        True,
        description="Keep what compression lost and add it to the next gradient. Takes memory of the size of the gradients; "
        "without it training seldom converges as well.",
    )
    warm_start: bool = option(True, description="Start each power iteration from the factor Q of the previous step.")
    orthogonalization_epsilon: float = option(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Added to the norms when orthogonalising; a value > 0 avoids division by zero for zero gradients. "
        "Without effect on float32 and float64 if r > 2: then a QR factorisation orthogonalises.",
    )
    random_seed: int = option(0, ge=0, le=2**32 - 1, description="Seed of the generator that draws the first factor Q.")
    compression_stats_logging_frequency: int = option(
        10_000, ge=1, description="Iterations between torch's own log lines about the compression rate."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_powerSGD_iter <= 1 and (self.use_error_feedback or self.warm_start):
            raise ValueError(
                "start_powerSGD_iter must be > 1 when use_error_feedback or warm_start is on: DDP rebuilds its buckets "
                "after the first iteration, so state made before that would belong to other gradients"
            )


@dataclass(frozen=True, kw_only=True)
class PowerSGDSpec(_LowRankSpec):
    """PowerSGD (Vogels et al., arXiv 1905.13727): low-rank gradient compression with error feedback.

    For mixed precision use torch's native AMP with float32 parameters, not Apex.

    Parameters are those of torch's ``PowerSGDState``, with its defaults.
    """

    name: Literal["powerSGD"] = "powerSGD"
    batch_tensors_with_same_shape: bool = option(
        False,
        description="Compress tensors of equal shape in one batched matmul. The bits of the result differ from those "
        "without batching.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGDSpec(_LowRankSpec):
    """PowerSGD on one square matrix per bucket, made of all its gradients.

    Faster than powerSGD and usually much less exact: try powerSGD first. For mixed precision use torch's native AMP, not Apex.
    """

    unused: ClassVar[frozenset[str]] = frozenset({"min_compression_rate"})
    name: Literal["batched_powerSGD"] = "batched_powerSGD"
    min_compression_rate: float = option(
        2.0,
        gt=0,
        allow_inf_nan=False,
        description="Without effect, as with torch: every bucket is compressed as a whole. The key exists since both "
        "PowerSGD hooks use the same class of state.",
    )
