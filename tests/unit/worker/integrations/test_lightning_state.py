"""Attributes of callbacks as state: which changes are saved, and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("lightning")


@pytest.mark.parametrize("now", [torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1), torch.tensor([0.0, -0.0])])
def test_attribute_of_equal_value_and_other_bits_dtype_or_shape_is_saved(now: torch.Tensor) -> None:
    from lightning.pytorch.callbacks import Callback

    from ratchet_worker.integrations.lightning_state import Attributes

    class Own(Callback):
        best: Any
        mean: Any

    callback = Own()
    callback.best, callback.mean = torch.zeros(2), torch.tensor(float("nan"))
    attributes = Attributes({}, [callback])
    callback.best = now
    state = attributes.state()
    assert [*state.values()] == [now]  # the same object
    callback.best = torch.ones(1)
    attributes.restore(state)
    assert callback.best is now
