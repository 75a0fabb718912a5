"""What a hook will hold beside model and optimizer, from the shapes of the parameters alone. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratchet_hooks.specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PowerSGDSpec

_FLOAT32, _HALF = 4, 2
Shapes = Sequence[Sequence[int]]


def needs_shapes(spec: HookSpec) -> bool:
    """Whether what the hook holds depends on the model."""
    return isinstance(spec, (PowerSGDSpec, BatchedPowerSGDSpec))


def hook_memory(spec: HookSpec, shapes: Shapes) -> int | None:
    """Bytes per rank that the hook's state will hold once it compresses, for float32 parameters of ``shapes``.

    PowerSGD (arXiv 1905.13727): a residual of the size of all gradients, and P and Q of every matrix that is worth compressing.
    Batched PowerSGD likewise for one square matrix of all gradients; with several buckets it is a little more. None for a custom
    hook, which alone knows.
    """
    if isinstance(spec, CustomSpec):
        return None if spec.state is not None else 0
    element = _FLOAT32 if spec.wrapper is None else _HALF
    if isinstance(spec, PowerSGDSpec):
        residual = sum(math.prod(shape) for shape in shapes) if spec.use_error_feedback else 0
        return element * (residual + sum(_factors(spec, shape) for shape in shapes))
    if isinstance(spec, BatchedPowerSGDSpec):
        side = math.isqrt(max(0, sum(math.prod(shape) for shape in shapes) - 1)) + 1
        return element * (side * side * spec.use_error_feedback + 2 * side * min(side, spec.matrix_approximation_rank))
    return 0


def _factors(spec: PowerSGDSpec, shape: Sequence[int]) -> int:
    """Elements of P and Q; 0 for what is sent as it is (torch's ``_should_compress``)."""
    if not shape or not math.prod(shape):
        return 0
    n, m = shape[0], math.prod(shape[1:])
    rank = min(n, m, spec.matrix_approximation_rank)
    return (n + m) * rank if (n + m) * rank * spec.min_compression_rate < n * m else 0
