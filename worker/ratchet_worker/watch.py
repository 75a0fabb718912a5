"""Progress of the ranks, as their step counters tell it, against the deadlines of the spec, or those learned from the job's pace.

No deadline holds for a rank in stage ``UNMANAGED``: its script has no Session, and nothing tells whether it gets on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from ratchet_worker.counter import Reading, Stage
from ratchet_worker.pace import Learner

_NOTHING: Final = Reading(0, 0, 0, Stage.STARTUP)
_STILL: Final = 5.0  # seconds without progress here, then one looks elsewhere
_LOOKS: Final = 50.0  # counters per second
_GAP: Final = 5.0  # seconds; a longer pause between two looks means that this process did not run either


class Stuck(NamedTuple):
    """Ranks that stand still while the others wait for them, the one that has for longest first, and a sentence. ``halted``: a
    signal has stopped them, so it is they that others wait for, on whatever node; ``since``: when they last moved."""

    ranks: tuple[int, ...]
    message: str
    halted: bool
    since: float


class Watch:
    """Times are seconds of one monotonic clock, handed in by the caller."""

    def __init__(
        self,
        readers: Mapping[int, Callable[[], Reading | None]],
        learner: Learner,
        *,
        now: float,
        hint: str = "",
        others: Mapping[int, Callable[[], Reading | None]] | None = None,
    ) -> None:
        """``hint``: what is added to the sentence about a start-up that takes too long. ``others``: ranks of other nodes, as far
        as their counters can be seen from here: those that move may be waited for, and nothing else is concluded from them."""
        self._others = dict(others or {})
        self._elsewhere: dict[int, tuple[Reading, float]] = {}  # and when it moved
        self._asked = now
        self._readers = readers
        self._learner = learner
        self._startup_deadline = learner.deadlines.startup
        self._waited: set[int] = set()  # ranks that had to wait for one behind them since they last moved
        self._hint = hint
        self._begun = now
        self._looked = now
        self._readings = dict.fromkeys(readers, _NOTHING)
        self._moved = dict.fromkeys(readers, now)
        self._excused = dict(self._moved)  # when it was last seen to wait for a rank that gets on
        self.ready = False

    def begin(self, now: float) -> None:
        """Ranks are started now: their deadline counts from here."""
        self._begun = self._looked = now
        self._moved = dict.fromkeys(self._moved, now)
        self._excused = dict(self._moved)

    def look(self, now: float) -> None:
        """Read all counters."""
        gap = now - self._looked
        self._looked = now
        if gap > _GAP:  # stopped together with the ranks: that time is nobody's fault
            self._begun += gap
            self._moved = {rank: moved + gap for rank, moved in self._moved.items()}
            self._excused = {rank: at + gap for rank, at in self._excused.items()}
        moved: dict[int, Reading] = {}
        for rank, read in self._readers.items():
            reading = read()
            if reading is not None and reading != self._readings[rank]:
                moved[rank] = reading
        places = [self._place(rank) for rank in moved]  # where they were until now
        for rank, reading in moved.items():
            self._move(rank, reading, now)
        self._excuse(places + self._look_elsewhere(now), moved, now)
        if not self.ready and all(_is_ready(r) for r in self._readings.values()):
            self.ready = True
            self._moved = dict.fromkeys(self._moved, now)
            self._excused = dict(self._moved)
            if not any(self._unmanaged(rank) for rank in self._readings):
                self._learner.started(now - self._begun, now)

    def _move(self, rank: int, reading: Reading, now: float) -> None:
        before = self._readings[rank]
        if before.stage is Stage.UNMANAGED and reading.stage is not Stage.UNMANAGED:
            self.ready, self._begun = False, now  # a Session after all: its start-up begins here
        if self.ready and rank not in self._waited:
            self._learner.heard(rank, before.stage, now - self._moved[rank], now)
        if reading.stage is not before.stage:
            self._learner.enters(rank, reading.stage)
        self._waited.discard(rank)
        self._readings[rank] = reading
        self._moved[rank] = now

    def _excuse(self, places: list[tuple[int, int]], moved: Mapping[int, Reading], now: float) -> None:
        """Who stands still may wait for a rank that was no further and gets on, such as rank 0 when it evaluates alone or writes
        a manifest: its deadline counts from there. If that one was behind, how long says nothing of its own pace."""
        if not places:
            return
        least = min(places)
        for rank in self._readings:
            if rank not in moved and least <= self._place(rank):
                self._excused[rank] = now
                if least < self._place(rank):
                    self._waited.add(rank)

    def _look_elsewhere(self, now: float) -> list[tuple[int, int]]:
        """Where ranks of other nodes were that have moved since the last look. Not while all ranks of this node get on, and the
        more there are, the less often: it may be a disk of many machines."""
        still = now - min(self._moved.values(), default=now)
        if still < min(_STILL, self._learner.deadlines.step / 2) or now - self._asked < max(
            1.0, len(self._others) / _LOOKS
        ):
            return []
        self._asked, places = now, []
        for rank, read in self._others.items():
            reading, known = read(), self._elsewhere.get(rank)
            if reading is not None and (known is None or known[0] != reading):
                self._elsewhere[rank] = reading, -math.inf if known is None else now
                places += [(known[0].started, known[0].finished)] if known is not None else []
        return places

    def last_step(self, rank: int) -> int:
        """The last step this rank finished in this attempt; 0 before the first."""
        return self._readings[rank].finished

    def moved_since(self, when: float) -> bool:
        """Has any rank made progress? Of a script without a Session that cannot be denied."""
        here = any(moved > when or self._unmanaged(rank) for rank, moved in self._moved.items())
        return here or any(moved > when for _, moved in self._elsewhere.values())

    def _unmanaged(self, rank: int) -> bool:
        return self._readings[rank].stage is Stage.UNMANAGED

    def stuck(self, live: Iterable[int], stopped: Callable[[int], bool], now: float) -> Stuck | None:
        """Who of ``live`` missed the deadline; ``stopped(rank)`` tells whether its process is halted by a signal."""
        live = sorted(rank for rank in live if not self._unmanaged(rank))
        if not self.ready:
            late = [r for r in live if not _is_ready(self._readings[r])]
            if not late or now - self._begun <= self._startup_deadline:
                return None
            limit = (
                f"has not finished its first step within startup_deadline ({self._startup_deadline:g} s){self._hint}"
            )
        else:
            late = self._overdue(live, now)
            if not late:
                return None
            stage = self._readings[self._behind(late)[0]].stage
            limit = f"has made no progress within {self._learner.why(stage)}"
        halted = tuple(r for r in live if stopped(r))
        guilty = halted or self._behind(late)
        since = min(self._moved[rank] for rank in guilty)
        guilty = tuple(sorted(guilty, key=lambda rank: (self._moved[rank], rank)))
        return Stuck(guilty, self._sentence(guilty, halted, limit, now), bool(halted), since)

    def _overdue(self, live: list[int], now: float) -> list[int]:
        """Ranks that stand still and do not merely wait."""
        return [
            r
            for r in live
            if now - max(self._moved[r], self._excused[r]) > self._learner.deadline(self._readings[r].stage)
        ]

    def _place(self, rank: int) -> tuple[int, int]:
        return self._readings[rank].started, self._readings[rank].finished

    def _behind(self, late: list[int]) -> tuple[int, ...]:
        """Those with the fewest steps: the others wait for them in a collective. All, when none is behind."""
        least = min(self._place(r) for r in late)
        return tuple(r for r in late if self._place(r) == least)

    def _sentence(self, guilty: tuple[int, ...], halted: tuple[int, ...], limit: str, now: float) -> str:
        parts = []
        for rank in guilty:
            reading = self._readings[rank]
            how = "stopped by a signal (SIGSTOP), " if rank in halted else ""
            where = f"in step {reading.started}" if reading.started > reading.finished else f"after {reading.finished}"
            still = f"still for {now - self._moved[rank]:.0f} s"
            parts.append(f"rank {rank} ({how}{reading.stage.name.lower()}, {where}, {still})")
        return f"{', '.join(parts)} {limit}"


def _is_ready(reading: Reading) -> bool:
    """Start-up is over with the first finished step, or when there is none to do."""
    return reading.finished > 0 or reading.stage not in (Stage.STARTUP, Stage.TRAINING)
