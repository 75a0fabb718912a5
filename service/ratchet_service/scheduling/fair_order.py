"""The order of the queue and what quotas hold back. Pure: computed from rows of queued jobs and of attempts that have not ended.

A higher priority goes first. Among jobs of one priority, those for which another job was stopped (``Queued.claimed_since``) go
before the others, the earliest claim first. Then the job goes first whose owner holds fewest GPUs, then fewest ranks; then the
older job. A placed job counts as held by its owner for later places, unless a quota holds it back, so that owners take turns.
With one owner and no claims the order is: priority, then age.

A quota holds back a job that would exceed it, and no job of another owner. The owner's later jobs get only what the job leaves of
the quota: here, too, small jobs do not starve a large one. Nothing is reserved for a job that the quota can never hold.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple


class Share(NamedTuple):
    """What an owner holds, or what one job takes: numbers of GPUs, ranks and jobs."""

    gpus: int = 0
    ranks: int = 0
    jobs: int = 0

    def plus(self, other: Share) -> Share:
        return Share(self.gpus + other.gpus, self.ranks + other.ranks, self.jobs + other.jobs)


@dataclass(frozen=True)
class Limit:
    """An owner's quota; None: no limit. ``queued`` limits the jobs that have not ended; ``jobs``, ``ranks`` and ``gpus`` limit
    what its attempts that have not ended hold together."""

    queued: int | None = None
    jobs: int | None = None
    ranks: int | None = None
    gpus: int | None = None

    def exceeded_resource(self, share: Share) -> tuple[str, int, int] | None:
        """Return the first resource of which a job that takes ``share`` needs more than the whole quota: its name (one of
        ``HELD``), how much the job takes, and the limit. None: the job fits into the quota if the owner holds nothing else."""
        for name in HELD if self is not UNLIMITED else ():
            limit, wants = getattr(self, name), getattr(share, name)
            if limit is not None and wants > limit:
                return name, wants, limit
        return None

    def never_fits_reason(self, share: Share) -> str | None:
        """Return a message that says why a job that takes ``share`` can never start under this quota; None if it can start once
        the owner's other jobs have ended."""
        never = self.exceeded_resource(share)
        if never is None:
            return None
        name, wants, limit = never
        return f"needs {wants} {_NAMES[name]}, its owner's quota is {limit}: an admin may raise it (`ratchet quota set OWNER`)"


HELD: Final = ("gpus", "ranks", "jobs")
UNLIMITED: Final = Limit()
_NAMES: Final = {"gpus": "GPUs", "ranks": "ranks", "jobs": "jobs"}


class Queued(NamedTuple):
    """A job that waits for an attempt. ``share``: what it takes. ``claimed_since``: when another job was last requested to stop
    for this one; the value stays until this job leaves the queue, also after the other job has stopped. None: no job was stopped
    for it."""

    job: str
    owner: str
    priority: int
    created_at: datetime
    share: Share
    claimed_since: datetime | None = None

    @property
    def claim_key(self) -> float:
        """Sort key by ``claimed_since``: the earliest first, jobs without one last (infinity)."""
        return math.inf if self.claimed_since is None else self.claimed_since.timestamp()


class Place(NamedTuple):
    """A job at its place in the order. ``held_back_reason``: why the owner's quota holds the job back; None: the quota lets it
    start."""

    queued: Queued
    held_back_reason: str | None = None


def order_queue(queue: Iterable[Queued], held: Mapping[str, Share], limit: Callable[[str], Limit]) -> list[Place]:
    """Return every job of ``queue`` once, in the launch order; jobs that a quota holds back are included, with the reason.
    ``held``: what attempts that have not ended hold, by owner. ``limit``: returns the quota of an owner."""
    lines: dict[str, list[Queued]] = defaultdict(list)
    for one in queue:
        lines[one.owner].append(one)
    return list(iter_turns({owner: iter(sorted(line, key=line_key)) for owner, line in lines.items()}, held, limit))


def line_key(one: Queued) -> tuple[int, float, datetime, str]:
    """Sort key of the jobs of one owner: priority (high ones first), ``claimed_since`` (the earliest first, jobs without one
    last), age (the oldest first), id."""
    return (-one.priority, one.claim_key, one.created_at, one.job)


def iter_turns(
    lines: Mapping[str, Iterator[Queued]], held: Mapping[str, Share], limit: Callable[[str], Limit]
) -> Iterator[Place]:
    """Like ``order_queue``, for jobs that are read only as far as the caller iterates. ``lines``: for each owner an iterator over
    its jobs, sorted by ``line_key``."""
    counted = defaultdict(Share, held)  # and placed jobs: decides whose turn it is
    used = defaultdict(Share, held)  # and jobs that wait for the quota: what is left of it
    heads = ((owner, next(line, None)) for owner, line in lines.items())
    turns = [_heap_entry(head, counted[owner]) for owner, head in heads if head is not None]
    heapq.heapify(turns)
    while turns:
        one = turns[0][-1]
        owner, quota, over = one.owner, limit(one.owner), None
        if quota is not UNLIMITED:
            over = _quota_reason(one.share, used[owner], held.get(owner, Share()), quota)
            if quota.exceeded_resource(one.share) is None:
                used[owner] = used[owner].plus(one.share)
        if over is None:
            counted[owner] = counted[owner].plus(one.share)
        yield Place(one, over)
        following = next(lines[owner], None)
        if following is None:
            heapq.heappop(turns)
        else:
            heapq.heapreplace(turns, _heap_entry(following, counted[owner]))


def _heap_entry(head: Queued, held: Share) -> tuple[int, float, int, int, datetime, str, Queued]:
    """Return the entry for the heap of owners, whose least entry is the next job: by priority (high ones first), claim, what the
    owner holds, age. ``head``: the owner's first job that is not placed yet; ``held``: what the owner holds, the jobs placed so
    far included. No two entries are equal, and an owner's later job never sorts before its earlier one."""
    return (-head.priority, head.claim_key, held.gpus, held.ranks, head.created_at, head.job, head)


def _quota_reason(share: Share, used: Share, held: Share, quota: Limit) -> str | None:
    """Return a message that names the first limit of ``quota`` that a job which takes ``share`` would exceed; None: it fits.
    ``used``: what the owner's attempts hold, plus what the owner's jobs ahead take or reserve; ``held``: what the attempts alone
    hold."""
    never = quota.never_fits_reason(share)
    if never is not None:
        return never
    for name in HELD:
        limit_, wants = getattr(quota, name), getattr(share, name)
        if limit_ is not None and wants > 0 and getattr(used, name) + wants > limit_:
            ahead = getattr(used, name) - getattr(held, name)
            kept = f", {ahead} are reserved for jobs ahead of it" if ahead else ""
            unit = _NAMES[name] if wants > 1 else _NAMES[name].removesuffix("s")
            what = "one more job" if name == "jobs" else f"{wants} {unit}"
            return f"waits for its owner's quota: needs {what}, {getattr(held, name)} of {limit_} {_NAMES[name]} are held{kept}"
    return None
