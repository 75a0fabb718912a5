"""Walks rows of the exactness matrix in real groups of ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.support.exact_matrix import TOTAL, Row, kills_of
from tests.support.exact_runs import Result, resume_and_compare, run_row, run_undisturbed, train_until_killed
from tests.support.gloo_ranks import RankFailure, Ranks


@dataclass
class Verdict:
    """``problems`` empty: identical, and the run was worth comparing."""

    row: Row
    kills: list[int]
    problems: list[str]
    seconds: float


def run_rows(rows: Sequence[Row], seed: int) -> Iterator[Verdict]:
    """A verdict for each row, ordered by world size, with real kills. The ranks that end a row also begin the next one."""
    for world in range(1, 5):
        with Killable(world) as ranks:
            for row in rows:
                if row["world"] == str(world):
                    yield check_killed_row(ranks, row, seed)


class _PreloadedRanks(Ranks):
    """Ranks that start quickly: a walk through the matrix kills some 500 groups."""

    preload = (*Ranks.preload, "tests.support.exact_runs")


class Killable:
    """A group of ``world`` ranks; ``group`` starts another after each kill, and after a failure."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._ranks: Ranks | None = None

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._ranks is not None:
            self._ranks.close(clean=kind is None and self._ranks.alive)

    @property
    def group(self) -> Ranks:
        if self._ranks is not None and not self._ranks.alive:
            self._ranks.close(clean=False)
            self._ranks = None
        if self._ranks is None:
            self._ranks = _PreloadedRanks(self._world, deadline=240.0)
        return self._ranks

    def kill(self) -> None:
        """SIGKILL to every rank."""
        ranks, self._ranks = self.group, None
        ranks.kill()


def check_killed_row(ranks: Killable, row: Row, seed: int, spoil: str | None = None) -> Verdict:
    """One row with real kills: after each, other processes continue from the files. ``spoil``: as of ``resume_and_compare``."""
    world, (saves, kills) = int(row["world"]), kills_of(row, seed)
    began, source = time.monotonic(), None
    try:
        with tempfile.TemporaryDirectory(prefix="ratchet-row-") as folder:
            undisturbed = f"{folder}/undisturbed"
            ranks.group.run(run_undisturbed, world, row, TOTAL, undisturbed)
            for step in sorted(kills):
                target = f"{folder}/{step}"
                ranks.group.run(train_until_killed, world, row, source, saves, step, target)
                ranks.kill()
                source = target
            assert source is not None
            args = world, row, source, undisturbed, saves, TOTAL, spoil
            results: list[Result] = ranks.group.run(resume_and_compare, *args)
        problems = _problems(row, results)
    except RankFailure as failure:
        problems = [str(failure)]
    return Verdict(row, kills, problems, time.monotonic() - began)


def check_row(ranks: Ranks, row: Row, seed: int) -> Verdict:
    """One row in a group of the right size, which lives on: each interruption only replaces the objects."""
    saves, kills = kills_of(row, seed)
    began = time.monotonic()
    try:
        results: list[Result] = ranks.run(run_row, ranks.world, row, TOTAL, saves, kills)
        problems = _problems(row, results)
    except RankFailure as failure:
        problems = [str(failure)]
    return Verdict(row, kills, problems, time.monotonic() - began)


def _problems(row: Row, results: list[Result]) -> list[str]:
    out = [f"rank {i}: {', '.join(r.different[:5])}" for i, r in enumerate(results) if r.different]
    if len({r.digest for r in results}) > 1:
        out.append("the ranks' replicas differ")
    if not all(r.finite for r in results):
        out.append("weights are not finite: nothing is compared")
    if not all(r.moved for r in results):
        out.append("no weight moved: nothing is compared")
    buckets, dtypes = results[0].buckets, 3 if row["model"] == "dtypes" else 1
    expected = {"one": (dtypes, dtypes), "several": (3, 99), "each": (results[0].parameters, results[0].parameters)}
    low, high = expected[row["buckets"]]
    if not low <= buckets <= high:
        out.append(f"{buckets} buckets")
    return out
