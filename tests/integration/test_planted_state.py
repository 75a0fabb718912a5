"""Trainings whose next weights depend on state that no ``state_dict`` has, killed in an epoch, killed in an evaluation, and
stopped in one: the bits of an undisturbed run, or the path in the resume report.

A few of ``tests/support/planted_job``; ``python -m tests.support.planted_runs`` (``make exactness``) runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted_runs import NAMED, OUTSIDE, How, catalogue, outcomes

EXACT = [
    "datasets:CachingInList", "generators:InDataclass", "networks:ShapeOfBuffer", "networks:TeacherInObject", "objects:Linked",
    "optimizers:SlowWeights", "schedulers:OwnSubclass", "tensors:Queue",
]  # fmt: skip
WAYS = ("epoch", "evaluation", "stop")


@pytest.mark.parametrize("case", EXACT)
def test_planted_state_is_exact(tmp_path: Path, case: str) -> None:
    found = outcomes(tmp_path, case, WAYS)
    assert {way: outcome.kind for way, outcome in found.items()} == dict.fromkeys(WAYS, "exact"), found


def test_what_cannot_be_saved_is_named_and_refused_under_strict(tmp_path: Path) -> None:
    case = "iterators:GeneratorObject"
    (named,) = outcomes(tmp_path / "warn", case, ["epoch"]).values()
    assert named.kind == "named" and NAMED[case] in named.reason, named
    (refused,) = outcomes(tmp_path / "strict", case, ["epoch"], How(strict=True)).values()
    assert refused.kind == "refused" and NAMED[case] in refused.reason, refused


def test_without_the_walk_the_replay_proof_finds_the_difference(tmp_path: Path) -> None:
    (found,) = outcomes(tmp_path, "generators:InDataclass", ["epoch"], How(blind=True)).values()
    assert found.kind == "proved other" and "differs from the first time" in found.reason, found


def test_every_case_that_is_not_exact_is_a_case() -> None:
    assert NAMED.keys() | {*EXACT} | OUTSIDE <= {*catalogue()} and len(catalogue()) >= 60
