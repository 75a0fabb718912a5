"""``copy.deepcopy`` and ``AveragedModel`` of the wrapped model, under every hook."""

from __future__ import annotations

import pytest

from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, HookSpec, PostLocalSGDSpec
from tests.support.gloo_ranks import Ranks
from tests.support.hook_cases import SPECS
from tests.support.model_copies import train_copies

ALL: dict[str, HookSpec] = {
    **SPECS,
    "batched_powerSGD": BatchedPowerSGDSpec(start_powerSGD_iter=3),
    "post_localSGD": PostLocalSGDSpec(start_localSGD_iter=1),
}


@pytest.mark.parametrize("hook", ALL)
def test_deepcopy_and_averaged_model_of_managed_ddp_work(three_ranks: Ranks, hook: str) -> None:
    assert three_ranks.run(train_copies, ALL[hook]) == [[], [], []]
