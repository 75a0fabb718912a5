"""Who is stopped, with a checkpoint, for a job of higher priority that waits for slots: pure, and the fewest that make room.

Nobody is stopped where that would not make enough room, where room is on its way already (of attempts that are being
stopped), or for a job whose room those ahead of it would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from ratchet_service.slots import Need

NOTHING = Need(0, 0)
Scope = Literal["owner", "any", "off"]
"""Whose jobs are stopped for one of higher priority: its own owner's, anybody's, nobody's. Everybody sets the priority of their
own jobs, so that ``any`` lets each submitter stop all others' jobs."""
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True)
class Running:
    """An attempt with slots. ``stopping``: it is about to give them back. ``spared``: it is not to be stopped, or not yet.

    ``at_risk``: seconds of training since the last checkpoint, lost if the stop goes wrong."""

    job: str
    epoch: int
    owner: str
    priority: int
    holds: Need
    stopping: bool = False
    spared: bool = False
    at_risk: float = 0.0
    since: datetime | None = None


class Room:
    """What could be free while one round of launches is worked out, in the order of the queue."""

    def __init__(self, running: Iterable[Running], scope: Scope) -> None:
        self._scope = scope
        attempts = list(running)
        self._coming = NOTHING
        for one in attempts:
            if one.stopping:
                self._coming = self._coming.plus(one.holds)
        self._owed = NOTHING  # what jobs ahead lack and nobody can be stopped for
        self._left = sorted((a for a in attempts if not a.stopping and not a.spared), key=_value)

    def helps(self, priority: int) -> bool:
        """Whether somebody may still be stopped for a job of this priority that needs CPU slots; of some owner, since one that
        cannot be helped must be seen, so that what it lacks is kept for it."""
        return self._scope != "off" and not self._owed.cpus and bool(self._left) and self._left[0].priority < priority

    def coming(self, lacks: Need) -> bool:
        """Whether attempts that are being stopped, and whose slots nobody ahead gets, give back as much."""
        return self._coming.gpus >= lacks.gpus and self._coming.cpus >= lacks.cpus

    def make(self, owner: str, priority: int, need: Need, lacks: Need) -> Sequence[Running]:
        """Who to stop for a job that needs ``need`` and finds ``lacks`` of it taken; nobody where that would be in vain."""
        rest = self._take_coming(lacks)
        if rest == NOTHING:
            return ()
        contested = (need.gpus and self._owed.gpus) or (need.cpus and self._owed.cpus)
        victims = () if contested else self._victims(owner, priority, rest)
        if not victims:
            self._owed = self._owed.plus(rest)
            return ()
        for one in victims:
            self._left.remove(one)
            self._coming = self._coming.plus(one.holds)
        self._take_coming(rest)
        return victims

    def _take_coming(self, lacks: Need) -> Need:
        """Keep what comes free for the job; what it still lacks."""
        gpus, cpus = min(self._coming.gpus, lacks.gpus), min(self._coming.cpus, lacks.cpus)
        self._coming = Need(self._coming.gpus - gpus, self._coming.cpus - cpus)
        return Need(lacks.gpus - gpus, lacks.cpus - cpus)

    def _lower(self, owner: str, priority: int) -> Iterator[Running]:
        """Who may be stopped for a job of this owner and priority, the cheapest first."""
        for one in self._left:
            if one.priority >= priority:
                return
            if self._scope == "any" or (self._scope == "owner" and one.owner == owner):
                yield one

    def _victims(self, owner: str, priority: int, rest: Need) -> Sequence[Running]:
        """The cheapest first, until there is room; then those that are not needed after all go on, the dearest first."""
        chosen: list[Running] = []
        for one in self._lower(owner, priority):
            if _covers(chosen, rest):
                break
            if (rest.gpus and one.holds.gpus) or (rest.cpus and one.holds.cpus):
                chosen.append(one)
        if not _covers(chosen, rest):
            return ()
        for one in reversed(chosen[:]):
            others = [c for c in chosen if c is not one]
            if _covers(others, rest):
                chosen = others
        return chosen


def _value(one: Running) -> tuple[int, float, float, str]:
    """Lowest priority, least at risk, newest."""
    return (one.priority, one.at_risk, -one.since.timestamp() if one.since else 0.0, one.job)


def _covers(chosen: Iterable[Running], rest: Need) -> bool:
    free = NOTHING
    for one in chosen:
        free = free.plus(one.holds)
    return free.gpus >= rest.gpus and free.cpus >= rest.cpus
