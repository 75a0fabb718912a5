"""The exactness matrix holds what it promises: every pair of levels, every hook that is available, nothing that clashes."""

from __future__ import annotations

from itertools import combinations

from ratchet_hooks.specs.registry import HOOKS
from tests.support.exact_matrix import (
    VARIANTS,
    clash,
    factors,
    hook_labels,
    hook_spec,
    kills_of,
    matrix,
    reduced_matrix,
)
from tests.support.pairwise import Item, cover_single_levels, pairs_of, pairwise, wanted_pairs


def test_pairwise_covers_exactly_the_allowed_pairs() -> None:
    levels = {"a": ["0", "1", "2"], "b": ["0", "1", "2", "3"], "c": ["0", "1"], "d": ["0", "1"]}

    def odd(x: Item, y: Item) -> bool:
        return {x, y} == {("a", "2"), ("b", "3")} or {x, y} == {("c", "1"), ("d", "1")}

    rows = pairwise(levels, odd)
    seen = set().union(*(pairs_of(row) for row in rows))
    assert seen == set(wanted_pairs(levels, odd)) and rows == pairwise(levels, odd)
    assert len(seen) == 3 * 4 + 3 * 2 * 2 + 4 * 2 * 2 + 4 - 2 and len(rows) < 3 * 4 * 2 * 2 / 2
    few = cover_single_levels(rows)
    assert {item for row in few for item in row.items()} == {(f, v) for f, vs in levels.items() for v in vs}
    assert len(few) < len(rows)


def test_the_exactness_matrix_covers_every_pair_of_its_factors() -> None:
    rows, levels = matrix(), factors()
    assert set().union(*(pairs_of(row) for row in rows)) == set(wanted_pairs(levels, clash))
    assert not [row for row in rows if any(clash(a, b) for a, b in combinations(row.items(), 2))]
    assert not [
        (factor, other) for factor in levels for other in ((f, v) for f in levels for v in levels[f])
        if clash((factor, levels[factor][0]), other)
    ]  # fmt: skip
    assert {item for row in reduced_matrix() for item in row.items()} == {
        (f, v) for f, vs in levels.items() for v in vs
    }


def test_the_exactness_matrix_has_every_hook_that_is_available_and_its_wrappers() -> None:
    available = {name for name, entry in HOOKS.items() if entry.available}
    assert {label.partition(":")[0] for label in VARIANTS} >= available
    labels = hook_labels()
    for name in available:
        wrapped = {f"{name}+fp16", f"{name}+bf16"}
        assert name in labels and (wrapped <= set(labels) if HOOKS[name].wrappers else not wrapped & set(labels))
    assert all(hook_spec(label, world).name in available for label in labels for world in (2, 3, 4))


def test_kill_steps_straddle_hook_start_and_are_deterministic_by_seed() -> None:
    row = next(row for row in matrix() if row["compile"] == "no")
    found = [kills_of(row, seed) for seed in range(50)]
    assert found == [kills_of(row, seed) for seed in range(50)] and len({str(f) for f in found}) > 10
    assert all(early < 3 <= late < 7 for _, (early, late) in found)
