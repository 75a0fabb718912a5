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
    """Return ``data`` with the key ``attempt`` in place of ``epoch``, the key in files of old versions."""
    if not isinstance(data, dict) or "epoch" not in data or "attempt" in data:
        return data
    return {"attempt" if key == "epoch" else key: value for key, value in data.items()}


class Segment(_Model):
    """A part of a lineage: the checkpoints of ``attempt`` with ``after_step < step <= until_step`` (None: no upper end)."""

    attempt: int
    after_step: int
    until_step: int | None = None

    def contains(self, step: int, attempt: int) -> bool:
        """True if the checkpoint of this step and attempt belongs to the segment."""
        return (
            attempt == self.attempt and step > self.after_step and (self.until_step is None or step <= self.until_step)
        )


def lineage_contains(lineage: Sequence[Segment], step: int, attempt: int) -> bool:
    """True if the checkpoint of this step and attempt belongs to the lineage."""
    return any(segment.contains(step, attempt) for segment in lineage)


class Base(_Model):
    """The checkpoint that an attempt, or another checkpoint, continues from. With the default values it means: from scratch."""

    step: int = Field(0, description="0, with the other keys null: from scratch.")
    attempt: int | None = Field(None, description="The attempt that wrote it.")
    digest: str | None = Field(None, description="Of its manifest.")

    _older = model_validator(mode="before")(rename_epoch)


class ComponentReport(_Model):
    """How one component of one rank was restored. ``reason``: why, set unless ``status`` is ``exact``."""

    component: str  # model, optimizer, scheduler, scaler, buffers, rng, hook, layout, data, user:<name>
    rank: int
    status: ComponentStatus
    reason: str | None = None


class EnvironmentDifference(_Model):
    """One recorded fact (software, hardware, setting) that is different now. Facts that cannot change a bit (host name) are
    not compared."""

    key: str
    recorded: str | int | float | bool | None
    current: str | int | float | bool | None

    def sentence(self) -> str:
        """Return the fact with both values, such as ``threads (2 -> 1)``."""
        return f"{self.key} ({self.recorded} -> {self.current})"


class ResumeReport(_Model):
    """How an attempt began; written by rank 0 before its first step.

    ``verdict``: ``exact`` if every component and every recorded fact is the same as in the base, else ``not-exact``; ``fresh`` if
    there is no base; ``unmanaged`` for a script without a Session. Each attempt of such a script starts it from
    its first line. The script must save and restore its own state, and the report has no components.
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
        """The inexact resume from which the base descends, as a phrase with step and attempt; None if there is none."""
        note = next((note for note in self.notes if note.startswith(NOT_EXACT_SINCE)), None)
        return None if note is None else note.partition(":")[0]

    @property
    def changed_code(self) -> EnvironmentDifference | None:
        """The difference between the code of the base and the code of this attempt, as digests; None if the report has no such
        difference."""
        return next((d for d in self.differences if d.key == "code_digest"), None)

    def sentence(self) -> str:
        """Return the verdict, with its main reason if there is one."""
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
    """The first redone step that differs from its first execution by an earlier attempt. ``part``: the part of the state of
    ``rank`` that differs after this step."""

    step: int
    rank: int
    part: Part

    def sentence(self) -> str:
        return f"step {self.step}, done again, differs from its first execution ({self.part} of rank {self.rank})"


class Redone(_Model):
    """The result of the replay proof: what an attempt's ranks found when they did steps again that an earlier attempt had done.
    The fingerprints of both executions are compared, step by step."""

    steps: int = Field(0, description="Steps after its base that an earlier attempt had done.")
    compared: int = Field(0, description="Number of these steps that all ranks have compared so far.")
    equal: int = Field(0, description="Number of those that were identical, up to the first that differs.")
    first_difference: StepDifference | None = None
    reason: str | None = Field(None, description="Why steps are left out of the comparison; null: none is.")


def is_proved(verdict: Verdict, redone: Redone) -> bool:
    """Return True if redone steps prove the verdict ``exact`` or ``fresh``: at least one was compared, and none differs."""
    return verdict in ("exact", "fresh") and redone.compared > 0 and redone.first_difference is None


def proof_text(report: ResumeReport, redone: Redone) -> str:
    """Return the report's verdict with its level of proof, such as ``exact, proved (37 of 37 redone steps)``. If a redone step
    differs, the text is ``not-exact`` with this step, whatever the verdict is. The report's components are not read."""
    verdict = report.verdict
    if redone.first_difference is not None:
        return f"not-exact ({redone.first_difference.sentence()})"
    if report.changed_code is not None:
        return f"{verdict}: code changed"
    if verdict not in ("exact", "fresh") or (verdict == "fresh" and redone.steps == 0):
        return verdict
    since = f"; {report.not_exact_since}" if report.not_exact_since else ""
    if not is_proved(verdict, redone):
        return f"{verdict}, no step compared{since}"
    return f"{verdict}, proved ({redone.compared} of {pluralize(redone.steps, 'redone step')}){since}"
