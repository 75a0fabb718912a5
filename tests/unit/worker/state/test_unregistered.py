"""What acts on the training and was not given to the Session is found, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel

from ratchet_worker.state.unregistered import find_unregistered


@pytest.fixture
def net() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def adam(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters())


def test_unregistered_optimizer_scheduler_scaler_and_average_are_found(net: nn.Module, adam: Optimizer) -> None:
    kept = [OneCycleLR(adam, 0.1, 10), torch.amp.GradScaler("cpu"), AveragedModel(net)]  # type: ignore[attr-defined]
    names = ["AdamW", "AveragedModel", "GradScaler", "OneCycleLR"]
    assert find_unregistered(net, [], []) == names
    assert find_unregistered(net, [adam], [adam]) == names[1:]
    assert find_unregistered(net, [adam], [adam, *kept]) == []


def test_parts_of_registered_objects_count_as_registered(net: nn.Module, adam: Optimizer) -> None:
    first, second = ConstantLR(adam), CosineAnnealingLR(adam, 5)
    assert find_unregistered(net, [adam], [adam, SequentialLR(adam, [first, second], [3])]) == []
    assert find_unregistered(net, [adam], [adam, ChainedScheduler([first, second], adam)]) == []
    assert find_unregistered(net, [adam], [adam, SimpleNamespace(of={"schedulers": [first, second]})]) == []
    assert find_unregistered(net, [adam], [adam, SimpleNamespace(of={"schedulers": [first]})]) == ["CosineAnnealingLR"]


def test_registered_scheduler_does_not_register_optimizer(net: nn.Module, adam: Optimizer) -> None:
    assert find_unregistered(net, [], [OneCycleLR(adam, 0.1, 10)]) == ["AdamW"]


def test_unregistered_average_of_submodule_is_found(net: nn.Module, adam: Optimizer) -> None:
    whole = nn.Sequential(net, nn.Linear(2, 5))
    kept = AveragedModel(net)
    assert kept and find_unregistered(whole, [adam], [adam]) == ["AveragedModel"]


def test_average_inside_model_counts_as_registered(net: nn.Module) -> None:
    net.average = AveragedModel(nn.Linear(2, 2))
    assert find_unregistered(net, [], net.modules()) == []


def test_average_in_a_list_of_the_model_is_saved_with_it_and_not_reported(net: nn.Module) -> None:
    whole = nn.Sequential(net)
    net.averages = {"ema": [AveragedModel(nn.Linear(2, 2))]}  # type: ignore[assignment]
    assert find_unregistered(whole, [], whole.modules()) == []


class Around(torch.optim.SGD):
    """As those of libraries that stand around another one."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"])
        self.inner = inner


def test_unrelated_deleted_or_wrapping_objects_are_not_reported(net: nn.Module, adam: Optimizer) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # type: ignore[attr-defined]
    kept = [other, CosineAnnealingLR(other, 5), Around(adam), scaler, AveragedModel(nn.Linear(3, 3))]
    CosineAnnealingLR(adam, 5)
    torch.optim.SGD(net.parameters(), 0.1)
    assert kept and find_unregistered(net, [adam], [adam]) == []


def test_unregistered_scheduler_of_optimizer_wrapper_is_found(net: nn.Module, adam: Optimizer) -> None:
    kept = CosineAnnealingLR(Around(adam), 5)
    assert kept and find_unregistered(net, [adam], [adam]) == ["CosineAnnealingLR"]
