"""Walks rows of the exactness matrix in real groups of ranks, one group for all rows of a world size."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.support.exact_matrix import TOTAL, Row, kills_of
from tests.support.exact_runs import Result, run_row
from tests.support.gloo_ranks import RankFailure, Ranks


@dataclass
class Verdict:
    """``problems`` empty: identical, and the run was worth comparing."""

    row: Row
    kills: list[int]
    problems: list[str]
    seconds: float


def run_rows(rows: Sequence[Row], seed: int) -> Iterator[Verdict]:
    """A verdict for each row, ordered by world size. A row that breaks its group costs that group only."""
    for world in range(1, 5):
        mine = [row for row in rows if row["world"] == str(world)]
        ranks: Ranks | None = None
        try:
            for row in mine:
                ranks = ranks if ranks is not None and ranks.alive else Ranks(world, deadline=240.0)
                yield check_row(ranks, row, seed)
        finally:
            if ranks is not None:
                ranks.close(clean=ranks.alive)


def check_row(ranks: Ranks, row: Row, seed: int) -> Verdict:
    """One row in a group of the right size."""
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
