"""Post-local SGD: torch's bits where torch's parts work together, replicas per rank, and averaging where torch forgets it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support import local_sgd_cases as cases
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import resume_differences
from tests.support.local_sgd_cases import Seen

AVERAGED = {"periodic": [4, 6, 8, 10], "alone": [4, 7, 10], "levels": [5, 9], "at once": [1, 5, 9]}
"""After which steps all ranks are equal again; that torch averages after the same ones is the first test."""
PARTLY = {"levels": [7]}


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("name", list(cases.SPECS))
def test_local_sgd_steps_have_same_bits_as_torch_parts(four_ranks: Ranks, name: str) -> None:
    assert four_ranks.run(cases.differences_from_torch_parts, name) == [{}] * 4


@pytest.mark.parametrize("name", list(cases.SPECS))
def test_replicas_are_equal_exactly_at_steps_given_by_summary(four_ranks: Ranks, name: str) -> None:
    ranks: list[list[Seen]] = four_ranks.run(cases.watch_steps, name)
    start = cases.SPECS[name].start_localSGD_iter
    for step, seen in enumerate(zip(*ranks, strict=True), start=1):
        equal = len({s.weights for s in seen}) == 1
        assert equal == (step <= start or step in AVERAGED[name]), f"step {step}"
        said = seen[0]
        assert said.phase == ("warm-up" if step < start else "local")
        assert (said.iteration, said.averager_step) == (step, step)
        later = [after for after in AVERAGED[name] + PARTLY.get(name, []) if after > step]
        assert not later or said.next_averaging == min(later), f"step {step}"
    pairs = [len({s.weights for s in (a, b)}) for a, b in zip(ranks[0], ranks[1], strict=True)]
    assert (2 in pairs) == (name in ("alone", "levels"))  # with gradients averaged over pairs, pairs stay equal


@pytest.mark.parametrize("name", list(cases.SPECS))
def test_local_sgd_resume_at_any_step_is_bitwise_exact(four_ranks: Ranks, name: str) -> None:
    end = cases.TOTAL - 1
    assert four_ranks.run(resume_differences, cases.case_of(name), end, list(range(end))) == [{}] * 4


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view", "accumulate"])
def test_local_sgd_resume_is_exact_with_ddp_options(four_ranks: Ranks, option: str) -> None:
    changes = {"accumulate": 2} if option == "accumulate" else {"ddp": {option: True}}
    if option == "find_unused_parameters":
        changes["unused"] = True
    assert four_ranks.run(resume_differences, cases.case_of("levels", **changes), 7, [2, 4]) == [{}] * 4


def test_local_sgd_works_in_a_group_of_some_ranks(four_ranks: Ranks) -> None:
    assert four_ranks.run(cases.differences_in_pairs) == [[]] * 4


def test_averaging_begins_with_first_entirely_local_step(four_ranks: Ranks) -> None:
    """Two backward passes a step: torch's averager would leave replicas apart for START / 2 steps more."""
    ranks = four_ranks.run(cases.watch_steps, "periodic", 5, 2)
    said = [(s.phase, s.iteration, s.next_averaging) for s in ranks[0]]
    assert said == [
        ("warm-up", 2, 3),
        ("local", 4, 3),
        ("local", 6, 5),
        ("local", 8, 5),
        ("local", 10, 7),
    ]
    assert [len({s.weights for s in seen}) for seen in zip(*ranks, strict=True)] == [1, 2, 1, 2, 1]


def test_step_skipped_by_grad_scaler_on_one_rank_keeps_ranks_in_sync(four_ranks: Ranks) -> None:
    assert four_ranks.run(cases.train_with_skipped_step) == [(6, 6, True), (5, 6, True), (6, 6, True), (6, 6, True)]


def test_averaging_keeps_parameter_memory_in_place(four_ranks: Ranks) -> None:
    for kept in four_ranks.run(cases.check_memory_kept):
        assert all(kept.values()), kept


def test_mean_over_three_ranks_has_same_bits_as_torch(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(cases.mean_over_three_equals_torch))


def test_mismatched_local_sgd_parameters_are_refused_by_key(four_ranks: Ranks) -> None:
    for said in four_ranks.run(cases.refusal_messages):
        assert [text.split(":")[0] for text in said] == [
            "subgroup_size",
            "period_group_size_dict",
            "state.post_local_gradient_allreduce",
            "state.post_local_gradient_allreduce",
            "state.start_localSGD_iter",
            "state.subgroup",
        ]


def test_subgroups_have_the_timeout_of_the_main_group(four_ranks: Ranks) -> None:
    """torch would give them half an hour: a rank that hangs in a subgroup would cost the others that long."""
    limit, *subgroups = four_ranks.run(cases.group_timeouts)[0]
    assert limit == timedelta(seconds=four_ranks.deadline) and subgroups == [limit, limit]


def test_changed_start_is_compared_with_the_jobs_iteration(four_ranks: Ranks) -> None:
    """torch's own count stands still at the old start: by it, every later start would lie ahead."""
    assert (
        four_ranks.run(cases.resume_with_changed_start, [2, 5, 8])
        == [[("local", 8, False), ("local", 8, True), ("warm-up", 9, True)]] * 4
    )
