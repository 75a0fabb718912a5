"""One replica out of many that differ."""

from __future__ import annotations

import pytest
import torch

from ratchet_hooks.errors import HookStateError
from ratchet_hooks.replicas import mean_of_replicas


def test_the_mean_is_that_of_float64_in_rank_order() -> None:
    torch.manual_seed(0)
    replicas = [{"weight": torch.randn(1000), "half": torch.randn(50, dtype=torch.bfloat16)} for _ in range(3)]
    found = mean_of_replicas(replicas)
    for name, dtype in (("weight", torch.float32), ("half", torch.bfloat16)):
        wanted = (replicas[0][name].double() + replicas[1][name].double() + replicas[2][name].double()) / 3
        assert found[name].dtype is dtype and torch.equal(found[name], wanted.to(dtype))
    naive = (replicas[0]["weight"] + replicas[1]["weight"] + replicas[2]["weight"]) / 3
    assert not torch.equal(found["weight"], naive)


def test_what_is_equal_is_taken_as_it_is_whatever_its_dtype() -> None:
    third = torch.tensor([0.1, 1 / 3], dtype=torch.float64)
    replicas = [{"step": torch.tensor(7), "flag": torch.tensor(True), "third": third.clone()} for _ in range(3)]
    found = mean_of_replicas(replicas)
    assert found["step"].item() == 7 and found["flag"].item() is True and torch.equal(found["third"], third)
    found["third"].zero_()
    assert torch.equal(replicas[0]["third"], third)  # a copy


@pytest.mark.parametrize(
    ("replicas", "key", "words"),
    [
        ([{"count": torch.tensor(1)}, {"count": torch.tensor(2)}], "count", "no mean"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], "a", "[3] on rank 1"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(2).half()}], "a", "float16"),
        ([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}], "a", "rank 1"),
        ([], "replicas", "at least one"),
    ],
)
def test_what_has_no_mean_is_named(replicas: list[dict[str, torch.Tensor]], key: str, words: str) -> None:
    with pytest.raises(HookStateError) as raised:
        mean_of_replicas(replicas)
    assert raised.value.key == key and words in raised.value.detail
