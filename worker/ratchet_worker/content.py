"""What one rank has to save: its state, and what the manifest says beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet_contract.manifest import HookRecord
from ratchet_hooks.build import STATE_VERSION
from ratchet_hooks.specs import HookSpec
from ratchet_hooks.summary import HookSummary
from ratchet_worker.divergence import Start
from ratchet_worker.environment_record import Record
from ratchet_worker.fingerprint import number_of_parts
from ratchet_worker.job_state import JobState
from ratchet_worker.snapshot import Sizes, Snapshot, Tensors


@dataclass
class Content:
    """What one rank has to save; ``layout``, ``hook`` and ``replicas`` are the same on all ranks. ``parts``: in how many the
    shared tensors are compared. ``summary`` lacks the norm of the residuals, which ``norm_of`` makes of the copies of the hook's
    tensors: a pass over them that nobody should wait for. ``start``: of the model. ``environment`` has rank 0's provenance,
    too."""

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
    start: Start = Start({}, {})  # noqa: RUF009 (it is frozen)


class Contents:
    """Of one rank: ``Content`` after one step and after another. What is the same each time is made once."""

    def __init__(self, state: JobState, rank: int, world_size: int) -> None:
        self._state, self._rank, self._world_size = state, rank, world_size
        self._record: HookRecord | None = None
        self._spec: HookSpec | None = None  # its
        self._parts = 0
        self._sizes: Sizes | None = None  # theirs

    def after(
        self, step: int, total_steps: int | None, environment: Record, provenance: Record, data_digest: str | None
    ) -> Content:
        """The state after ``step``. A collective the first time, as ``JobState.capture``."""
        _, hook = self._state.hook_or_refuse()
        layout = hook.layout()
        snapshot = self._state.capture()
        snapshot.state["facts"] = {**environment, "data_digest": data_digest}
        return Content(
            snapshot=snapshot,
            layout=layout,
            hook=self._recorded(hook.spec),
            replicas=hook.replicas,
            summary=hook.summary(rank=self._rank, step=step, norm=False),
            environment=environment | provenance,
            data_digest=data_digest,
            total_steps=total_steps,
            parts=self._number_of_parts(snapshot.sizes()) if snapshot.shared else 0,
            norm_of=hook.norm_of,
            start=self._state.start,
        )

    def _recorded(self, spec: HookSpec) -> HookRecord:
        if self._record is None or spec is not self._spec:  # which is frozen
            parameters = spec.values()
            self._record = HookRecord(name=spec.name, parameters=parameters, state_version=STATE_VERSION)
            self._spec = spec
        return self._record

    def _number_of_parts(self, sizes: Sizes) -> int:
        if sizes is not self._sizes:
            self._sizes, self._parts = sizes, number_of_parts(sizes, self._world_size)
        return self._parts
