"""What one rank has to save: its state, and what the manifest says beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet_contract.manifest import HookRecord
from ratchet_hooks.build import STATE_VERSION
from ratchet_hooks.summary import HookSummary
from ratchet_worker.environment_record import Record
from ratchet_worker.fingerprint import number_of_parts
from ratchet_worker.job_state import JobState
from ratchet_worker.snapshot import Snapshot, Tensors


@dataclass
class Content:
    """What one rank has to save; ``layout``, ``hook`` and ``replicas`` are the same on all ranks. ``parts``: in how many the
    shared tensors are compared. ``summary`` lacks the norm of the residuals, which ``norm_of`` makes of the copies of the hook's
    tensors: a pass over them that nobody should wait for."""

    snapshot: Snapshot
    layout: list[list[str]] | None
    hook: HookRecord
    replicas: Any
    summary: HookSummary
    environment: Record
    data_digest: str | None
    total_steps: int | None
    parts: int
    norm_of: Callable[[Tensors], float | None]


def content(
    state: JobState,
    rank: int,
    world_size: int,
    step: int,
    total_steps: int | None,
    environment: Record,
    data_digest: str | None,
) -> Content:
    """The state after ``step``. A collective the first time, as ``JobState.capture``."""
    _, hook = state.hook_or_refuse()
    layout = hook.layout()
    snapshot = state.capture()
    snapshot.state["facts"] = {**environment, "data_digest": data_digest}
    return Content(
        snapshot=snapshot,
        layout=layout,
        hook=HookRecord(name=hook.spec.name, parameters=hook.spec.model_dump(mode="json"), state_version=STATE_VERSION),
        replicas=hook.replicas,
        summary=hook.summary(rank=rank, step=step, norm=False),
        environment=environment,
        data_digest=data_digest,
        total_steps=total_steps,
        parts=number_of_parts(snapshot.sizes(), world_size) if snapshot.shared else 0,
        norm_of=hook.norm_of,
    )
