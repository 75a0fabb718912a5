"""Which ranks count as slow, by series of reports."""

from __future__ import annotations

import random

from ratchet_service.lifecycle.stragglers import WINDOWS, find_stragglers

Series = dict[str, list[list[float]]]


def steady(*ready: float, windows: int = WINDOWS) -> Series:
    return {str(rank): [[seconds, 0.2]] * windows for rank, seconds in enumerate(ready)}


def test_slow_rank_is_found_with_the_time_that_the_others_wait() -> None:
    (one,) = find_stragglers(steady(0.05, 0.05, 0.15, 0.05), 4)
    assert (one.rank, one.ready, one.others, one.step) == (2, 0.15, 0.05, 0.2)
    assert abs(one.share - 0.5) < 1e-9
    assert one.sentence("gpu7") == (
        "rank 2 on gpu7 is slow: its first gradients are ready 150 ms after the start of a step, those of the others after "
        "50 ms: the others wait for up to 50% of a step"
    )
    assert [one.rank for one in find_stragglers(steady(0.05, 0.2), 2)] == [1]
    assert [one.rank for one in find_stragglers(steady(0.05, 0.2, 0.05, 0.3), 4)] == [1, 3]


def test_both_the_factor_and_the_seconds_are_necessary() -> None:
    assert not find_stragglers(steady(1.0, 1.4), 2)
    assert not find_stragglers(steady(0.005, 0.024), 2)
    assert not find_stragglers(steady(0.1, 0.1, 0.1), 3)


def test_nothing_is_found_before_all_ranks_have_reported_often_enough_or_for_one_rank() -> None:
    assert not find_stragglers(steady(0.05, 0.2, windows=WINDOWS - 1), 2)
    assert not find_stragglers(steady(0.05, 0.2), 3)
    assert not find_stragglers(steady(0.2), 1)
    assert not find_stragglers({}, 2)


def test_one_quick_report_of_the_rank_or_one_slow_one_of_the_others_clears_it() -> None:
    for rank, seconds in (("1", 0.05), ("0", 0.2)):
        series = steady(0.05, 0.2)
        series[rank] = [*series[rank][:2], [seconds, 0.2], *series[rank][3:]]
        assert not find_stragglers(series, 2)


# Milliseconds, as of two equal ranks that share their cores with other processes.
LOADED = (
    (38, 61, 44, 97, 52, 40, 71, 55, 36, 88, 47, 64, 51, 43, 120, 58, 49, 67, 39, 72),
    (45, 40, 83, 51, 66, 94, 39, 48, 77, 42, 59, 38, 105, 62, 46, 41, 85, 53, 70, 44),
)


def test_noise_of_a_loaded_machine_names_nobody() -> None:
    for end in range(WINDOWS, len(LOADED[0]) + 1):
        series = {str(r): [[ms / 1000, 0.2] for ms in line[end - WINDOWS : end]] for r, line in enumerate(LOADED)}
        assert not find_stragglers(series, 2)


def test_drawn_noise_names_nobody_but_a_rank_that_is_slower_by_more() -> None:
    draw = random.Random(3)
    for _ in range(500):
        world = draw.randint(2, 8)
        series: Series = {
            str(rank): [[draw.lognormvariate(-3, 0.5), 0.2] for _ in range(WINDOWS)] for rank in range(world)
        }
        slow = draw.randrange(world)
        assert len(find_stragglers(series, world)) <= 1
        series[str(slow)] = [[1.0 + seconds, 2.0] for seconds, _ in series[str(slow)]]
        assert [one.rank for one in find_stragglers(series, world)] == [slow]
