"""What the API shows of a running hook: plain JSON, made by the worker; nothing is unpickled. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ratchet_hooks.checked_dataclass import Model

HookPhase = Literal["steady", "warm-up", "compressing", "local"]


@dataclass(frozen=True, kw_only=True)
class HookSummary(Model):
    """One rank's view of its hook at one step.

    ``compression_rate`` is ``elements_before / elements_after``, counted since compression started (torch's
    ``compression_stats``). It is 1.0 for a hook that does not compress. For fp16 the numbers of elements are equal, and the
    bytes show the gain. ``bytes_before`` is the bytes of gradient that the hook received in the last iteration, ``bytes_after``
    the bytes that it sent. For a custom hook ``bytes_after`` is None. Its ``compression_rate`` and ``elements_after`` are None,
    too, unless its state reports them.

    ``averager_step`` is the number of steps that an averager of parameters has counted. ``next_averaging`` is the step of the
    job after which it averages next. Both are None except for post_localSGD. ``residual_norm`` is the L2 norm of this rank's
    whole error-feedback residual, None without error feedback. ``memory_bytes`` is the size of the state.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "ser_json_inf_nan": "strings"}

    name: str
    wrapper: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    rank: int
    step: int
    phase: HookPhase
    iteration: int
    compression_rate: float | None
    elements_before: int
    elements_after: int | None
    bytes_before: int
    bytes_after: int | None
    residual_norm: float | None = None
    memory_bytes: int = 0
    buckets: int = 0
    averager_step: int | None = None
    next_averaging: int | None = None
