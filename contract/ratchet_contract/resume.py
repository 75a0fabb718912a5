"""Lineage, base and the resume report of an attempt."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.plural import counted, first_of
from ratchet_contract.step_ring import Part

ComponentStatus = Literal["exact", "redistributed", "reset", "absent", "not-exact", "imported"]
NOT_EXACT_SINCE: Final = "not exact since the resume from"
"""Prefix of the note of a report on a checkpoint that an earlier resume, which was not exact, led to."""
Verdict = Literal["fresh", "exact", "not-exact", "unmanaged"]

B = TypeVar("B")


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Segment(_Model):
    """Checkpoints of ``epoch`` with ``after_step < step <= until_step`` belong to the lineage (None: no upper end)."""

    epoch: int
    after_step: int
    until_step: int | None = None

    def holds(self, step: int, epoch: int) -> bool:
        return epoch == self.epoch and step > self.after_step and (self.until_step is None or step <= self.until_step)


def holds(lineage: Sequence[Segment], step: int, epoch: int) -> bool:
    """Does checkpoint (step, epoch) belong to the lineage?"""
    return any(segment.holds(step, epoch) for segment in lineage)


class Base(_Model):
    """What an attempt started from. ``checkpoint`` fields are None for a start from scratch (step 0)."""

    step: int = 0
    epoch: int | None = None
    digest: str | None = None


class ComponentReport(_Model):
    """How one component of one rank came back. ``reason`` is a sentence, always there unless ``exact``."""

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


class ReportOf(_Model, Generic[B]):
    """Written by rank 0 before the first step of an attempt; ``exact`` only when every component and fact is the same.

    ``unmanaged``: a script without a Session. It is started, and started again, from its first line; what it saves and restores
    is its own affair, and there are no components to speak of.
    """

    verdict: Verdict
    base: B
    world_size: int
    recorded_world_size: int | None = None
    components: list[ComponentReport] = []
    differences: list[EnvironmentDifference] = []
    quarantined: list[str] = []
    notes: list[str] = []

    @property
    def not_exact_since(self) -> str | None:
        """The resume which was not exact and led to the base; None: every resume up to it was exact."""
        note = next((note for note in self.notes if note.startswith(NOT_EXACT_SINCE)), None)
        return None if note is None else note.partition(":")[0]

    @property
    def changed_code(self) -> EnvironmentDifference | None:
        """Digests of the code that made the base, and of that which goes on from it; None: it is the same code."""
        return next((d for d in self.differences if d.key == "code_digest"), None)

    def sentence(self) -> str:
        """The verdict, and the digests where the code has changed; else the first component that is not exact, and why; and
        whether the base itself is not what an undisturbed run would have saved."""
        if (code := self.changed_code) is not None:
            return f"{self.verdict}: code changed ({code.recorded} -> {code.current})"
        part = next((c for c in self.components if c.status != "exact"), None) if self.verdict == "not-exact" else None
        if part is None:
            if self.verdict == "not-exact" and self.differences:
                return f"{self.verdict}: {first_of([other.sentence() for other in self.differences], 1)}"
            return f"{self.verdict}; {self.not_exact_since}" if self.not_exact_since else self.verdict
        why = textwrap.shorten(part.reason or part.status, 400, placeholder=" ...")
        return f"{self.verdict}: {part.component} of rank {part.rank}: {why}"


class ResumeReport(ReportOf[Base]):
    """As ranks send it and the service stores it."""


class StepDifference(_Model):
    """The first step that was not the same when it was done again, and the part of the rank's state that tells so."""

    step: int
    rank: int
    part: Part

    def sentence(self) -> str:
        return f"step {self.step}, done again, differs from the first time ({self.part} of rank {self.rank})"


class Redone(_Model):
    """What an attempt's ranks found when they did steps again that an earlier attempt had done (the replay proof)."""

    steps: int = Field(0, description="Steps behind its base that an earlier attempt had done.")
    compared: int = Field(0, description="Of these, how many all ranks have compared so far.")
    equal: int = Field(0, description="How many of those were the same, up to the first that differs.")
    first_difference: StepDifference | None = None
    reason: str | None = Field(None, description="Why steps are left out of the comparison; null: none is.")


def proof(report: ResumeReport, redone: Redone) -> str:
    """The verdict with its level of proof: ``exact, proved (37 of 37 redone steps)``, ``exact, not yet proved``, ``not-exact``,
    ``not-exact: code changed``; behind the first two ``not exact since the resume from step 90, attempt 1``, where the base is of
    such a run."""
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
    return f"{verdict}, proved ({redone.compared} of {counted(redone.steps, 'redone step')}){since}"
