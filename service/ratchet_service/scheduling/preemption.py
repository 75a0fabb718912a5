"""Chooses which attempts are stopped, with a checkpoint, for a waiting job of higher priority: only those that are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from ratchet_service.scheduling.slots import Need

NOTHING = Need(0, 0)
Scope = Literal["owner", "any", "off"]
"""Whose jobs are stopped for one of higher priority: the same owner's, any owner's, none. Submitters set the priority of their
own jobs, so with ``any`` each submitter can have others' jobs stopped."""


@dataclass(frozen=True)
class Running:
    """An attempt that holds slots (``holds``: GPUs and CPU slots). ``stopping``: it is ending already. ``is_protected``: it
    must not be stopped now. ``unsaved_seconds``: training since its last checkpoint."""

    job: str
    attempt: int
    owner: str
    priority: int
    holds: Need
    stopping: bool = False
    is_protected: bool = False
    unsaved_seconds: float = 0.0
    started_at: datetime | None = None


class PreemptionPlanner:
    """Chooses attempts for the caller to stop, in one scheduling pass. Pass the waiting jobs in the order of the queue.
    ``scope``: whose attempts may be stopped."""

    def __init__(self, running: Iterable[Running], scope: Scope) -> None:
        self._scope = scope
        attempts = list(running)
        self._freeing = NOTHING
        for one in attempts:
            if one.stopping:
                self._freeing = self._freeing.plus(one.holds)
        self._owed = NOTHING  # what jobs ahead lack and no attempt can be stopped for
        self._candidates = sorted((a for a in attempts if not a.stopping and not a.is_protected), key=_stop_order)

    def can_help(self, priority: int) -> bool:
        """True if some attempt of any owner might still be stopped for a job of this priority that needs CPU slots."""
        return (
            # owners are not compared: such a job must be examined, too, so that what it lacks is reserved for it
            self._scope != "off"
            and not self._owed.cpus
            and bool(self._candidates)
            and self._candidates[0].priority < priority
        )

    def covers_shortfall(self, shortfall: Need) -> bool:
        """True if the attempts that are being stopped will return ``shortfall``, besides the slots reserved for jobs ahead."""
        return self._freeing.gpus >= shortfall.gpus and self._freeing.cpus >= shortfall.cpus

    def choose_victims(self, owner: str, priority: int, need: Need, shortfall: Need) -> Sequence[Running]:
        """Return the attempts to stop, if any, for a job that needs ``need`` and lacks ``shortfall`` of it. Slots that become
        free are reserved for the job."""
        remaining = self._reserve_freeing(shortfall)
        if remaining == NOTHING:
            return ()
        contested = (need.gpus and self._owed.gpus) or (need.cpus and self._owed.cpus)
        victims = () if contested else self._fewest_victims(owner, priority, remaining)
        if not victims:
            self._owed = self._owed.plus(remaining)
            return ()
        for one in victims:
            self._candidates.remove(one)
            self._freeing = self._freeing.plus(one.holds)
        self._reserve_freeing(remaining)
        return victims

    def _reserve_freeing(self, shortfall: Need) -> Need:
        """Reserve for the job as much of its ``shortfall`` as is becoming free, and return the rest."""
        gpus, cpus = min(self._freeing.gpus, shortfall.gpus), min(self._freeing.cpus, shortfall.cpus)
        self._freeing = Need(self._freeing.gpus - gpus, self._freeing.cpus - cpus)
        return Need(shortfall.gpus - gpus, shortfall.cpus - cpus)

    def _stoppable(self, owner: str, priority: int) -> Iterator[Running]:
        """Yield the attempts that may be stopped for a job of this owner and priority, in the order of ``_stop_order``."""
        for one in self._candidates:
            if one.priority >= priority:
                return
            if self._scope == "any" or (self._scope == "owner" and one.owner == owner):
                yield one

    def _fewest_victims(self, owner: str, priority: int, shortfall: Need) -> Sequence[Running]:
        """Return attempts that together free ``shortfall``, without any that is not needed; none if all together free too
        little."""
        chosen: list[Running] = []
        for one in self._stoppable(owner, priority):
            if _covers(chosen, shortfall):
                break
            if (shortfall.gpus and one.holds.gpus) or (shortfall.cpus and one.holds.cpus):
                chosen.append(one)
        if not _covers(chosen, shortfall):
            return ()
        for one in reversed(chosen[:]):
            others = [c for c in chosen if c is not one]
            if _covers(others, shortfall):
                chosen = others
        return chosen


def _stop_order(one: Running) -> tuple[int, float, float, str]:
    """Sort key of attempts to stop: lowest priority first, then fewest unsaved seconds, then the newest."""
    return (one.priority, one.unsaved_seconds, -one.started_at.timestamp() if one.started_at else 0.0, one.job)


def _covers(chosen: Iterable[Running], shortfall: Need) -> bool:
    """True if the attempts ``chosen`` together hold at least ``shortfall``."""
    free = NOTHING
    for one in chosen:
        free = free.plus(one.holds)
    return free.gpus >= shortfall.gpus and free.cpus >= shortfall.cpus
