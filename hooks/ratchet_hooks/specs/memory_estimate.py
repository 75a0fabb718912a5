"""Memory that a hook will hold in addition to model and optimizer, from the parameters' shapes alone. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, CustomSpec, HookSpec, PowerSGDSpec

_FLOAT32, _HALF = 4, 2
Shapes = Sequence[Sequence[int]]


def needs_shapes(spec: HookSpec) -> bool:
    """True if ``hook_memory`` needs the parameters' shapes for this spec. False if the hook's memory is unknown (a custom hook
    with a state), or does not depend on the model."""
    known = not isinstance(spec, CustomSpec) or spec.state is None
    return known and (spec.wrapper is not None or isinstance(spec, (PowerSGDSpec, BatchedPowerSGDSpec)))


def hook_memory(spec: HookSpec, shapes: Shapes) -> int | None:
    """Return the bytes per rank that the hook's state will take once it compresses, for float32 parameters of ``shapes``; None
    for a custom hook with a state, whose size is unknown.

    PowerSGD (arXiv 1905.13727): with error feedback a residual of the size of all gradients, and with warm start P and Q of
    every matrix that is worth compressing. Batched PowerSGD: the same for one square matrix of all gradients; with several
    buckets it takes a little more. Other hooks: 0. With a wrapper the state has 16 bits per element, and under any hook a
    16-bit copy of all gradients is added. Memory that a hook needs only during a step is not counted.
    """
    if isinstance(spec, CustomSpec) and spec.state is not None:
        return None
    elements, state = sum(math.prod(shape) for shape in shapes), 0
    if isinstance(spec, PowerSGDSpec):
        state = elements * spec.use_error_feedback + spec.warm_start * sum(_factors(spec, shape) for shape in shapes)
    elif isinstance(spec, BatchedPowerSGDSpec):
        side = math.isqrt(max(0, elements - 1)) + 1
        rank = min(side, spec.matrix_approximation_rank)
        state = side * side * spec.use_error_feedback + spec.warm_start * 2 * side * rank
    return _FLOAT32 * state if spec.wrapper is None else _HALF * (state + elements)


def _factors(spec: PowerSGDSpec, shape: Sequence[int]) -> int:
    """Return the number of elements of P and Q for a tensor of this shape; 0 if it is sent uncompressed (torch's
    ``_should_compress``)."""
    if not shape or not math.prod(shape):
        return 0
    n, m = shape[0], math.prod(shape[1:])
    rank = min(n, m, spec.matrix_approximation_rank)
    return (n + m) * rank if (n + m) * rank * spec.min_compression_rate < n * m else 0
