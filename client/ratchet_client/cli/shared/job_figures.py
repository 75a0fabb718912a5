"""The figures of a job that the live views show: gathers them from several responses, and formats them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import queue_position_text, reason_text, steps

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import HookView, JobView

_POINTS = 16
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Snapshot:
    """One job at one moment, for display. ``losses``: over the whole job, thinned, oldest first, may be empty.
    ``checkpoint_at``: when the last checkpoint was committed, None if unknown."""

    job: JobView
    hook: HookView | None
    losses: tuple[float, ...]
    checkpoint_at: datetime | None

    @property
    def loss(self) -> float | None:
        """The newest loss; None if ``losses`` is empty."""
        return self.losses[-1] if self.losses else None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step at the current speed; None if that cannot be computed."""
        now = self.job.progress
        if now.total_steps is None or not now.steps_per_second:
            return None
        return max(0, now.total_steps - now.step) / now.steps_per_second


class SnapshotReader:
    """Reads snapshots from the service, and caches what does not change between two polls. Not thread-safe."""

    def __init__(self, client: RatchetClient) -> None:
        self._client = client
        self._loss_names: dict[str, str] = {}
        self._committed: dict[str, datetime | None] = {}

    def read(self, job: JobView) -> Snapshot:
        """Return a snapshot of ``job``, with the hook and the losses as they are now if it has an attempt. Raise the client's
        errors, such as ``NotFound``."""
        if not job.attempt:
            return Snapshot(job, None, (), None)
        return Snapshot(job, self._client.hook(job.id), self._losses(job.id), self._committed_at(job))

    def _losses(self, job_id: str) -> tuple[float, ...]:
        """Return up to ``_POINTS`` values, over the whole job, of a series with "loss" in its name, oldest first; empty if there
        is none."""
        name = self._loss_names.get(job_id)
        if name is None:
            found = [s.name for s in self._client.metrics(job_id, max_points=2).series if "loss" in s.name.lower()]
            if not found:
                return ()
            name = self._loss_names[job_id] = "loss" if "loss" in found else found[0]
        series = self._client.metrics(job_id, name=[name], max_points=_POINTS).series
        return tuple(point.value for s in series for point in s.points)

    def _committed_at(self, job: JobView) -> datetime | None:
        """Return when the job's last checkpoint was committed; None if that is unknown. Cached per checkpoint."""
        if job.last_checkpoint is None:
            return None
        key = f"{job.id}/{job.last_checkpoint}"
        if key not in self._committed:
            found = {c.id: c.created_at for c in self._client.checkpoints(job.id)}
            self._committed = {k: v for k, v in self._committed.items() if not k.startswith(f"{job.id}/")}
            self._committed[key] = found.get(job.last_checkpoint)
        return self._committed[key]


def snapshot_fields(snapshot: Snapshot) -> dict[str, Any]:
    """Return the figures of a snapshot as a flat dict, for ``--json``; unknown ones are None."""
    job, hook = snapshot.job, snapshot.hook
    return {
        "phase": job.phase, "attempt": job.attempt, **job.progress.model_dump(), "eta_seconds": snapshot.eta_seconds,
        "loss": snapshot.loss, "hook": job.hook, "hook_phase": hook and hook.phase, "hook_iteration": hook and hook.iteration,
        "compression_rate": hook and hook.compression_rate, "checkpoint": job.last_checkpoint,
        "checkpoint_at": output.format_time(snapshot.checkpoint_at), "reason": job.reason, "message": job.message,
        "position": job.position, "ahead_at_least": job.ahead_at_least,
    }  # fmt: skip


def progress_text(job: JobView) -> str:
    """Return the job's step, like ``1200/6000``; for an active job that reports no steps, how long it has run."""
    if job.progress.step or job.progress.total_steps is not None or not job.phase.active or job.started_at is None:
        return steps(job)
    return output.span(job.started_at, None)


def speed_text(rate: float | None) -> str:
    """Return ``42.1 steps/s``, or ``12.5 s/step`` for slow jobs. ``rate``: steps per second; "" if it is None or 0."""
    if not rate:
        return ""
    return f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"


def eta_text(snapshot: Snapshot) -> str:
    """Return the time until the last step, like ``1m 23s``; "" if it is unknown."""
    return "" if snapshot.eta_seconds is None else output.duration(snapshot.eta_seconds)


def hook_text(hook: HookView | None) -> str:
    """Return the hook's state, like ``powerSGD compressing, iteration 120, 7.31x fewer elements``; "" if it has reported
    nothing."""
    if hook is None or hook.phase is None:
        return ""
    rate = "" if hook.compression_rate in (None, 1.0) else f", {hook.compression_rate:.3g}x fewer elements"
    return f"{hook.name} {hook.phase}, iteration {hook.iteration}{rate}"


def checkpoint_text(snapshot: Snapshot) -> str:
    """Return the last checkpoint, with its age if that is known, like ``step-000000001200.a0001 (12s ago)``; "" if there is
    none."""
    if snapshot.job.last_checkpoint is None:
        return ""
    ago = "" if snapshot.checkpoint_at is None else f" ({output.age(snapshot.checkpoint_at, datetime.now(UTC))} ago)"
    return snapshot.job.last_checkpoint + ago


def waiting_text(job: JobView) -> str:
    """Return why a job is not training, with its next try and queue position if known; "" if there is no reason."""
    text = "" if job.phase == "RUNNING" else reason_text(job)
    if job.not_before is not None and not job.phase.terminal:
        left = (job.not_before - datetime.now(UTC)).total_seconds()
        text += f" (next try in {output.duration(left)})" if left > 0 else ""
    if not text and job.phase == "QUEUED":
        text = "no reconciler has processed it yet"
    place = queue_position_text(job)
    return f"{text} ({place})" if text and place else text.strip() or place


def sparkline(values: Sequence[float]) -> str:
    """Return one block character per value, scaled to their range, a space for one that is not finite; "" if fewer than two
    values are finite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((v - low) * scale)] if math.isfinite(v) else " " for v in values)
