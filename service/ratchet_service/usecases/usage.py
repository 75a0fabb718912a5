"""Hours of GPUs, CPU slots and ranks that attempts have held in an interval."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.usage import UsageItem, UsageView
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import RECOVERED_FROM_DISK, Attempt, AttemptNode, Job, JobLabel
from ratchet_service.scheduling import queue_queries
from ratchet_service.scheduling.fair_order import Share

_LABEL: Final = "label:"
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters with which a spreadsheet takes a cell for a formula, or strips the character and looks at the next one."""


class Hours(NamedTuple):
    """Hours of an attempt, or of several, times what each of them holds."""

    gpu: float = 0.0
    cpu: float = 0.0
    rank: float = 0.0

    def plus(self, other: Hours) -> Hours:
        """Return the sum of both."""
        return Hours(self.gpu + other.gpu, self.cpu + other.cpu, self.rank + other.rank)


def share_columns() -> tuple[sa.ColumnElement[Any], ...]:
    """Return the columns from which ``held_hours`` computes an attempt's share: what its launch has, and what the job has now."""
    # the launch of an attempt recovered from disk is a file that user code may have replaced
    stored = Attempt.launch[RECOVERED_FROM_DISK].as_string().is_(None)
    ranks = sa.case((stored, Attempt.launch["launch_file", "world_size"].as_integer()))
    device = sa.case((stored, Attempt.launch["launch_file", "resolved", "device"].as_string()))
    return (ranks, device, *queue_queries.share_columns())


def held_hours(
    begun: datetime | None, until: datetime, since: datetime, share: Sequence[Any], cpu_slots: int = 0
) -> Hours:
    """Return the hours of an attempt from ``begun`` (None: it has not begun), but not before ``since``, to ``until``. ``share``:
    its row of ``share_columns``."""
    if begun is None:
        return Hours()
    ranks, device, *of_job = share
    holds = queue_queries.share_of(*of_job)
    if ranks is not None:
        holds = Share(gpus=ranks if device == "cuda" else 0, ranks=ranks)
    ran = max(0.0, (until - max(begun, since)).total_seconds()) / 3600
    return Hours(ran * holds.gpus, ran * cpu_slots, ran * holds.ranks)


def usage(session: Session, since: datetime, until: datetime, by: str) -> UsageView:
    """Return the hours from ``since`` to ``until`` by ``owner``, or by the value of a label (``label:KEY``), with the most GPU
    hours first. An attempt that runs counts until now."""
    now = min(until, now_in(session))
    slots = sa.select(sa.func.sum(sa.func.json_array_length(AttemptNode.cpu_slots))).where(
        AttemptNode.job_id == Attempt.job_id, AttemptNode.attempt == Attempt.number
    )
    value: Any = Job.owner
    if by != "owner":
        label = sa.select(JobLabel.value).where(JobLabel.job_id == Job.id, JobLabel.key == by.removeprefix(_LABEL))
        value = label.scalar_subquery()
    query = (
        sa.select(value, Job.id, Attempt.begun_at, Attempt.ended_at, slots.scalar_subquery(), *share_columns())
        .select_from(Attempt)
        .join(Job, Job.id == Attempt.job_id)
    )
    over = sa.or_(Attempt.ended_at > since, Attempt.ended_at.is_(None))
    hours: dict[str | None, Hours] = defaultdict(Hours)
    jobs: dict[str | None, set[str]] = defaultdict(set)
    attempts: Counter[str | None] = Counter()
    for key, job_id, begun, ended, cpus, *share in session.execute(query.where(over, Attempt.begun_at < until)):
        end = min(ended or now, now)
        hours[key] = hours[key].plus(held_hours(begun, end, since, share, cpus or 0))
        jobs[key].add(job_id)
        attempts[key] += 1
    items = [
        UsageItem(
            value=key,
            jobs=len(jobs[key]),
            attempts=attempts[key],
            gpu_hours=round(used.gpu, 3),
            cpu_hours=round(used.cpu, 3),
            rank_hours=round(used.rank, 3),
        )
        for key, used in hours.items()
    ]
    items.sort(key=lambda item: (-item.gpu_hours, -item.cpu_hours, -item.rank_hours, item.value or ""))
    return UsageView(since=since, until=until, by=by, items=items)


def as_csv(view: UsageView) -> str:
    """Return the items as CSV (RFC 4180) with a header. A value that a spreadsheet could run as a formula gets a ``'`` in
    front."""
    out = io.StringIO()
    writer = csv.writer(out)
    names = [name for name in UsageItem.model_fields if name != "value"]
    writer.writerow([view.by, *names])
    for item in view.items:
        value = item.value or ""
        writer.writerow(["'" * value.startswith(_FORMULA) + value, *(getattr(item, name) for name in names)])
    return out.getvalue()
