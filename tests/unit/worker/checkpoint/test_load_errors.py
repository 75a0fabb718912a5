"""How an error of a component that does not accept the state of a checkpoint ends the attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratchet_contract.errors import UserError
from ratchet_worker.checkpoint.rank_state import JobState


def load(error: BaseException) -> Any:
    def raises() -> None:
        raise error

    state: Any = SimpleNamespace(rank=1)
    return JobState._load_component(state, "user:mine", raises)


@pytest.mark.parametrize("kind", [ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError])
def test_error_of_user_code_that_loads_a_state_is_the_users_and_is_not_retried(kind: type[Exception]) -> None:
    with pytest.raises(UserError, match="user:mine of rank 1 cannot load the state") as caught:
        load(kind("count"))
    assert caught.value.code == "state-mismatch"


def test_error_of_the_device_that_loads_a_state_is_raised_unchanged() -> None:
    error = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        load(error)
    assert caught.value is error
