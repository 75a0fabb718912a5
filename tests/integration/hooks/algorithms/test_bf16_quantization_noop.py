"""bf16_compress, both quantizations and noop: torch's arithmetic where torch's own hooks fail, exact resumes, nothing silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ratchet_hooks.specs.hook_specs import (
    Bf16CompressSpec,
    HookSpec,
    NoopSpec,
    QuantizationPerchannelSpec,
    QuantizationPertensorSpec,
)
from tests.support import hook_averages as averages
from tests.support import hook_properties as laws
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, resume_differences

TENSOR = QuantizationPertensorSpec()
CHANNEL = QuantizationPerchannelSpec(bucket_size=64)
CONFIGURATIONS = {
    "plain": Case(),
    "views": Case(ddp={"static_graph": True, "gradient_as_bucket_view": True}, keep_grads=True),
    "unused_accumulation": Case(ddp={"find_unused_parameters": True}, unused=True, accumulate=2),
}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
@pytest.mark.parametrize("hook", ["bf16_compress", "quantization_pertensor", "quantization_perchannel", "noop"])
def test_plain_hook_resume_is_bitwise_exact(three_ranks: Ranks, hook: str, name: str) -> None:
    case = replace(CONFIGURATIONS[name], hook=hook, cap=MANY_BUCKETS)
    assert three_ranks.run(resume_differences, case, 4, [1, 2]) == [{}, {}, {}]


@pytest.mark.parametrize("cap", [ONE_BUCKET, MANY_BUCKETS], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("hook", ["bf16_compress", "noop"])
def test_plain_hook_has_same_bits_as_torch_hook(three_ranks: Ranks, hook: str, cap: float) -> None:
    assert three_ranks.run(laws.differences_from_torch, Case(hook=hook, cap=cap), 4) == [[], [], []]


def test_bf16_compress_sum_is_correct_and_equal_on_all_ranks(three_ranks: Ranks) -> None:
    assert three_ranks.run(averages.check_bfloat16_sums, Bf16CompressSpec()) == [(True, True)] * 3
    first, *others = three_ranks.run(laws.weight_bits, Case(hook="bf16_compress", cap=MANY_BUCKETS), 3)
    assert others == [first, first]


@pytest.mark.parametrize("kind", list(averages.KINDS))
@pytest.mark.parametrize(
    ("spec", "n"),
    [
        (TENSOR, 1000),
        (TENSOR, 1),
        (CHANNEL, 1000),
        (CHANNEL, 128),
        (CHANNEL, 63),
        (QuantizationPerchannelSpec(bucket_size=1), 9),
    ],
    ids=["tensor", "tensor-one", "channel", "channel-multiple", "channel-short", "channel-one"],
)
def test_quantization_has_torch_bits_and_error_within_half_a_step(
    three_ranks: Ranks, spec: HookSpec, n: int, kind: str
) -> None:
    found: list[dict[str, Any]] = three_ranks.run(averages.quantize_one_step, spec, kind, n)
    size = spec.bucket_size if isinstance(spec, QuantizationPerchannelSpec) else n
    for one in found:
        assert one["torch's bits"] and one["bits"] == found[0]["bits"]
        assert one["off"] <= 1 + 1e-3  # of half a mean step; the rest is float32's rounding of up to 255 steps
        assert one["sent"] == -n % 4 + n + 8 * -(-n // size)
        assert one["warnings"] == []


@pytest.mark.parametrize("spec", [TENSOR, QuantizationPerchannelSpec()], ids=lambda spec: spec.name)
def test_quantization_on_one_rank_returns_own_quantized_gradient(three_ranks: Ranks, spec: HookSpec) -> None:
    for bits, off in three_ranks.run(averages.quantize_on_one_rank, spec, 700):
        assert bits and 0.5 < off <= 1 + 1e-3


@pytest.mark.parametrize("what", [[float("inf")], [float("-inf")], [float("nan")], [3e38, -3e38]], ids=str)
@pytest.mark.parametrize("spec", [TENSOR, CHANNEL], ids=lambda spec: spec.name)
def test_unquantizable_gradient_is_nan_on_all_ranks_and_reported(
    three_ranks: Ranks, spec: HookSpec, what: list[float]
) -> None:
    found = three_ranks.run(averages.average_spoiled_gradients, spec, what)
    assert [warnings for _, warnings in found] == [[], [("quantization-range", "b", 2)], []]
    for finite, _ in found:
        assert all(all(values) for step in (0, 2) for values in finite[step].values())
        assert not any(finite[1]["b"])  # one channel of 64
        assert all(finite[1]["a"]) == (spec is CHANNEL)


@pytest.mark.parametrize("spec", [TENSOR, CHANNEL], ids=lambda spec: spec.name)
def test_quantization_refuses_float64_gradients_before_first_step(three_ranks: Ranks, spec: HookSpec) -> None:
    for said in three_ranks.run(averages.refusal_message, spec):
        assert said.startswith("second has gradients of torch.float64") and "float32" in said


def test_noop_sends_nothing_and_keeps_local_gradients(three_ranks: Ranks) -> None:
    bits = three_ranks.run(laws.weight_bits, Case(hook="noop", cap=MANY_BUCKETS), 3)
    assert len({str(one) for one in bits}) == 3  # replicas go apart
    (summary,) = three_ranks.run(laws.summaries, Case(hook="noop"), [2])[1]
    assert (summary["phase"], summary["bytes_before"], summary["bytes_after"]) == ("local", 4 * 162_710, 0)
    assert three_ranks.run(averages.check_gradient_unchanged, NoopSpec()) == [(True, "rank")] * 3


def test_bf16_overflow_is_reported_on_the_rank_of_origin(three_ranks: Ranks) -> None:
    found = three_ranks.run(averages.average_spoiled_gradients, Bf16CompressSpec(), [3.4e38])
    assert [warnings for _, warnings in found] == [[], [("bf16-overflow", "b", 2)], []]
