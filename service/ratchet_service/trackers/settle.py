"""Which points are sent: a function of stored rows alone, so that a batch can be repeated.

A job's lineage says which attempt counts at which step. Attempt 1 is killed at step 150, and attempt 2 starts from the checkpoint
of step 100: then steps up to 100 are those of attempt 1, later ones those of attempt 2. A step is settled if a checkpoint of the
lineage at this or a later step is committed; only an older checkpoint, after damage or at a request, makes it be done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import ForkSource
from ratchet_service.trackers.sink import Point

ALL_STEPS: Final = 2**63 - 1


class Part(NamedTuple):
    """The steps ``first <= step <= last`` of an attempt. ``first`` is the step of its base: what the earlier attempt did not
    report at that step, such as an evaluation, this one may."""

    attempt: int
    first: int
    last: int


class Row(NamedTuple):
    """The values of one message, by series."""

    id: int
    attempt: int
    step: int
    at: datetime
    values: Mapping[str, float]


def parts_of(bases: Mapping[int, Base], until: Base | None, fork: ForkSource | None) -> list[Part]:
    """Return the lineage up to the checkpoint ``until``, empty if it names no attempt; None: to the end of the last attempt that
    trained."""
    return [
        Part(found.attempt, found.after_step, ALL_STEPS if found.until_step is None else found.until_step)
        for found in lineage(bases, resume_from=until, fork=fork)
    ]


def choose(rows: Iterable[Row], parts: Sequence[Part], marks: Mapping[str, int], base_step: int) -> list[Point]:
    """Return the points to send, by step: of each series those after its newest sent step (``marks``) and after ``base_step``,
    each step once. If a step was reported twice, the first report counts: later ones may arrive after it was sent."""
    newest, out = dict(marks), list[Point]()
    by_attempt = {part.attempt: part for part in parts}
    for row in sorted(rows, key=lambda row: (row.step, row.id)):
        part = by_attempt.get(row.attempt)
        if part is not None and part.first <= row.step <= part.last and row.step > base_step:
            for name, value in row.values.items():
                if row.step > newest.get(name, -1):
                    newest[name] = row.step
                    out.append(Point(name, row.step, value, row.at))
    return out


def advance(marks: Mapping[str, int], points: Iterable[Point]) -> dict[str, int]:
    """Return the newest sent step of each series after ``points`` were sent."""
    return {**marks, **{point.name: point.step for point in points}}
