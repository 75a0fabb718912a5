"""Torch's ``PowerSGDState``: where each parameter's part lies in the flat tensors of its bucket, the slots that are not per
bucket, sizes and norms."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from ratchet_hooks.algorithms.base import Parameters, parameter_views
from ratchet_hooks.errors import HookStateError, UnsupportedModel
from ratchet_hooks.specs.powersgd import BatchedPowerSGDSpec, PowerSGDSpec
from ratchet_hooks.torch_compat import should_compress

PowerSGDState = torch_powersgd.PowerSGDState

# These must be equal in the spec and in a restored state, where the hook uses them; the logging frequency may change freely.
HYPERPARAMETERS = (
    "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start",
    "orthogonalization_epsilon", "batch_tensors_with_same_shape",
)  # fmt: skip
_CHUNK = 1 << 16  # elements that fit into a core's cache in float64
PER_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
"""The slots of torch's state with one entry per bucket."""


def make_state(spec: PowerSGDSpec | BatchedPowerSGDSpec, group: dist.ProcessGroup) -> PowerSGDState:
    """Return a new ``PowerSGDState`` of torch, with the parameters of ``spec``."""
    return PowerSGDState(process_group=group, **spec.parameters())


@dataclass(frozen=True)
class LowRankPlace:
    """The position of one compressed parameter's P and Q in the flat P and the flat Q of its bucket. ``p_start``, ``q_start``:
    offsets in elements."""

    name: str
    p_start: int
    p_shape: tuple[int, int]
    q_start: int
    q_shape: tuple[int, int]


def low_rank_places(state: PowerSGDState, shapes: Mapping[str, torch.Size]) -> list[LowRankPlace]:
    """Return the places of a bucket's compressed parameters, in the order of ``powerSGD_hook``. ``shapes``: the shapes of all
    parameters of the bucket, by name."""
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.items():
        n = shape[0]
        m = shape.numel() // n
        rank = min(n, m, state.matrix_approximation_rank)
        if should_compress(n, m, rank, state.min_compression_rate):
            by_shape.setdefault((n, m), []).append(name)
    places, p_start, q_start = [], 0, 0
    for (n, m), names in by_shape.items():
        rank = min(n, m, state.matrix_approximation_rank)
        for name in names:
            places.append(LowRankPlace(name, p_start, (n, rank), q_start, (m, rank)))
            p_start += n * rank
            q_start += m * rank
    return places


def factor_numels(places: Sequence[LowRankPlace]) -> tuple[int, int]:
    """Return the number of elements of a bucket's flat P, and of its flat Q."""
    return sum(a.p_shape[0] * a.p_shape[1] for a in places), sum(a.q_shape[0] * a.q_shape[1] for a in places)


def factor_views(
    places: Sequence[LowRankPlace], p: torch.Tensor, q: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return two lists of views, with one view per place: parts of the bucket's flat ``p``, and parts of its flat ``q``."""
    return [_slice_view(p, a.p_start, a.p_shape) for a in places], [
        _slice_view(q, a.q_start, a.q_shape) for a in places
    ]


def residual_views(
    flat: torch.Tensor, bucket: Sequence[str], parameters: Parameters
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, view)`` of every parameter's part of a bucket's flat residual, in the parameter's shape."""
    yield from zip(bucket, parameter_views(flat, [parameters[name] for name in bucket]), strict=True)


def _slice_view(flat: torch.Tensor, start: int, shape: tuple[int, int]) -> torch.Tensor:
    return flat.narrow(0, start, shape[0] * shape[1]).view(shape)


def read_slots(state: PowerSGDState) -> dict[str, Any]:
    """Return ``state.__getstate__()``, which leaves the process group out."""
    with _suppress_group_warning():
        slots: dict[str, Any] = state.__getstate__()  # type: ignore[no-untyped-call]
    return slots


def write_slots(state: PowerSGDState, slots: Mapping[str, Any]) -> None:
    """Put ``slots``, in the form of ``__getstate__``, into ``state``, whose process group stays attached."""
    group = state.process_group
    with _suppress_group_warning():
        state.__setstate__(slots)  # type: ignore[no-untyped-call]
    state.process_group = group


def check_slots(state: PowerSGDState, slots: object, ignored: Set[str]) -> None:
    """Raise ``HookStateError`` if recorded slots are missing or unknown, or a hyperparameter that is not ``ignored`` differs."""
    expected = set(state.__slots__) - {"process_group", *PER_BUCKET}
    if not isinstance(slots, dict) or set(slots) != expected:
        found = set(slots) if isinstance(slots, dict) else set()
        odd = sorted(str(key) for key in expected ^ found) or ["slots"]
        raise HookStateError(
            f"state.{odd[0]}", "missing or unknown in the recorded state; was it saved with another version of torch?"
        )
    for key in HYPERPARAMETERS:
        if key not in ignored and slots[key] != getattr(state, key):
            raise HookStateError(
                f"state.{key}", f"recorded with {slots[key]!r}, but the requested hook has {getattr(state, key)!r}"
            )


class Taken:
    """Copies recorded tensors to their places, checking shape and dtype. ``finish`` checks that all of them were copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: t for name, t in tensors.items() if not name.startswith("state/")}

    def copy_into(self, name: str, place: torch.Tensor) -> None:
        """Copy the recorded tensor ``name`` into ``place``. Raises ``HookStateError`` if it is missing or does not fit."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise HookStateError(name, "missing from the recorded state")
        if tensor.shape != place.shape or tensor.dtype is not place.dtype:
            raise HookStateError(
                name,
                f"recorded as {tensor.dtype} {list(tensor.shape)}, but the model needs {place.dtype} {list(place.shape)}",
            )
        place.copy_(tensor)

    def finish(self) -> None:
        """Raise ``HookStateError`` if a recorded tensor was not copied."""
        if self._tensors:
            raise HookStateError(min(self._tensors), "recorded, but the model has no parameter for it")


def residual_norm(state: PowerSGDState) -> float | None:
    """Return the L2 norm of all residuals, added up in float64; None without error feedback."""
    if not state.use_error_feedback:
        return None
    return float(sum((_sum_of_squares(e) for e in state.error_dict.values()), 0.0) ** 0.5)


def captured_norm(state: PowerSGDState, tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Return the L2 norm of the residuals among ``tensors``, which ``capture`` returned; None without error feedback."""
    if not state.use_error_feedback:
        return None
    parts = (_sum_of_squares(t.reshape(-1)) for name, t in tensors.items() if name.startswith("residual"))
    return float(sum(parts, 0.0) ** 0.5)


def _sum_of_squares(flat: torch.Tensor) -> float:
    """Return the sum of the squares, added up in float64."""
    if flat.is_cuda:
        return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
    # Nine times as fast as ``vector_norm``, and without a copy of everything.
    parts = (chunk.double() for chunk in torch.split(flat, _CHUNK))
    return sum((float(torch.dot(part, part)) for part in parts), 0.0)


def memory_bytes(state: PowerSGDState) -> int:
    """Return the bytes of all residuals, P and Q in ``state``."""
    return sum(t.nbytes for key in PER_BUCKET for t in getattr(state, key).values())


def check_parameters(parameters: Parameters) -> None:
    """Raise ``UnsupportedModel`` for a parameter without dimensions or elements, on which torch's hook fails."""
    for name, parameter in parameters.items():
        if parameter.dim() == 0 or parameter.numel() == 0:
            cure = "make it one-dimensional" if parameter.dim() == 0 else "set its requires_grad to False"
            raise UnsupportedModel(
                f"{name} has shape {list(parameter.shape)}, which powerSGD cannot view as a matrix; {cure}"
            )


@contextmanager
def _suppress_group_warning() -> Iterator[None]:
    """Context manager: suppress torch's log message that the process group is not saved; here it is attached again."""
    logger = logging.getLogger(torch_powersgd.__name__)

    def drop(record: logging.LogRecord) -> bool:
        return "Process group" not in record.getMessage()

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
