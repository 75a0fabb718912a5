"""Law of compression: digits trained under PowerSGD are as accurate as without compression, to half a point over a few seeds.

The figure is a difference of means: of the accuracy on the held-back images under the hook, and under all-reduce with the same
seeds. Rank 4 sends a nineteenth of the gradients' bytes. The task's own batch and number of epochs: with fewer steps PowerSGD is
still behind by about a point, and the sign of the figure then depends on the processor's instruction set. All other hooks:
``make bench ONLY=accuracy``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest

from benchmarks.accuracy import AGAINST, ALLOWED, HOOKS, difference, table
from benchmarks.scripts.accuracy import train
from tests.support.full_matrix import full
from tests.support.gloo_ranks import Ranks

POWERSGD = HOOKS["powerSGD rank 4"]
HALF_THE_STEPS = {"batch_size": 64}
SEEDS = int(os.environ.get("RATCHET_TEST_SEEDS", "0"))
trainings = pytest.mark.skipif(SEEDS == 0, reason="RATCHET_TEST_SEEDS=5 (make exactness) runs it")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """A whole training takes up to a minute where four workers share two cores."""
    with Ranks(2, deadline=300.0) as ranks:
        yield ranks


def accuracy(two: Ranks, hook: dict[str, Any], seeds: int, **task: Any) -> list[float]:
    return [two.run(train, hook, seed, task)[0]["accuracy"] for seed in range(seeds)]


@pytest.fixture(scope="module")
def plain(two_ranks: Ranks) -> list[float]:
    return accuracy(two_ranks, HOOKS[AGAINST], SEEDS)


@trainings
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_powersgd_reaches_uncompressed_accuracy(two_ranks: Ranks, plain: list[float]) -> None:
    assert fmean(plain) >= 97.0, plain
    compressed = accuracy(two_ranks, POWERSGD, SEEDS)
    assert difference(compressed, plain) >= -ALLOWED, (compressed, plain)


@trainings
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_powersgd_without_error_feedback_loses_accuracy(two_ranks: Ranks) -> None:
    plain = accuracy(two_ranks, HOOKS[AGAINST], 1, **HALF_THE_STEPS)
    compressed = accuracy(two_ranks, POWERSGD | {"use_error_feedback": False}, 1, **HALF_THE_STEPS)
    assert difference(compressed, plain) < -ALLOWED, (compressed, plain)


@full
def test_benchmark_table_has_accuracy_loss_and_bytes_sent(capsys: pytest.CaptureFixture[str]) -> None:
    table({name: HOOKS[name] for name in (AGAINST, "fp16_compress")}, 1, ranks=1, steps=2)
    out = capsys.readouterr().out
    figures = r" +[\d.]+ +[\d.]+ \.\. [\d.]+ +[+-]\d+\.\d\d +(?:yes|no) +(\d+)$"
    assert re.findall(rf"^allreduce{figures}", out, re.MULTILINE) == ["753576"]
    assert re.findall(rf"^fp16_compress{figures}", out, re.MULTILINE) == ["376788"]
