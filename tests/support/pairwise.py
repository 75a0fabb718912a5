"""A small table of rows in which every pair of levels of any two factors occurs together.

Greedy and deterministic: each row starts with the first pair that no row has yet and takes, factor by factor, the level that
covers most of what is left. ``clash`` says which two levels exclude each other; for a row to be completed always, each factor's
first level must clash with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Factors = Mapping[str, Sequence[str]]
Item = tuple[str, str]  # factor, level
Clash = Callable[[Item, Item], bool]
Row = dict[str, str]


def wanted_pairs(factors: Factors, clash: Clash) -> list[tuple[Item, Item]]:
    """Every pair of levels of two factors that may occur together."""
    return [
        (a, b)
        for one, other in combinations(factors, 2)
        for a in ((one, level) for level in factors[one])
        for b in ((other, level) for level in factors[other])
        if not clash(a, b)
    ]


def pairs_of(row: Row) -> set[tuple[Item, Item]]:
    """The pairs of levels that a row has together, in the order of its factors."""
    return set(combinations(row.items(), 2))


def pairwise(factors: Factors, clash: Clash) -> list[Row]:
    """Rows that cover ``wanted_pairs``; none holds two levels that clash."""
    # A dictionary keeps the order, so that the same factors always give the same rows.
    left = dict.fromkeys(wanted_pairs(factors, clash))
    rows: list[Row] = []
    while left:
        row = dict(next(iter(left)))
        for factor in factors:
            if factor not in row:
                row[factor] = max(
                    (level for level in factors[factor] if not any(clash((factor, level), i) for i in row.items())),
                    key=lambda level, factor=factor, row=row: _gain(factors, left, row, (factor, level)),  # type: ignore[misc]
                )
        row = {factor: row[factor] for factor in factors}
        rows.append(row)
        for pair in pairs_of(row):
            left.pop(pair, None)
    return rows


def cover_single_levels(rows: Sequence[Row]) -> list[Row]:
    """A few of ``rows``, in their order, in which every level still occurs: greedily those with most levels that are new."""
    missing = {item for row in rows for item in row.items()}
    taken: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(missing & set(rows[i].items())))
        taken.append(best)
        missing -= set(rows[best].items())
    return [rows[i] for i in sorted(taken)]


def _gain(factors: Factors, left: Mapping[tuple[Item, Item], None], row: Row, item: Item) -> int:
    order = list(factors)
    place = order.index(item[0])
    return sum(((item, other) if place < order.index(other[0]) else (other, item)) in left for other in row.items())
