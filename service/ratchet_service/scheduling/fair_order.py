"""The order of the queue, and which jobs an owner's quota holds back. Jobs of higher priority come first. Among jobs of equal
priority, the order is: jobs for which another job was stopped, the owner who holds least, the oldest job. If a job waits for its
owner's quota, the part of the quota that it needs is reserved for it."""

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
    """An owner's quota; None: no limit. ``queued``: the largest number of jobs that have not ended. ``jobs``, ``ranks``,
    ``gpus``: the most that the owner's attempts may hold together."""

    queued: int | None = None
    jobs: int | None = None
    ranks: int | None = None
    gpus: int | None = None

    def exceeded_resource(self, share: Share) -> tuple[str, int, int] | None:
        """Return the first resource of which ``share`` needs more than the whole quota: name, need and limit; None: none."""
        for name in HELD if self is not UNLIMITED else ():
            limit, wants = getattr(self, name), getattr(share, name)
            if limit is not None and wants > limit:
                return name, wants, limit
        return None

    def lacking_resource(self, used: Share, share: Share) -> str | None:
        """Return the first resource that ``share`` needs and of which ``used`` leaves too little; None: there is room."""
        for name in HELD if self is not UNLIMITED else ():
            limit, wants = getattr(self, name), getattr(share, name)
            if limit is not None and wants > 0 and getattr(used, name) + wants > limit:
                return name
        return None

    def never_fits_reason(self, share: Share) -> str | None:
        """Return why a job that takes ``share`` can never start under this quota; None: it can at some time."""
        never = self.exceeded_resource(share)
        if never is None:
            return None
        name, wants, limit = never
        return f"needs {wants} {_NAMES[name]}, its owner's quota is {limit}: an admin may raise it (`ratchet quota set OWNER`)"


HELD: Final = ("gpus", "ranks", "jobs")
UNLIMITED: Final = Limit()
_NAMES: Final = {"gpus": "GPUs", "ranks": "ranks", "jobs": "jobs"}


class Queued(NamedTuple):
    """A job that waits for an attempt. ``share``: what it takes. ``claimed_since``: when another job was last requested to
    stop for this one."""

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
    """A job at its place in the order. ``held_back_reason``: why its owner's quota holds it back; None: it may start."""

    queued: Queued
    held_back_reason: str | None = None


def order_queue(queue: Iterable[Queued], held: Mapping[str, Share], limit: Callable[[str], Limit]) -> list[Place]:
    """Return every job of ``queue`` in the launch order. ``held``: what attempts hold, by owner. ``limit``: returns an owner's
    quota."""
    lines: dict[str, list[Queued]] = defaultdict(list)
    for one in queue:
        lines[one.owner].append(one)
    return list(iter_turns({owner: iter(sorted(line, key=line_key)) for owner, line in lines.items()}, held, limit))


def line_key(one: Queued) -> tuple[int, float, datetime, str]:
    """Sort key of one owner's jobs: by priority (high ones first), ``claimed_since``, age (the oldest first), id."""
    return (-one.priority, one.claim_key, one.created_at, one.job)


def iter_turns(
    lines: Mapping[str, Iterator[Queued]], held: Mapping[str, Share], limit: Callable[[str], Limit]
) -> Iterator[Place]:
    """Like ``order_queue``, but lazy. ``lines``: for each owner an iterator over its jobs, sorted by ``line_key``."""
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
    """Return the entry for the heap of owners, whose least entry is the next job. ``held``: with the jobs placed so far."""
    return (-head.priority, head.claim_key, held.gpus, held.ranks, head.created_at, head.job, head)


def _quota_reason(share: Share, used: Share, held: Share, quota: Limit) -> str | None:
    """Return a message that names the limit which a job that takes ``share`` would exceed; None: it exceeds no limit. ``held``:
    what the owner's attempts hold. ``used``: ``held``, and what the owner's jobs ahead of this one take."""
    never = quota.never_fits_reason(share)
    if never is not None:
        return never
    name = quota.lacking_resource(used, share)
    if name is None:
        return None
    limit_, wants = getattr(quota, name), getattr(share, name)
    ahead = getattr(used, name) - getattr(held, name)
    kept = f", {ahead} are reserved for jobs ahead of it" if ahead else ""
    unit = _NAMES[name] if wants > 1 else _NAMES[name].removesuffix("s")
    what = "one more job" if name == "jobs" else f"{wants} {unit}"
    return f"waits for its owner's quota: needs {what}, {getattr(held, name)} of {limit_} {_NAMES[name]} are held{kept}"
