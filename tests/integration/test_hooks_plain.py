"""bf16_compress, both quantizations and noop: torch's arithmetic where torch's own hooks fail, exact resumes, nothing silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ratchet_hooks.specs import (
    Bf16CompressSpec,
    HookSpec,
    NoopSpec,
    QuantizationPerchannelSpec,
    QuantizationPertensorSpec,
)
from tests.support import hook_averages as averages
from tests.support import hook_laws as laws
from tests.support.groups import Ranks
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, Case, exact_resumes

TENSOR = QuantizationPertensorSpec()
CHANNEL = QuantizationPerchannelSpec(bucket_size=64)
CONFIGURATIONS = {
    "plain": Case(),
    "views": Case(ddp={"static_graph": True, "gradient_as_bucket_view": True}, keep_grads=True),
    "unused_accumulation": Case(ddp={"find_unused_parameters": True}, unused=True, accumulate=2),
}


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
@pytest.mark.parametrize("hook", ["bf16_compress", "quantization_pertensor", "quantization_perchannel", "noop"])
def test_a_resumed_run_has_the_same_bits(three: Ranks, hook: str, name: str) -> None:
    case = replace(CONFIGURATIONS[name], hook=hook, cap=MANY_BUCKETS)
    assert three.run(exact_resumes, case, 4, [1, 2]) == [{}, {}, {}]


@pytest.mark.parametrize("cap", [ONE_BUCKET, MANY_BUCKETS], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("hook", ["bf16_compress", "noop"])
def test_the_bits_are_those_of_torchs_hook(three: Ranks, hook: str, cap: float) -> None:
    assert three.run(laws.equals_stock, Case(hook=hook, cap=cap), 4) == [[], [], []]


def test_bfloat16_is_added_up_right_and_alike_on_all_ranks(three: Ranks) -> None:
    assert three.run(averages.whole_numbers, Bf16CompressSpec()) == [(True, True)] * 3
    first, *others = three.run(laws.weight_bits, Case(hook="bf16_compress", cap=MANY_BUCKETS), 3)
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
def test_eight_bits_are_torchs_and_within_half_a_step(three: Ranks, spec: HookSpec, n: int, kind: str) -> None:
    found: list[dict[str, Any]] = three.run(averages.quantized, spec, kind, n)
    size = spec.bucket_size if isinstance(spec, QuantizationPerchannelSpec) else n
    for one in found:
        assert one["torch's bits"] and one["bits"] == found[0]["bits"]
        assert one["off"] <= 1 + 1e-3  # of half a mean step; the rest is float32's rounding of up to 255 steps
        assert one["sent"] == -n % 4 + n + 8 * -(-n // size)
        assert one["warnings"] == []


@pytest.mark.parametrize("spec", [TENSOR, QuantizationPerchannelSpec()], ids=lambda spec: spec.name)
def test_a_rank_alone_gets_its_own_gradient_in_eight_bits(three: Ranks, spec: HookSpec) -> None:
    for bits, off in three.run(averages.alone, spec, 700):
        assert bits and 0.5 < off <= 1 + 1e-3


@pytest.mark.parametrize("what", [[float("inf")], [float("-inf")], [float("nan")], [3e38, -3e38]], ids=str)
@pytest.mark.parametrize("spec", [TENSOR, CHANNEL], ids=lambda spec: spec.name)
def test_what_eight_bits_cannot_hold_is_nan_everywhere_and_reported(
    three: Ranks, spec: HookSpec, what: list[float]
) -> None:
    found = three.run(averages.spoiled, spec, what)
    assert [warnings for _, warnings in found] == [[], [("quantization-range", "b", 2)], []]
    for finite, _ in found:
        assert all(all(values) for step in (0, 2) for values in finite[step].values())
        assert not any(finite[1]["b"])  # one channel of 64
        assert all(finite[1]["a"]) == (spec is CHANNEL)


@pytest.mark.parametrize("spec", [TENSOR, CHANNEL], ids=lambda spec: spec.name)
def test_what_is_not_float32_is_refused_before_the_first_step(three: Ranks, spec: HookSpec) -> None:
    for said in three.run(averages.refused, spec):
        assert said.startswith("second has gradients of torch.float64") and "float32" in said


def test_noop_sends_nothing_and_leaves_every_gradient_alone(three: Ranks) -> None:
    bits = three.run(laws.weight_bits, Case(hook="noop", cap=MANY_BUCKETS), 3)
    assert len({str(one) for one in bits}) == 3  # replicas go apart
    (summary,) = three.run(laws.summaries, Case(hook="noop"), [2])[1]
    assert (summary["phase"], summary["bytes_before"], summary["bytes_after"]) == ("local", 4 * 162_710, 0)
    assert three.run(averages.untouched, NoopSpec()) == [(True, "rank")] * 3


def test_bfloat16_overflow_is_reported_where_it_happens(three: Ranks) -> None:
    found = three.run(averages.spoiled, Bf16CompressSpec(), [3.4e38])
    assert [warnings for _, warnings in found] == [[], [("bf16-overflow", "b", 2)], []]
