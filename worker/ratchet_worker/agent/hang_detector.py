"""Hang detection: compares the ranks' progress with the spec's deadlines, or with deadlines learned from the job's pace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from ratchet_contract.protocol.timing import MIN_OBSERVATIONS, SETTLED_SECONDS, Deadlines, Pace, learned_deadline
from ratchet_worker.ipc.progress_counter import Reading, Stage

_LEARNED: Final = (Stage.TRAINING, Stage.EVALUATING, Stage.CHECKPOINTING)


class Learner:
    """Learns the deadlines of one node's ranks from their progress. ``earlier_pace``: the pace of earlier attempts; None without
    one."""

    def __init__(self, deadlines: Deadlines, earlier_pace: Pace | None = None) -> None:
        self.deadlines = deadlines
        earlier = earlier_pace.silences if earlier_pace is not None else {}
        self._longest_silences = {stage: earlier.get(stage.name.lower(), 0.0) for stage in _LEARNED}
        self._own_silences: dict[Stage, float] = {}
        self._silence_counts: dict[Stage, Counter[int]] = {
            stage: Counter() for stage in _LEARNED
        }  # per rank, since all ranks are silent at the same time
        self._visits: dict[tuple[int, Stage], int] = {}
        self._startup: float | None = None
        self._trained_since: float | None = None
        self._trained = 0.0  # up to the last progress: a silence that has not ended yet does not count as training

    def record_startup(self, seconds: float, now: float) -> None:
        """Record that all ranks have finished start-up, ``seconds`` after their start. Training time is counted from ``now``
        on."""
        self._startup = max(self._startup or 0.0, seconds)
        self._trained_since, self._trained = now, 0.0

    def record_stage_entry(self, rank: int, stage: Stage) -> None:
        """Record that ``rank`` has entered ``stage``. Silences of a rank's first visit to a stage are not learned from, except
        in training."""
        self._visits[rank, stage] = self._visits.get((rank, stage), 0) + 1

    def record_progress(self, rank: int, stage: Stage, silence: float, now: float) -> None:
        """Record that ``rank`` makes progress after ``silence`` seconds in ``stage``. A silence beyond the deadline is not
        learned from."""
        first = stage is not Stage.TRAINING and self._visits.get((rank, stage), 0) < 2
        # a rank beyond it was left running only because ranks that it may have waited for made progress
        usual = silence <= self.deadline(stage)
        if self._trained_since is not None:
            self._trained = max(self._trained, now - self._trained_since)
        if stage not in self._silence_counts or first or not usual:
            return
        self._silence_counts[stage][rank] += 1
        self._own_silences[stage] = max(self._own_silences.get(stage, 0.0), silence)
        self._longest_silences[stage] = max(self._longest_silences[stage], silence)

    def deadline(self, stage: Stage) -> float:
        """Return the seconds that a rank may be silent in ``stage`` after start-up: the learned time, or else
        ``deadlines.step``."""
        ceiling, settled = self.deadlines.step, self._trained >= SETTLED_SECONDS
        seen = max(self._silence_counts[stage].values(), default=0) if stage in self._silence_counts else 0
        if not self.deadlines.learns or not settled or seen < MIN_OBSERVATIONS:
            return ceiling
        return learned_deadline(self._longest_silences[stage], ceiling)

    def describe_deadline(self, stage: Stage) -> str:
        """A description, for messages, of the deadline of ``stage`` and its origin."""
        seconds = self.deadline(stage)
        if seconds < self.deadlines.step:
            longest = self._longest_silences[stage]
            return f"step_deadline ({seconds:.3g} s; the longest pause so far was {longest:.2g} s)"
        return f"step_deadline ({seconds:g} s)"

    def pace(self, *, hung: bool) -> Pace | None:
        """Return the pace of this attempt, None if there is nothing to report. ``hung``: ranks have hung."""
        if self._startup is None and not self._own_silences and not hung:
            return None
        silences = {stage.name.lower(): round(seconds, 3) for stage, seconds in self._own_silences.items()}
        startup = None if self._startup is None else round(self._startup, 3)
        return Pace(startup=startup, silences=silences, hung=hung)


_NO_READING: Final = Reading(0, 0, 0, Stage.STARTUP)
_SILENCE_SECONDS: Final = 5.0  # seconds without progress on this node before the counters of other nodes are read
_POLLS_PER_SECOND: Final = 50.0  # counters of other nodes that are read per second
_PAUSE_SECONDS: Final = 5.0  # seconds; a longer pause between two polls means that this process did not run either


class Stuck(NamedTuple):
    """Ranks that make no progress, the longest silent one first. ``halted``: whether a signal or a debugger has stopped them.
    ``since``: time of the last progress of the first rank, in monotonic seconds."""

    ranks: tuple[int, ...]
    message: str
    halted: bool
    since: float


class Watch:
    """Watches the step counters of one node's ranks. ``ready``: all ranks have finished start-up; False again when a script makes
    its Session late. Times are monotonic seconds."""

    def __init__(
        self,
        readers: Mapping[int, Callable[[], Reading | None]],
        learner: Learner,
        *,
        now: float,
        hint: str = "",
        other_readers: Mapping[int, Callable[[], Reading | None]] | None = None,
    ) -> None:
        """``readers``: by rank of this node, the function that reads its counter. ``other_readers``: the same for other nodes,
        whose progress excuses silent ranks here. ``hint``: appended to messages about start-up."""
        self._other_readers = dict(other_readers or {})
        self._other_readings: dict[int, tuple[Reading, float]] = {}  # last reading, and time of the last progress
        self._others_polled_at = now
        self._readers = readers
        self._learner = learner
        self._startup_deadline = learner.deadlines.startup
        self._waited_ranks: set[int] = set()  # ranks that have waited for a rank behind them since their last progress
        self._hint = hint
        self._started_at = now
        self._polled_at = now
        self._readings = dict.fromkeys(readers, _NO_READING)
        self._progress_at = dict.fromkeys(readers, now)
        self._excused_at = dict(self._progress_at)  # when it was last seen to wait for a rank that makes progress
        self.ready = False

    def begin(self, now: float) -> None:
        """Start the ranks' deadlines at ``now``, when the ranks are started."""
        self._started_at = self._polled_at = now
        self._progress_at = dict.fromkeys(self._progress_at, now)
        self._excused_at = dict(self._progress_at)

    def poll(self, now: float) -> None:
        """Read the counters and update the ranks' progress. A long pause between two polls does not count as silence."""
        gap = now - self._polled_at
        self._polled_at = now
        if gap > _PAUSE_SECONDS:  # the agent was stopped together with the ranks: do not count that time
            self._started_at += gap
            self._progress_at = {rank: moved + gap for rank, moved in self._progress_at.items()}
            self._excused_at = {rank: at + gap for rank, at in self._excused_at.items()}
        moved: dict[int, Reading] = {}
        for rank, read in self._readers.items():
            reading = read()
            if reading is not None and reading != self._readings[rank]:
                moved[rank] = reading
        places = [self._position(rank) for rank in moved]  # before this progress
        for rank, reading in moved.items():
            self._record_progress(rank, reading, now)
        self._excuse(places + self._poll_others(now), moved, now)
        if not self.ready and all(_is_ready(r) for r in self._readings.values()):
            self.ready = True
            self._progress_at = dict.fromkeys(self._progress_at, now)
            self._excused_at = dict(self._progress_at)
            if not any(self._is_unmanaged(rank) for rank in self._readings):
                self._learner.record_startup(now - self._started_at, now)

    def _record_progress(self, rank: int, reading: Reading, now: float) -> None:
        """Record a new ``reading`` of ``rank``'s counter; the learner may learn from the silence before it."""
        before = self._readings[rank]
        if before.stage is Stage.UNMANAGED and reading.stage is not Stage.UNMANAGED:
            self.ready, self._started_at = False, now  # the script makes a Session after all: its start-up begins now
        if self.ready and rank not in self._waited_ranks:
            self._learner.record_progress(rank, before.stage, now - self._progress_at[rank], now)
        if reading.stage is not before.stage:
            self._learner.record_stage_entry(rank, reading.stage)
        self._waited_ranks.discard(rank)
        self._readings[rank] = reading
        self._progress_at[rank] = now

    def _excuse(self, places: list[tuple[int, int]], moved: Mapping[int, Reading], now: float) -> None:
        """Restart the deadline of each silent rank of this node that may wait for a rank that makes progress. ``places``:
        positions of the ranks that make progress, before this progress. ``moved``: the new readings of this node's ranks."""
        if not places:
            return
        least = min(places)
        for rank in self._readings:
            if rank not in moved and least <= self._position(rank):
                self._excused_at[rank] = now
                if least < self._position(rank):
                    self._waited_ranks.add(rank)

    def _poll_others(self, now: float) -> list[tuple[int, int]]:
        """Return the former positions of other nodes' ranks that have made progress. Polled seldom, since many machines may share
        the disk."""
        still = now - min(self._progress_at.values(), default=now)
        if still < min(_SILENCE_SECONDS, self._learner.deadlines.step / 2) or now - self._others_polled_at < max(
            1.0, len(self._other_readers) / _POLLS_PER_SECOND
        ):
            return []
        self._others_polled_at, places = now, []
        for rank, read in self._other_readers.items():
            reading, known = read(), self._other_readings.get(rank)
            if reading is not None and (known is None or known[0] != reading):
                self._other_readings[rank] = reading, -math.inf if known is None else now
                places += [(known[0].started, known[0].finished)] if known is not None else []
        return places

    def last_step(self, rank: int) -> int:
        """Return the number, counted over all attempts, of the last step that ``rank`` finished in this attempt; 0 for none."""
        return self._readings[rank].finished

    def has_progressed_since(self, when: float) -> bool:
        """True if a rank here, or a polled one of another node, has progressed since ``when``, or a rank here has no Session."""
        here = any(moved > when or self._is_unmanaged(rank) for rank, moved in self._progress_at.items())
        return here or any(moved > when for _, moved in self._other_readings.values())

    def _is_unmanaged(self, rank: int) -> bool:
        """True if the rank's script has no Session, as far as its counter shows."""
        return self._readings[rank].stage is Stage.UNMANAGED

    def find_stuck(self, live: Iterable[int], is_halted: Callable[[int], bool], now: float) -> Stuck | None:
        """Return the stuck ranks among ``live`` if any of them has missed its deadline, else None. The stuck ranks are all
        halted ones; if none is halted, they are the furthest behind of those that missed their deadline. Unmanaged ranks do
        not count."""
        live = sorted(rank for rank in live if not self._is_unmanaged(rank))
        if not self.ready:
            late = [r for r in live if not _is_ready(self._readings[r])]
            if not late or now - self._started_at <= self._startup_deadline:
                return None
            limit = (
                f"has not finished its first step within startup_deadline ({self._startup_deadline:g} s){self._hint}"
            )
        else:
            late = self._overdue(live, now)
            if not late:
                return None
            stage = self._readings[self._furthest_behind(late)[0]].stage
            limit = f"has made no progress within {self._learner.describe_deadline(stage)}"
        halted = tuple(r for r in live if is_halted(r))
        guilty = halted or self._furthest_behind(late)
        since = min(self._progress_at[rank] for rank in guilty)
        guilty = tuple(sorted(guilty, key=lambda rank: (self._progress_at[rank], rank)))
        return Stuck(guilty, self._describe_stuck(guilty, halted, limit, now), bool(halted), since)

    def _overdue(self, live: list[int], now: float) -> list[int]:
        """The ranks of ``live`` that have been silent beyond their stage's deadline and do not merely wait for another rank."""
        return [
            r
            for r in live
            if now - max(self._progress_at[r], self._excused_at[r]) > self._learner.deadline(self._readings[r].stage)
        ]

    def _position(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the last step that ``rank`` has started, and of the last that it has finished."""
        return self._readings[rank].started, self._readings[rank].finished

    def _furthest_behind(self, late: list[int]) -> tuple[int, ...]:
        """Return the ranks of ``late`` whose ``_position`` is least; the others may wait for them in a collective."""
        least = min(self._position(r) for r in late)
        return tuple(r for r in late if self._position(r) == least)

    def _describe_stuck(self, guilty: tuple[int, ...], halted: tuple[int, ...], limit: str, now: float) -> str:
        """Return the message about the stuck ranks: stage, step and silence of each, then ``limit``, the text on the deadline."""
        parts = []
        for rank in guilty:
            reading = self._readings[rank]
            how = "stopped by a signal (SIGSTOP), " if rank in halted else ""
            where = f"in step {reading.started}" if reading.started > reading.finished else f"after {reading.finished}"
            silence = f"silent for {now - self._progress_at[rank]:.0f} s"
            parts.append(f"rank {rank} ({how}{reading.stage.name.lower()}, {where}, {silence})")
        return f"{', '.join(parts)} {limit}"


def _is_ready(reading: Reading) -> bool:
    """True if start-up is over: a step is finished, or the stage is neither start-up nor training."""
    return reading.finished > 0 or reading.stage not in (Stage.STARTUP, Stage.TRAINING)
