"""The lineage against the truth, parent pointers, in random histories with kills, zombies and abandoned branches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import ForkSource

Point = tuple[int, int]  # (step, attempt)


@dataclass
class World:
    """A job's history. ``parents`` is the truth: what each checkpoint descends from (None: scratch, or the fork's source)."""

    fork: ForkSource | None = None
    attempt: int = 0
    bases: dict[int, Base] = field(default_factory=dict)
    parents: dict[Point, Point | None] = field(default_factory=dict)
    running: dict[int, Point | None] = field(default_factory=dict)  # newest point of every attempt that may still write
    steps: dict[int, int] = field(default_factory=dict)
    wish: Point | None = None

    def segments(self) -> list[Segment]:
        wish = None if self.wish is None else Base(step=self.wish[0], attempt=self.wish[1])
        return lineage(self.bases, resume_from=wish, fork=self.fork)

    def resumable(self) -> set[Point]:
        segments = self.segments()
        return {p for p in self.parents if lineage_contains(segments, *p)}

    def head(self) -> Point | None:
        """The newest resumable checkpoint."""
        return max(self.resumable(), default=None)

    def launch(self) -> None:
        """A new attempt that records its base, as a worker does, and takes an explicit wish with it."""
        start = self.head()
        self.attempt += 1
        root = (
            Base()
            if self.fork is None
            else Base(step=self.fork.step, attempt=self.fork.attempt, digest=self.fork.digest)
        )
        self.bases[self.attempt] = root if start is None else Base(step=start[0], attempt=start[1], digest=f"{start}")
        self.running[self.attempt] = start
        self.steps[self.attempt] = self.bases[self.attempt].step
        self.wish = None

    def die_early(self) -> None:
        """An attempt that never got as far as a base."""
        self.attempt += 1

    def commit(self, attempt: int, steps: int) -> None:
        step = self.steps[attempt] + steps
        self.parents[step, attempt] = self.running[attempt]
        self.running[attempt], self.steps[attempt] = (step, attempt), step

    def ancestors(self, point: Point | None) -> set[Point]:
        out = set()
        while point is not None:
            out.add(point)
            point = self.parents[point]
        return out


def fork_source() -> ForkSource:
    return ForkSource(job_root="/elsewhere", step=40, attempt=2, digest="f" * 64)


@pytest.mark.parametrize("fork", [None, fork_source()], ids=["scratch", "fork"])
@pytest.mark.parametrize("seed", range(60))
def test_lineage_contains_exactly_the_ancestors_of_current_head(seed: int, fork: ForkSource | None) -> None:
    source = random.Random(seed)
    world = World(fork)
    for _ in range(40):
        move = source.random()
        if move < 0.2:
            world.launch()
        elif move < 0.25:
            world.die_early()
        elif move < 0.35 and world.resumable() and world.wish is None:
            world.wish = source.choice(sorted(world.resumable()))
        elif world.running and world.wish is None:
            # Usually the newest attempt commits; now and then one that has long been given up.
            newest = max(world.running)
            attempt = newest if source.random() < 0.7 else source.choice(list(world.running))
            world.commit(attempt, source.randint(1, 9))
        head = world.wish or max((p for p in world.resumable() if p[1] == max(world.bases, default=0)), default=None)
        if head is None and world.bases:
            base = world.bases[max(world.bases)]
            mine = world.fork is None or base.digest != world.fork.digest
            head = (base.step, base.attempt) if base.attempt is not None and mine else None
        assert world.resumable() == world.ancestors(head)


def test_lineage_excludes_later_steps_of_superseded_attempt() -> None:
    bases = {1: Base(), 2: Base(step=100, attempt=1, digest="d")}
    segments = lineage(bases)
    assert segments == [Segment(attempt=2, after_step=100), Segment(attempt=1, after_step=0, until_step=100)]
    assert not lineage_contains(segments, 5000, 1)
    assert lineage_contains(segments, 101, 2)


def test_lineage_of_explicit_resume_step_drops_later_steps() -> None:
    bases = {1: Base(), 2: Base(step=100, attempt=1, digest="d")}
    segments = lineage(bases, resume_from=Base(step=50, attempt=1))
    assert segments == [Segment(attempt=1, after_step=0, until_step=50)]
    assert lineage(bases, resume_from=Base()) == []
    assert lineage({}) == []


def test_lineage_with_unrecorded_base_keeps_only_certain_segments() -> None:
    segments = lineage({3: Base(step=100, attempt=2, digest="d")})
    assert segments == [Segment(attempt=3, after_step=100), Segment(attempt=2, after_step=99, until_step=100)]


def test_lineage_with_base_later_than_attempt_raises() -> None:
    with pytest.raises(ValueError, match="which is later"):
        lineage({2: Base(step=10, attempt=2, digest="d")})


def test_lineage_of_fork_ends_at_its_source() -> None:
    fork = fork_source()
    bases = {1: Base(step=40, attempt=2, digest=fork.digest)}
    assert lineage(bases, fork=fork) == [Segment(attempt=1, after_step=40)]
