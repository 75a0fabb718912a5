"""What the rows say for retention: the value that ``keep_best`` judges a checkpoint by."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.resume import Base
from ratchet_contract.spec_checkpoint import CheckpointSpec
from ratchet_service.models import Checkpoint, Job, Metric
from ratchet_store.keeping import Id


def rules_of(job: Job) -> CheckpointSpec:
    return CheckpointSpec.model_validate(job.spec["checkpoint"])


def values_of(session: Session, job: Job, rows: Collection[Checkpoint], bases: Mapping[int, Base]) -> dict[Id, float]:
    """The metric's value by checkpoint, where it has one that is a number.

    It is the one logged at exactly its step by the attempt that wrote it, or by one that started from it: an evaluation that a
    stop cut short runs again after the resume. Another branch may have logged the same step; that says nothing of this one.
    """
    best = rules_of(job).keep_best
    if best is None or not rows:
        return {}
    steps = sa.select(Checkpoint.step).where(Checkpoint.job_id == job.id)
    query = sa.select(Metric.step, Metric.epoch, Metric.value).where(
        Metric.job_id == job.id, Metric.name == best.metric, Metric.step.in_(steps)
    )
    logged = {step: (epoch, value) for step, epoch, value in session.execute(query)}
    found: dict[Id, float] = {}
    for row in rows:
        epoch, value = logged.get(row.step, (row.epoch, None))
        base = bases.get(epoch)
        began_here = base is not None and (base.step, base.epoch) == (row.step, row.epoch)
        if value is not None and not math.isnan(value) and (epoch == row.epoch or began_here):
            found[row.step, row.epoch] = value
    return found
