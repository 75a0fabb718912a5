"""``copy.deepcopy`` and ``AveragedModel`` of the wrapped model, under every hook."""

from __future__ import annotations

import pytest

from ratchet_hooks.specs import BatchedPowerSGDSpec, HookSpec, PostLocalSGDSpec
from tests.support.groups import Ranks
from tests.support.hook_cases import SPECS
from tests.support.model_copies import train_copies

ALL: dict[str, HookSpec] = {
    **SPECS,
    "batched_powerSGD": BatchedPowerSGDSpec(start_powerSGD_iter=3),
    "post_localSGD": PostLocalSGDSpec(start_localSGD_iter=1),
}


@pytest.mark.parametrize("hook", ALL)
def test_copies_of_the_wrapped_model_train_and_average(three: Ranks, hook: str) -> None:
    assert three.run(train_copies, ALL[hook]) == [[], [], []]
