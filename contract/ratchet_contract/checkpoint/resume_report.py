"""Lineage, base and the resume report of an attempt."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet_contract.checkpoint.step_ring import Part
from ratchet_contract.plural import join_first, pluralize

ComponentStatus = Literal["exact", "redistributed", "reset", "absent", "not-exact", "imported"]
NOT_EXACT_SINCE: Final = "not exact since the resume from"
"""Prefix of a note in the report on a checkpoint that descends from an earlier, inexact resume."""
Verdict = Literal["fresh", "exact", "not-exact", "unmanaged"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


def rename_epoch(data: Any) -> Any:
    """Files written before the first release call an attempt's number ``epoch``: manifests, ``base.json``, ``launch.json``."""
    if not isinstance(data, dict) or "epoch" not in data or "attempt" in data:
        return data
    return {"attempt" if key == "epoch" else key: value for key, value in data.items()}


class Segment(_Model):
    """Checkpoints of ``attempt`` with ``after_step < step <= until_step`` belong to the lineage (None: no upper end)."""

    attempt: int
    after_step: int
    until_step: int | None = None

    def contains(self, step: int, attempt: int) -> bool:
        return (
            attempt == self.attempt and step > self.after_step and (self.until_step is None or step <= self.until_step)
        )


def lineage_contains(lineage: Sequence[Segment], step: int, attempt: int) -> bool:
    """True if checkpoint (step, attempt) belongs to the lineage."""
    return any(segment.contains(step, attempt) for segment in lineage)


class Base(_Model):
    """The checkpoint that an attempt, or another checkpoint, continues from."""

    step: int = Field(0, description="0, with the other keys null: from scratch.")
    attempt: int | None = Field(None, description="The attempt that wrote it.")
    digest: str | None = Field(None, description="Of its manifest.")

    _older = model_validator(mode="before")(rename_epoch)


class ComponentReport(_Model):
    """How one component of one rank was restored. ``reason`` is a sentence, always set unless ``exact``."""

    component: str  # model, optimizer, scheduler, scaler, buffers, rng, hook, layout, data, user:<name>
    rank: int
    status: ComponentStatus
    reason: str | None = None


class EnvironmentDifference(_Model):
    """One recorded fact that is not the same now. Facts that cannot change a bit (host name) are not recorded."""

    key: str
    recorded: str | int | float | bool | None
    current: str | int | float | bool | None

    def sentence(self) -> str:
        """``threads (2 -> 1)``"""
        return f"{self.key} ({self.recorded} -> {self.current})"


class ResumeReport(_Model):
    """Written by rank 0 before the first step of an attempt; ``exact`` only when every component and fact is the same.

    ``unmanaged``: a script without a Session. It is started, and started again, from its first line; it must save and
    restore its own state, and the report has no components.
    """

    verdict: Verdict
    base: Base
    world_size: int
    recorded_world_size: int | None = None
    components: list[ComponentReport] = []
    differences: list[EnvironmentDifference] = []
    quarantined: list[str] = []
    notes: list[str] = []

    @property
    def not_exact_since(self) -> str | None:
        """The inexact resume that led to the base; None: every resume up to it was exact."""
        note = next((note for note in self.notes if note.startswith(NOT_EXACT_SINCE)), None)
        return None if note is None else note.partition(":")[0]

    @property
    def changed_code(self) -> EnvironmentDifference | None:
        """Digests of the code that made the base, and of the code that continues from it; None if it is the same code."""
        return next((d for d in self.differences if d.key == "code_digest"), None)

    def sentence(self) -> str:
        """The verdict, and the digests if the code has changed; otherwise the first component that is not exact, and why; and
        whether the base itself differs from what an undisturbed run would have saved."""
        if (code := self.changed_code) is not None:
            return f"{self.verdict}: code changed ({code.recorded} -> {code.current})"
        part = next((c for c in self.components if c.status != "exact"), None) if self.verdict == "not-exact" else None
        if part is None:
            if self.verdict == "not-exact" and self.differences:
                return f"{self.verdict}: {join_first([other.sentence() for other in self.differences], 1)}"
            return f"{self.verdict}; {self.not_exact_since}" if self.not_exact_since else self.verdict
        why = textwrap.shorten(part.reason or part.status, 400, placeholder=" ...")
        return f"{self.verdict}: {part.component} of rank {part.rank}: {why}"


class StepDifference(_Model):
    """The first step that was not the same when it was done again, and the part of the rank's state that differs."""

    step: int
    rank: int
    part: Part

    def sentence(self) -> str:
        return f"step {self.step}, done again, differs from its first execution ({self.part} of rank {self.rank})"


class Redone(_Model):
    """What an attempt's ranks found when they did steps again that an earlier attempt had done (the replay proof)."""

    steps: int = Field(0, description="Steps after its base that an earlier attempt had done.")
    compared: int = Field(0, description="Number of these steps that all ranks have compared so far.")
    equal: int = Field(0, description="Number of those that were identical, up to the first that differs.")
    first_difference: StepDifference | None = None
    reason: str | None = Field(None, description="Why steps are left out of the comparison; null: none is.")


def proof_text(report: ResumeReport, redone: Redone) -> str:
    """The verdict with its level of proof: ``exact, proved (37 of 37 redone steps)``, ``exact, not yet proved``, ``not-exact``,
    ``not-exact: code changed``. The first two are followed by ``not exact since the resume from step 90, attempt 1`` if the base
    descends from such a resume."""
    verdict = report.verdict
    if redone.first_difference is not None:
        return f"not-exact ({redone.first_difference.sentence()})"
    if report.changed_code is not None:
        return f"{verdict}: code changed"
    if verdict not in ("exact", "fresh") or (verdict == "fresh" and redone.steps == 0):
        return verdict
    since = f"; {report.not_exact_since}" if report.not_exact_since else ""
    if redone.compared == 0:
        return f"{verdict}, not yet proved{since}"
    return f"{verdict}, proved ({redone.compared} of {pluralize(redone.steps, 'redone step')}){since}"
