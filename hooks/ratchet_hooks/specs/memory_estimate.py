"""Memory that a hook will hold in addition to model and optimizer, from the parameters' shapes alone. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PowerSGDSpec

_FLOAT32, _HALF = 4, 2
Shapes = Sequence[Sequence[int]]


def needs_shapes(spec: HookSpec) -> bool:
    """True if the result of ``hook_memory`` may depend on the parameters' shapes for this spec."""
    known = not isinstance(spec, CustomSpec) or spec.state is None
    return known and (spec.wrapper is not None or isinstance(spec, (PowerSGDSpec, BatchedPowerSGDSpec)))


def hook_memory(spec: HookSpec, shapes: Shapes) -> int | None:
    """Return an estimate, in bytes per rank, of the memory for the hook's state and for a wrapper's copy of the gradients. It is
    for float32 parameters, after a warm-up. None for a custom hook with a state."""
    if isinstance(spec, CustomSpec) and spec.state is not None:
        return None
    elements, state = sum(math.prod(shape) for shape in shapes), 0
    if isinstance(spec, PowerSGDSpec):
        # arXiv 1905.13727: a residual of the size of all gradients, and P and Q of every matrix that is worth compressing
        state = elements * spec.use_error_feedback + spec.warm_start * sum(_factors(spec, shape) for shape in shapes)
    elif isinstance(spec, BatchedPowerSGDSpec):
        side = math.isqrt(max(0, elements - 1)) + 1
        rank = min(side, spec.matrix_approximation_rank)
        state = side * side * spec.use_error_feedback + spec.warm_start * 2 * side * rank
    # a wrapper adds a 16-bit copy of all gradients
    return _FLOAT32 * state if spec.wrapper is None else _HALF * (state + elements)


def _factors(spec: PowerSGDSpec, shape: Sequence[int]) -> int:
    """Return the number of elements of P and Q for a tensor of this shape; 0 if it is not compressed."""
    if not shape or not math.prod(shape):
        return 0
    n, m = shape[0], math.prod(shape[1:])
    rank = min(n, m, spec.matrix_approximation_rank)
    # torch's ``_should_compress``
    return (n + m) * rank if (n + m) * rank * spec.min_compression_rate < n * m else 0
