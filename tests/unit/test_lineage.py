"""The lineage against the truth, parent pointers, in random histories with kills, zombies and abandoned branches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ratchet_contract.lineage import fork_for_launch, lineage
from ratchet_contract.messages import ForkSource
from ratchet_contract.resume import Base, Segment, holds

Point = tuple[int, int]  # (step, epoch)


@dataclass
class World:
    """A job's history. ``parents`` is the truth: what each checkpoint descends from (None: scratch, or the fork's source)."""

    fork: ForkSource | None = None
    epoch: int = 0
    bases: dict[int, Base] = field(default_factory=dict)
    parents: dict[Point, Point | None] = field(default_factory=dict)
    running: dict[int, Point | None] = field(default_factory=dict)  # newest point of every attempt that may still write
    steps: dict[int, int] = field(default_factory=dict)
    wish: Point | None = None

    def segments(self) -> list[Segment]:
        wish = None if self.wish is None else Base(step=self.wish[0], epoch=self.wish[1])
        return lineage(self.bases, resume_from=wish, fork=self.fork)

    def resumable(self) -> set[Point]:
        segments = self.segments()
        return {p for p in self.parents if holds(segments, *p)}

    def head(self) -> Point | None:
        """The newest resumable checkpoint."""
        return max(self.resumable(), default=None)

    def launch(self) -> None:
        """A new attempt that records its base, as a worker does, and takes an explicit wish with it."""
        start = self.head()
        self.epoch += 1
        root = (
            Base() if self.fork is None else Base(step=self.fork.step, epoch=self.fork.epoch, digest=self.fork.digest)
        )
        self.bases[self.epoch] = root if start is None else Base(step=start[0], epoch=start[1], digest=f"{start}")
        self.running[self.epoch] = start
        self.steps[self.epoch] = self.bases[self.epoch].step
        self.wish = None

    def die_early(self) -> None:
        """An attempt that never got as far as a base."""
        self.epoch += 1

    def commit(self, epoch: int, steps: int) -> None:
        step = self.steps[epoch] + steps
        self.parents[step, epoch] = self.running[epoch]
        self.running[epoch], self.steps[epoch] = (step, epoch), step

    def ancestors(self, point: Point | None) -> set[Point]:
        out = set()
        while point is not None:
            out.add(point)
            point = self.parents[point]
        return out


def fork_source() -> ForkSource:
    return ForkSource(job_root="/elsewhere", step=40, epoch=2, digest="f" * 64)


@pytest.mark.parametrize("fork", [None, fork_source()], ids=["scratch", "fork"])
@pytest.mark.parametrize("seed", range(60))
def test_exactly_the_ancestors_of_the_present_count(seed: int, fork: ForkSource | None) -> None:
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
            epoch = newest if source.random() < 0.7 else source.choice(list(world.running))
            world.commit(epoch, source.randint(1, 9))
        head = world.wish or max((p for p in world.resumable() if p[1] == max(world.bases, default=0)), default=None)
        if head is None and world.bases:
            base = world.bases[max(world.bases)]
            mine = world.fork is None or base.digest != world.fork.digest
            head = (base.step, base.epoch) if base.epoch is not None and mine else None
        assert world.resumable() == world.ancestors(head)


def test_a_zombie_and_the_newest_step_do_not_win() -> None:
    bases = {1: Base(), 2: Base(step=100, epoch=1, digest="d")}
    segments = lineage(bases)
    assert segments == [Segment(epoch=2, after_step=100), Segment(epoch=1, after_step=0, until_step=100)]
    assert not holds(segments, 5000, 1)
    assert holds(segments, 101, 2)


def test_an_explicit_step_leaves_the_branch_above_it() -> None:
    bases = {1: Base(), 2: Base(step=100, epoch=1, digest="d")}
    segments = lineage(bases, resume_from=Base(step=50, epoch=1))
    assert segments == [Segment(epoch=1, after_step=0, until_step=50)]
    assert lineage(bases, resume_from=Base()) == []
    assert lineage({}) == []


def test_a_base_that_was_never_recorded_leaves_only_what_is_certain() -> None:
    segments = lineage({3: Base(step=100, epoch=2, digest="d")})
    assert segments == [Segment(epoch=3, after_step=100), Segment(epoch=2, after_step=99, until_step=100)]


def test_a_base_from_the_future_is_an_error() -> None:
    with pytest.raises(ValueError, match="later than itself"):
        lineage({2: Base(step=10, epoch=2, digest="d")})


def test_a_fork_starts_from_its_source_until_it_has_a_checkpoint_of_its_own() -> None:
    fork = fork_source()
    bases = {1: Base(step=40, epoch=2, digest=fork.digest)}
    segments = lineage(bases, fork=fork)
    assert segments == [Segment(epoch=1, after_step=40)]
    assert fork_for_launch(fork, [], []) == fork
    assert fork_for_launch(fork, segments, []) == fork
    assert fork_for_launch(fork, segments, [(50, 1)]) is None
    assert fork_for_launch(None, segments, []) is None
