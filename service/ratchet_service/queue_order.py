"""The order of the queue and what quotas hold back: pure, over what rows say of queued jobs and of attempts that have not ended.

A higher priority goes first. Among equals a job for which room has been made (``claims``) goes before the others, the earlier
one first; then the owner that holds least, GPUs before ranks; then the older job. What has been placed counts as held by its
owner for the places behind it, so that owners take turns. With one owner that is: priority, then age.

A quota holds back a job that would exceed it, and no job of another owner. The owner's later jobs get only what is left of the
quota behind it: a large one is not starved by small ones here either. A job that the quota can never hold keeps nothing.
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
    """What an owner holds, or what one job takes."""

    gpus: int = 0
    ranks: int = 0
    jobs: int = 0

    def plus(self, other: Share) -> Share:
        return Share(self.gpus + other.gpus, self.ranks + other.ranks, self.jobs + other.jobs)


@dataclass(frozen=True)
class Limit:
    """An owner's quota; None: no limit. ``queued`` counts jobs that have not ended, the others what attempts hold."""

    queued: int | None = None
    jobs: int | None = None
    ranks: int | None = None
    gpus: int | None = None

    def never(self, takes: Share) -> tuple[str, int, int] | None:
        """Of what one job takes more than the quota has: its name, how much it takes, the limit."""
        for name in HELD if self is not UNLIMITED else ():
            limit, wants = getattr(self, name), getattr(takes, name)
            if limit is not None and wants > limit:
                return name, wants, limit
        return None

    def too_small(self, takes: Share) -> str | None:
        """Why a job can never start under this quota; None: it can."""
        never = self.never(takes)
        if never is None:
            return None
        name, wants, limit = never
        return f"needs {wants} {_NAMES[name]}, its owner's quota is {limit}: an admin may raise it (`ratchet quota set OWNER`)"


HELD: Final = ("gpus", "ranks", "jobs")
UNLIMITED: Final = Limit()
_NAMES: Final = {"gpus": "GPUs", "ranks": "ranks", "jobs": "jobs"}


class Queued(NamedTuple):
    """A job that waits for an attempt. ``claims``: since when another one is stopped for it."""

    job: str
    owner: str
    priority: int
    created_at: datetime
    takes: Share
    claims: datetime | None = None

    @property
    def claim(self) -> float:
        """In the order of claims; those without one come last."""
        return math.inf if self.claims is None else self.claims.timestamp()


class Place(NamedTuple):
    """``over``: why the owner's quota holds it back; None: its turn comes."""

    queued: Queued
    over: str | None = None


def in_order(queue: Iterable[Queued], held: Mapping[str, Share], limit: Callable[[str], Limit]) -> list[Place]:
    """Every job of ``queue`` once, in order. ``held``: by owner, of attempts that have not ended; ``limit``: an owner's quota."""
    lines: dict[str, list[Queued]] = defaultdict(list)
    for one in queue:
        lines[one.owner].append(one)
    return list(in_turns({owner: iter(sorted(line, key=in_line)) for owner, line in lines.items()}, held, limit))


def in_line(one: Queued) -> tuple[int, float, datetime, str]:
    """By this an owner's jobs stand one behind the other."""
    return (-one.priority, one.claim, one.created_at, one.job)


def in_turns(
    lines: Mapping[str, Iterator[Queued]], held: Mapping[str, Share], limit: Callable[[str], Limit]
) -> Iterator[Place]:
    """``in_order`` of lines that are read only as far as places are asked for: each owner's, in the order of ``in_line``."""
    counted = defaultdict(Share, held)  # with what was placed: whose turn it is
    used = defaultdict(Share, held)  # with what waits for the quota, too: what is left of it
    heads = ((owner, next(line, None)) for owner, line in lines.items())
    turns = [_turn(head, counted[owner]) for owner, head in heads if head is not None]
    heapq.heapify(turns)
    while turns:
        one = turns[0][-1]
        owner, quota, over = one.owner, limit(one.owner), None
        if quota is not UNLIMITED:
            over = _over(one.takes, used[owner], held.get(owner, Share()), quota)
            if quota.never(one.takes) is None:
                used[owner] = used[owner].plus(one.takes)
        if over is None:
            counted[owner] = counted[owner].plus(one.takes)
        yield Place(one, over)
        following = next(lines[owner], None)
        if following is None:
            heapq.heappop(turns)
        else:
            heapq.heapreplace(turns, _turn(following, counted[owner]))


def _turn(head: Queued, holds: Share) -> tuple[int, float, int, int, datetime, str, Queued]:
    """No two are equal, and none comes before the one that its own line had before it: so the heads alone are compared."""
    return (-head.priority, head.claim, holds.gpus, holds.ranks, head.created_at, head.job, head)


def _over(takes: Share, used: Share, held: Share, quota: Limit) -> str | None:
    """Why not; of several limits the first."""
    never = quota.too_small(takes)
    if never is not None:
        return never
    for name in HELD:
        limit_, wants = getattr(quota, name), getattr(takes, name)
        if limit_ is not None and wants > 0 and getattr(used, name) + wants > limit_:
            ahead = getattr(used, name) - getattr(held, name)
            kept = f", {ahead} are for jobs ahead of it" if ahead else ""
            unit = _NAMES[name] if wants > 1 else _NAMES[name].removesuffix("s")
            what = "one more job" if name == "jobs" else f"{wants} {unit}"
            return f"waits for its owner's quota: needs {what}, {getattr(held, name)} of {limit_} {_NAMES[name]} are held{kept}"
    return None
