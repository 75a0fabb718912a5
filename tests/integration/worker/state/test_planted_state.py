"""Trainings whose next weights depend on state that no ``state_dict`` has, killed in an epoch, killed in an evaluation, and
stopped in one: the bits of an undisturbed run, or the path in the resume report.

A few of ``tests/support/planted_job``; ``python -m tests.support.planted_runs`` (``make exactness``) runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planted_runs import NAMED, OUTSIDE, How, catalogue, run_case

EXACT = [
    "datasets:CachingInList",
    "schedulers:OwnSubclass",
    "tensors:Queue",
]  # `make exactness` runs all (planted_runs)
WAYS = ("epoch", "evaluation", "stop")


@pytest.mark.parametrize("case", EXACT)
def test_planted_hidden_state_resumes_exactly(tmp_path: Path, case: str) -> None:
    found = run_case(tmp_path, case, WAYS)
    assert {way: outcome.kind for way, outcome in found.items()} == dict.fromkeys(WAYS, "exact"), found


def test_unsaveable_planted_state_is_named_and_refused_under_strict(tmp_path: Path) -> None:
    case = "iterators:GeneratorObject"
    (named,) = run_case(tmp_path / "warn", case, ["epoch"]).values()
    assert named.kind == "named" and NAMED[case] in named.reason, named
    (refused,) = run_case(tmp_path / "strict", case, ["epoch"], How(strict=True)).values()
    assert refused.kind == "refused" and NAMED[case] in refused.reason, refused


def test_replay_proof_detects_hidden_state_without_state_discovery(tmp_path: Path) -> None:
    (found,) = run_case(tmp_path, "generators:InDataclass", ["epoch"], How(blind=True)).values()
    assert found.kind == "proved other" and "differs from its first execution" in found.reason, found


def test_planted_case_lists_name_only_existing_cases() -> None:
    assert NAMED.keys() | {*EXACT} | OUTSIDE <= {*catalogue()} and len(catalogue()) >= 60
