"""Values that ranks exchange over the store: every JSON number arrives, and other values are refused with advice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ratchet_contract.errors import UserError
from ratchet_worker.coordination.store_exchange import Exchange


def test_floats_that_are_not_finite_are_gathered_and_broadcast() -> None:
    exchange = Exchange(HashStore(), 0, 1, 5)
    ((nan, *infinite),) = exchange.gather("gather", [math.nan, math.inf, -math.inf])
    assert math.isnan(nan) and infinite == [math.inf, -math.inf]
    assert math.isnan(exchange.broadcast("broadcast", math.nan))


@pytest.mark.parametrize("value", [{1, 2}, torch.zeros(2), {"loss": torch.zeros(1).numpy()}, {(1, 2): 3}, b"bytes"])
def test_value_that_json_does_not_have_is_refused_with_advice(value: Any) -> None:
    with pytest.raises(UserError, match=r"tolist\(\)"):
        Exchange(HashStore(), 0, 1, 5).gather("gather", value)


def test_value_that_contains_itself_is_refused_with_advice() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UserError, match="Circular reference"):
        Exchange(HashStore(), 0, 1, 5).gather("gather", value)
