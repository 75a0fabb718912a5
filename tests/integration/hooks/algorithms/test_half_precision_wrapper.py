"""Hooks under fp16_compress_wrapper and bf16_compress_wrapper: torch's bits, exact resumes, every overflow is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import half_precision_wrapper_cases as cases
from tests.support import hook_properties as laws
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, resume_differences

WRAPPERS = ["fp16", "bf16"]
CONFIGURATIONS = {
    "fp16": Case(cap=MANY_BUCKETS, ddp={"static_graph": True, "gradient_as_bucket_view": True}, keep_grads=True),
    "bf16": Case(cap=MANY_BUCKETS, accumulate=2),
}


def case_of(hook: str, wrapper: str, cap: float = MANY_BUCKETS) -> Case:
    return Case(hook=hook, cap=cap, spec=cases.wrapped_spec(hook, wrapper))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("cap", [ONE_BUCKET, MANY_BUCKETS], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("hook", ["allreduce", "noop", "custom"])
def test_wrapped_hook_has_same_bits_as_torch_wrapper(three_ranks: Ranks, hook: str, cap: float, wrapper: str) -> None:
    assert three_ranks.run(laws.differences_from_torch, case_of(hook, wrapper, cap), 4) == [[], [], []]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_post_local_sgd_has_same_bits_as_torch(three_ranks: Ranks, wrapper: str) -> None:
    local = {"start_localSGD_iter": 2, "post_local_gradient_allreduce": False, "model_averaging_period": 2}
    spec = replace(cases.wrapped_spec("post_localSGD", wrapper), **local)
    # torch's averager leaves out parameters without a gradient, and it comes behind zero_grad here
    case = Case(hook="post_localSGD", cap=MANY_BUCKETS, spec=spec, keep_grads=True)
    assert three_ranks.run(laws.differences_from_torch, case, 5) == [[], [], []]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_powersgd_has_same_bits_as_torch_with_one_bucket(three_ranks: Ranks, wrapper: str) -> None:
    # One bucket and one thread, as without a wrapper: else torch's own hook crosses its collectives on gloo.
    assert three_ranks.run(laws.differences_from_torch_in_one_thread, case_of("powerSGD", wrapper, ONE_BUCKET), 6) == [
        [],
        [],
        [],
    ]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", list(cases.PLAIN))
def test_wrapped_hook_resume_is_bitwise_exact(three_ranks: Ranks, hook: str, wrapper: str) -> None:
    configuration = CONFIGURATIONS[wrapper]
    case = Case(hook, MANY_BUCKETS, configuration.ddp, configuration.accumulate, spec=cases.wrapped_spec(hook, wrapper))
    assert three_ranks.run(resume_differences, case, 6, [1, 4]) == [{}, {}, {}]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_powersgd_resumes_exactly_with_two_parameter_dtypes(three_ranks: Ranks, wrapper: str) -> None:
    case = Case("powerSGD", MANY_BUCKETS, mixed=True, spec=cases.wrapped_spec("powerSGD", wrapper))
    assert three_ranks.run(resume_differences, case, 6, [4]) == [{}, {}, {}]


@pytest.mark.parametrize(("wrapper", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_wrapper_sends_and_stores_16_bit_elements(three_ranks: Ranks, wrapper: str, dtype: torch.dtype) -> None:
    elements = 162_710
    for hook, sent in (("allreduce", 2 * elements), ("noop", 0)):
        ((summary, _), *_) = three_ranks.run(cases.summary_and_dtypes, case_of(hook, wrapper), 2)
        assert (summary["bytes_before"], summary["bytes_after"]) == (4 * elements, sent)
        assert summary["wrapper"] == f"{wrapper}_compress_wrapper" and summary["memory_bytes"] == 2 * elements
    ((full, _), *_) = three_ranks.run(cases.summary_and_dtypes, Case(hook="powerSGD", cap=MANY_BUCKETS), 5)
    ((half, kept), *_) = three_ranks.run(cases.summary_and_dtypes, case_of("powerSGD", wrapper), 5)
    assert half["bytes_after"] * 2 == full["bytes_after"] and kept == {dtype}
    assert half["memory_bytes"] == full["memory_bytes"] // 2 + 2 * elements


@pytest.mark.parametrize(("wrapper", "value"), [("fp16", 65520.0), ("bf16", 3.4e38)])
@pytest.mark.parametrize("hook", ["allreduce", "noop", "powerSGD", "post_localSGD"])
def test_cast_overflow_is_reported_with_parameter_and_step(
    three_ranks: Ranks, hook: str, wrapper: str, value: float
) -> None:
    for seen, _ in three_ranks.run(cases.collect_overflows, cases.wrapped_spec(hook, wrapper), value, 4):
        assert (f"{wrapper}-overflow", "wide", 4) in seen and {name for _, name, _ in seen} <= {"wide", "thin"}


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
@pytest.mark.parametrize(("wrapper", "value"), [("fp16", 65504.0), ("fp16", 9000.0), ("bf16", 3e38)])
def test_overflow_after_the_cast_is_reported(three_ranks: Ranks, hook: str, wrapper: str, value: float) -> None:
    """Gradients that 16 bits hold, and whose products with Q they do not."""
    for seen, finite in three_ranks.run(cases.collect_overflows, cases.wrapped_spec(hook, wrapper), value, 4):
        assert all(finite[:3]) and seen
        assert {(code, step) for code, _, step in seen} <= {("low-rank-overflow", 4), ("non-finite", 4)}
        assert "wide" in {name for _, name, _ in seen}


def test_ordinary_gradients_cause_no_overflow_report(three_ranks: Ranks) -> None:
    for hook in ("powerSGD", "batched_powerSGD", "allreduce"):
        assert (
            three_ranks.run(cases.collect_overflows, cases.wrapped_spec(hook, "fp16"), 1.0, 4) == [([], [True] * 4)] * 3
        )


def test_gradients_keep_channels_last_memory_format_of_parameters(three_ranks: Ranks) -> None:
    assert all(three_ranks.run(cases.sees_channels_last_gradients))


def test_float16_model_is_not_cast_again(three_ranks: Ranks) -> None:
    assert three_ranks.run(cases.average_float16_model, cases.wrapped_spec("allreduce", "fp16")) == [(True, 32)] * 3


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradient_from_another_rank_has_the_parameters_dtype(three_ranks: Ranks, wrapper: str) -> None:
    assert (
        three_ranks.run(cases.dtypes_of_remote_gradients, cases.wrapped_spec("allreduce", wrapper))
        == [{torch.float32}] * 3
    )
