"""What one rank saves: its state, and the manifest's other facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet_contract.checkpoint.manifest import HookRecord
from ratchet_hooks.manage.managed_ddp import STATE_VERSION
from ratchet_hooks.specs.hook_specs import HookSpec
from ratchet_hooks.summary import HookSummary
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state.environment import Record
from ratchet_worker.state.replica_digests import number_of_parts
from ratchet_worker.state.replica_divergence import Start
from ratchet_worker.state.snapshot import Sizes, Snapshot, Tensors


@dataclass
class Content:
    """What one rank saves. ``parts``: number of parts into which the shared tensors are divided to compare them between ranks.
    ``norm_of``: computes the norm of the hook's residuals from copies of the tensors. ``start``: facts about the model before
    its first step."""

    snapshot: Snapshot
    layout: list[list[str]] | None
    hook: HookRecord
    replicas: Any
    summary: HookSummary
    environment: Record
    data_digest: str | None
    total_steps: int | None
    parts: int
    norm_of: Callable[[Tensors], float | None]  # later, from the copies: training should not wait for it
    start: Start = Start({}, {})  # noqa: RUF009 (it is frozen)


class Contents:
    """Makes one rank's ``Content`` for each save. Parts of it that seldom change are kept for the next save."""

    def __init__(self, state: JobState, rank: int, world_size: int) -> None:
        self._state, self._rank, self._world_size = state, rank, world_size
        self._record: HookRecord | None = None
        self._spec: HookSpec | None = None  # the one that ``_record`` was made of
        self._parts = 0
        self._sizes: Sizes | None = None  # the ones that ``_parts`` was computed from

    def capture(
        self, step: int, total_steps: int | None, environment: Record, provenance: Record, data_digest: str | None
    ) -> Content:
        """Capture what this rank saves after ``step``; the tensors are live, not copied. ``environment``: facts about this
        rank, for its state and the manifest. ``provenance``: further facts for the manifest, which are not compared. The first
        call after a step may be a collective, so all ranks must make it. Raises as ``JobState.capture``."""
        _, hook = self._state.require_wrapped()
        layout = hook.layout()
        snapshot = self._state.capture()
        snapshot.state["facts"] = {**environment, "data_digest": data_digest}
        return Content(
            snapshot=snapshot,
            layout=layout,
            hook=self._hook_record(hook.spec),
            replicas=hook.replicas,
            summary=hook.summary(rank=self._rank, step=step, norm=False),
            environment=environment | provenance,
            data_digest=data_digest,
            total_steps=total_steps,
            parts=self._number_of_parts(snapshot.sizes()) if snapshot.shared else 0,
            norm_of=hook.norm_of,
            start=self._state.start,
        )

    def _hook_record(self, spec: HookSpec) -> HookRecord:
        """Return the manifest's record of the hook ``spec``; the same object as before while ``spec`` is the same object."""
        if self._record is None or spec is not self._spec:  # a spec is frozen
            parameters = spec.values()
            self._record = HookRecord(name=spec.name, parameters=parameters, state_version=STATE_VERSION)
            self._spec = spec
        return self._record

    def _number_of_parts(self, sizes: Sizes) -> int:
        """Return the number of parts for tensors of these sizes; computed again only for another ``sizes`` object."""
        if sizes is not self._sizes:
            self._sizes, self._parts = sizes, number_of_parts(sizes, self._world_size)
        return self._parts
