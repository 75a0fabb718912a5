"""Batched PowerSGD is the algorithm of the paper, keeps error feedback's law and comes back bit for bit - on real gloo groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ratchet_hooks.manage.managed_ddp import redistribute
from ratchet_hooks.specs.compatibility import hook_change
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec
from tests.support import hook_properties as laws
from tests.support import low_rank_cases as low_rank
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import MANY_BUCKETS, Case, Run, differences, resume_differences

SPEC = BatchedPowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3)
COLD = BatchedPowerSGDSpec(start_powerSGD_iter=2, warm_start=False, use_error_feedback=False)
CASE = Case(hook="batched_powerSGD", cap=MANY_BUCKETS, spec=SPEC)
SHAPES: list[low_rank.Shape] = [(20, 30), (7,), (11, 3, 5), (40, 40), (1,)]
Array = np.ndarray[Any, np.dtype[np.float64]]


class Reference:
    """The algorithm of the paper (Vogels et al. 2019, algorithms 1 and 2) on the gradients of all ranks of one bucket, in numpy.

    Q stays as it is at the beginning of a step, where torch makes it orthonormal: that leaves P's orthonormal columns the same.
    """

    def __init__(self, length: int, ranks: int, q: Array, feedback: bool) -> None:
        self.side = math.ceil(math.sqrt(length))
        self.length, self.feedback, self.q = length, feedback, q
        self.residuals = [np.zeros((self.side, self.side)) for _ in range(ranks)]

    def step(self, gradients: Sequence[Array]) -> Array:
        matrices = [self._square(g) + e for g, e in zip(gradients, self.residuals, strict=True)]
        p = _gram_schmidt(sum(m @ self.q for m in matrices) / len(matrices))
        self.q = sum(m.T @ p for m in matrices) / len(matrices)
        average: Array = p @ self.q.T
        if self.feedback:
            self.residuals = [m - average for m in matrices]
        return average.reshape(-1)[: self.length]

    def _square(self, gradient: Array) -> Array:
        return np.pad(gradient, (0, self.side**2 - self.length)).reshape(self.side, self.side)


def _gram_schmidt(matrix: Array) -> Array:
    columns: list[Array] = []
    for column in matrix.T:
        rest = column - sum(((c @ column) * c for c in columns), np.zeros_like(column))
        columns.append(rest / np.linalg.norm(rest))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no-feedback"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("rank", [1, 3])
def test_batched_powersgd_matches_numpy_reference_of_the_paper(
    two_ranks: Ranks, feedback: bool, warm: bool, rank: int
) -> None:
    start, steps = 2, 6
    spec = BatchedPowerSGDSpec(
        matrix_approximation_rank=rank, start_powerSGD_iter=start, use_error_feedback=feedback, warm_start=warm
    )
    answers = two_ranks.run(low_rank.train_on_random_gradients, spec, SHAPES, steps, 0.01)
    layout = [[int(name.removeprefix("of.")) for name in bucket] for bucket in answers[0][0]]
    assert len(layout) > 1
    fed = [low_rank.random_gradients(r, SHAPES, steps) for r in range(2)]
    seeds, references, distance = np.random.RandomState(0), {}, 0.0
    for step in range(steps):
        for b, bucket in enumerate(layout):
            flat = [np.concatenate([fed[r][step][i].numpy().reshape(-1) for i in bucket]) for r in range(2)]
            expected = sum(flat) / 2
            if step >= start:
                if b not in references or not warm:
                    q = _drawn(seeds, flat[0].size, rank)
                    known = references.setdefault(b, Reference(flat[0].size, 2, q, feedback))
                    known.q = q
                expected = references[b].step(flat)
                distance = max(distance, float(np.abs(expected - sum(flat) / 2).max()))
            for _, applied, _ in answers:
                found = np.concatenate([applied[step][i].reshape(-1) for i in bucket])
                np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
    assert distance > 0.5  # from the mean: it does compress
    kept = {name.partition("/")[0] for name in answers[0][2]} - {"state"}
    assert kept == ({"residual", "residual_padding"} if feedback else set()) | ({"p", "q"} if warm else set())


def _drawn(seeds: np.random.RandomState, length: int, rank: int) -> Array:
    """The Q that every rank draws for a bucket of ``length`` elements."""
    generator = torch.Generator().manual_seed(seeds.randint(1_000_000_000))
    drawn: Array = torch.randn(math.ceil(math.sqrt(length)), rank, generator=generator, dtype=torch.float64).numpy()
    return drawn


def test_gradient_is_fully_split_into_update_and_residual(two_ranks: Ranks) -> None:
    answers = two_ranks.run(laws.check_residual_law, CASE, 5)
    assert [broken for broken, _, _ in answers] == [[], []]
    assert answers[0][1] == answers[1][1]
    assert answers[0][2] != answers[1][2] and min(norm for _, _, norm in answers) > 0


@pytest.mark.parametrize(
    "case",
    [CASE, Case(hook="batched_powerSGD", cap=MANY_BUCKETS, spec=COLD, ddp={"gradient_as_bucket_view": True})],
    ids=["warm", "cold"],
)
def test_batched_powersgd_resume_is_bitwise_exact(two_ranks: Ranks, case: Case) -> None:
    assert two_ranks.run(resume_differences, case, 8, [2, 3, 6]) == [{}, {}]


def under_idle_parameters(rank: int) -> tuple[list[str], tuple[float, int]]:
    """A run resumed under other parameters that change no bit: what differs, and what the state says of them."""
    whole = Run(rank, CASE)
    whole.train(5)
    saved = whole.save()
    whole.train(8)
    spec = replace(SPEC, min_compression_rate=9.0, compression_stats_logging_frequency=7, random_seed=3)
    assert hook_change("batched_powerSGD", SPEC.values(), spec) is None
    resumed = Run(rank, replace(CASE, spec=spec), saved)
    resumed.train(8)
    state: Any = resumed.hook._algorithm.state  # type: ignore[attr-defined]
    others = [name for name in differences(whole.save(), resumed.save()) if name != "hook.json"]
    return others, (state.min_compression_rate, state.compression_stats_logging_frequency)


def test_resume_accepts_changed_parameters_without_effect(two_ranks: Ranks) -> None:
    assert two_ranks.run(under_idle_parameters) == [([], (9.0, 7))] * 2


def test_resume_without_padding_or_q_factors_is_not_exact(two_ranks: Ranks) -> None:
    for change in ("residual_padding", "q"):
        assert two_ranks.run(low_rank.resumes_identically_without, CASE, 5, 8, change) == [False, False]


def test_residuals_follow_their_parameters_to_other_buckets(two_ranks: Ranks) -> None:
    for kept, zero, fresh in two_ranks.run(low_rank.restore_on_other_buckets, CASE, 5):
        assert kept == 12 and zero and fresh


def test_redistribution_keeps_mean_residual_of_the_padded_square(two_ranks: Ranks) -> None:
    arrays = two_ranks.run(laws.capture_all, CASE, 6)
    tensors, _ = redistribute([({n: torch.from_numpy(a) for n, a in one.items()}, data) for one, data in arrays])
    squares = [name for name in tensors if name.startswith("residual")]
    assert {name.partition("/")[0] for name in squares} == {"residual", "residual_padding"}
    for name in squares:
        mean = np.mean([one[name].astype(np.float64) for one, _ in arrays], axis=0)
        assert np.array_equal(tensors[name].numpy(), mean.astype(np.float32))


def test_summary_counts_bytes_and_elements_sent(two_ranks: Ranks) -> None:
    summary = two_ranks.run(laws.summaries, CASE, [6])[0][0]
    lengths = two_ranks.run(low_rank.bucket_lengths, CASE)[0]
    sent = sum(2 * 2 * math.ceil(math.sqrt(length)) for length in lengths)
    assert (summary["phase"], summary["bytes_after"], summary["elements_after"]) == ("compressing", 4 * sent, 3 * sent)
    assert summary["elements_before"] == 3 * sum(lengths) and summary["compression_rate"] == sum(lengths) / sent
