"""Post-local SGD: torch's bits where torch's parts work together, replicas per rank, and averaging where torch forgets it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.support import local_sgd_cases as cases
from tests.support.groups import Ranks
from tests.support.hook_cases import exact_resumes
from tests.support.local_sgd_cases import Seen

AVERAGED = {"periodic": [4, 6, 8, 10], "alone": [4, 7, 10], "levels": [5, 9], "at once": [1, 5, 9]}
"""After which steps all ranks are equal again; that torch averages after the same ones is the first test."""
PARTLY = {"levels": [7]}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("name", list(cases.SPECS))
def test_every_step_has_the_bits_of_torchs_hook_averager_and_optimizer(four: Ranks, name: str) -> None:
    assert four.run(cases.equals_hand_written, name) == [{}] * 4


@pytest.mark.parametrize("name", list(cases.SPECS))
def test_replicas_are_equal_exactly_where_the_summary_says(four: Ranks, name: str) -> None:
    ranks: list[list[Seen]] = four.run(cases.watch_steps, name)
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
def test_resumed_anywhere_it_ends_in_the_same_bits_on_every_rank(four: Ranks, name: str) -> None:
    end = cases.TOTAL - 1
    assert four.run(exact_resumes, cases.case_of(name), end, list(range(end))) == [{}] * 4


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view", "accumulate"])
def test_ddp_options_are_exact_too(four: Ranks, option: str) -> None:
    changes = {"accumulate": 2} if option == "accumulate" else {"ddp": {option: True}}
    if option == "find_unused_parameters":
        changes["unused"] = True
    assert four.run(exact_resumes, cases.case_of("levels", **changes), 7, [2, 4]) == [{}] * 4


def test_in_a_group_of_some_of_the_ranks(four: Ranks) -> None:
    assert four.run(cases.in_pairs) == [[]] * 4


def test_averaging_begins_with_the_first_step_that_is_local_as_a_whole(four: Ranks) -> None:
    """Two backward passes a step: torch's averager would leave replicas apart for START / 2 steps more."""
    ranks = four.run(cases.watch_steps, "periodic", 5, 2)
    said = [(s.phase, s.iteration, s.next_averaging) for s in ranks[0]]
    assert said == [
        ("warm-up", 2, 3),
        ("local", 4, 3),
        ("local", 6, 5),
        ("local", 8, 5),
        ("local", 10, 7),
    ]
    assert [len({s.weights for s in seen}) for seen in zip(*ranks, strict=True)] == [1, 2, 1, 2, 1]


def test_a_step_that_a_scaler_skips_on_one_rank_keeps_the_ranks_together(four: Ranks) -> None:
    assert four.run(cases.skipped_by_a_scaler) == [(6, 6, True), (5, 6, True), (6, 6, True), (6, 6, True)]


def test_averaging_leaves_parameters_where_they_lie(four: Ranks) -> None:
    for kept in four.run(cases.memory_is_kept):
        assert all(kept.values()), kept


def test_the_mean_of_three_is_torchs(four: Ranks) -> None:
    assert all(four.run(cases.mean_of_three))


def test_what_does_not_fit_the_ranks_or_the_record_is_refused_by_name(four: Ranks) -> None:
    for said in four.run(cases.refusals):
        assert [text.split(":")[0] for text in said] == [
            "subgroup_size",
            "period_group_size_dict",
            "state.post_local_gradient_allreduce",
            "state.post_local_gradient_allreduce",
            "state.start_localSGD_iter",
            "state.subgroup",
        ]


def test_subgroups_give_up_when_the_main_group_does(four: Ranks) -> None:
    """torch would give them half an hour: a rank that hangs in a subgroup would cost the others that long."""
    limit, *subgroups = four.run(cases.timeouts)[0]
    assert limit == timedelta(seconds=four.deadline) and subgroups == [limit, limit]


def test_another_start_is_compared_with_the_jobs_iteration(four: Ranks) -> None:
    """torch's own count stands still at the old start: by it, every later start would lie ahead."""
    assert four.run(cases.carried, [2, 5, 8]) == [[("local", 8, False), ("local", 8, True), ("warm-up", 9, True)]] * 4
