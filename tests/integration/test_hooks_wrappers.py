"""Hooks under fp16_compress_wrapper and bf16_compress_wrapper: torch's bits, exact resumes, no overflow that nobody hears of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import hook_laws as laws
from tests.support import wrapped_cases as cases
from tests.support.groups import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, exact_resumes

WRAPPERS = ["fp16", "bf16"]
CONFIGURATIONS = {
    "fp16": Case(cap=MANY_BUCKETS, ddp={"static_graph": True, "gradient_as_bucket_view": True}, keep_grads=True),
    "bf16": Case(cap=MANY_BUCKETS, accumulate=2),
}


def case_of(hook: str, wrapper: str, cap: float = MANY_BUCKETS) -> Case:
    return Case(hook=hook, cap=cap, spec=cases.wrapped(hook, wrapper))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("cap", [ONE_BUCKET, MANY_BUCKETS], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("hook", ["allreduce", "noop", "custom"])
def test_the_bits_are_those_of_torchs_wrapper(three: Ranks, hook: str, cap: float, wrapper: str) -> None:
    assert three.run(laws.equals_stock, case_of(hook, wrapper, cap), 4) == [[], [], []]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_post_local_sgd_in_16_bits_has_the_bits_of_torchs_before_and_after_its_start(
    three: Ranks, wrapper: str
) -> None:
    local = {"start_localSGD_iter": 2, "post_local_gradient_allreduce": False, "model_averaging_period": 2}
    spec = replace(cases.wrapped("post_localSGD", wrapper), **local)
    # torch's averager leaves out parameters without a gradient, and it comes behind zero_grad here
    case = Case(hook="post_localSGD", cap=MANY_BUCKETS, spec=spec, keep_grads=True)
    assert three.run(laws.equals_stock, case, 5) == [[], [], []]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_powersgd_in_16_bits_has_the_bits_of_torchs_where_that_works(three: Ranks, wrapper: str) -> None:
    # One bucket and one thread, as without a wrapper: else torch's own hook crosses its collectives on gloo.
    assert three.run(laws.equals_stock_in_one_thread, case_of("powerSGD", wrapper, ONE_BUCKET), 6) == [[], [], []]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", list(cases.PLAIN))
def test_a_resumed_run_has_the_same_bits(three: Ranks, hook: str, wrapper: str) -> None:
    configuration = CONFIGURATIONS[wrapper]
    case = Case(hook, MANY_BUCKETS, configuration.ddp, configuration.accumulate, spec=cases.wrapped(hook, wrapper))
    assert three.run(exact_resumes, case, 6, [1, 4]) == [{}, {}, {}]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_parameters_of_two_dtypes_are_cast_to_one(three: Ranks, wrapper: str) -> None:
    case = Case("powerSGD", MANY_BUCKETS, mixed=True, spec=cases.wrapped("powerSGD", wrapper))
    assert three.run(exact_resumes, case, 6, [4]) == [{}, {}, {}]


@pytest.mark.parametrize(("wrapper", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_what_is_sent_and_kept_has_16_bits(three: Ranks, wrapper: str, dtype: torch.dtype) -> None:
    elements = 162_710
    for hook, sent in (("allreduce", 2 * elements), ("noop", 0)):
        ((summary, _), *_) = three.run(cases.sizes, case_of(hook, wrapper), 2)
        assert (summary["bytes_before"], summary["bytes_after"]) == (4 * elements, sent)
        assert summary["wrapper"] == f"{wrapper}_compress_wrapper" and summary["memory_bytes"] == 2 * elements
    ((full, _), *_) = three.run(cases.sizes, Case(hook="powerSGD", cap=MANY_BUCKETS), 5)
    ((half, kept), *_) = three.run(cases.sizes, case_of("powerSGD", wrapper), 5)
    assert half["bytes_after"] * 2 == full["bytes_after"] and kept == {dtype}
    assert half["memory_bytes"] == full["memory_bytes"] // 2 + 2 * elements


@pytest.mark.parametrize(("wrapper", "value"), [("fp16", 65520.0), ("bf16", 3.4e38)])
@pytest.mark.parametrize("hook", ["allreduce", "noop", "powerSGD", "post_localSGD"])
def test_overflow_in_the_cast_is_reported_with_parameter_and_step(
    three: Ranks, hook: str, wrapper: str, value: float
) -> None:
    for seen, _ in three.run(cases.large, cases.wrapped(hook, wrapper), value, 4):
        assert (f"{wrapper}-overflow", "wide", 4) in seen and {name for _, name, _ in seen} <= {"wide", "thin"}


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
@pytest.mark.parametrize(("wrapper", "value"), [("fp16", 65504.0), ("fp16", 9000.0), ("bf16", 3e38)])
def test_overflow_behind_the_cast_is_reported_too(three: Ranks, hook: str, wrapper: str, value: float) -> None:
    """Gradients that 16 bits hold, and whose products with Q they do not."""
    for seen, finite in three.run(cases.large, cases.wrapped(hook, wrapper), value, 4):
        assert all(finite[:3]) and seen
        assert {(code, step) for code, _, step in seen} <= {("low-rank-overflow", 4), ("non-finite", 4)}
        assert "wide" in {name for _, name, _ in seen}


def test_ordinary_gradients_are_no_cause_for_a_report(three: Ranks) -> None:
    for hook in ("powerSGD", "batched_powerSGD", "allreduce"):
        assert three.run(cases.large, cases.wrapped(hook, "fp16"), 1.0, 4) == [([], [True] * 4)] * 3


def test_gradients_lie_as_their_parameters_do(three: Ranks) -> None:
    assert all(three.run(cases.channels_last))


def test_a_model_in_float16_is_not_cast_again(three: Ranks) -> None:
    assert three.run(cases.halves, cases.wrapped("allreduce", "fp16")) == [(True, 32)] * 3


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_gradient_that_only_another_rank_has_comes_in_the_parameters_dtype(three: Ranks, wrapper: str) -> None:
    assert three.run(cases.used_by_another_rank, cases.wrapped("allreduce", wrapper)) == [{torch.float32}] * 3
