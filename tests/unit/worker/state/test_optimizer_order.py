"""Optimizers that list the parameters of a group in another order on every rank, and in every attempt: of a set, say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_worker.state import optimizer as optimizer_state


def _trained(order: list[int], kind: Any = torch.optim.AdamW, **more: Any) -> tuple[Any, dict[int, str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parameters = list(net.parameters())
    optimizer = kind([parameters[n] for n in order], lr=0.1, **more)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = net(torch.ones(2, 3)).square().sum()
        found.backward()
        return found

    optimizer.step(loss)
    return optimizer, {id(p): name for name, p in net.named_parameters()}


def _captured(optimizer: Any, names: dict[int, str]) -> tuple[dict[str, torch.Tensor], Any]:
    return optimizer_state.capture(optimizer, "optimizer", names, frozenset(names.values()))


def test_optimizer_tensors_have_same_order_on_all_ranks() -> None:
    one, other = _captured(*_trained([0, 1, 2, 3]))[0], _captured(*_trained([2, 0, 3, 1]))[0]
    assert [*one] == [*other] and len(one) == 12
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_optimizer_state_is_restored_by_parameter_name() -> None:
    shared, rest = _captured(*_trained([2, 0, 3, 1]))
    optimizer, names = _trained([1, 3, 0, 2])
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    optimizer_state.restore(optimizer, "optimizer", names, {n: t.clone() for n, t in shared.items()}, rest)
    found = _captured(optimizer, names)[0]
    assert [*found] == [*shared] and all(torch.equal(found[name], shared[name]) for name in shared)


def test_lbfgs_with_reordered_parameters_is_refused() -> None:
    shared, rest = _captured(*_trained([2, 0, 3, 1], torch.optim.LBFGS))
    optimizer, names = _trained([1, 3, 0, 2], torch.optim.LBFGS)
    with pytest.raises(StateError, match="its parameter groups hold other parameters"):
        optimizer_state.restore(optimizer, "optimizer", names, shared, rest)


def test_param_group_added_in_training_must_exist_before_restore() -> None:
    def build(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1, momentum=0.9)
        if step >= 2:
            add(net, optimizer)
        return net, optimizer

    def add(net: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.01})

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            if step == 2 and len(optimizer.param_groups) == 1:
                add(net, optimizer)
            optimizer.zero_grad()
            net(torch.full((2, 3), float(step + 1))).square().sum().backward()
            optimizer.step()

    net, optimizer = build(0)
    train(net, optimizer, range(4))
    names = {id(p): name for name, p in net.named_parameters()}
    shared, rest = _captured(optimizer, names)
    shared = {name: tensor.clone() for name, tensor in shared.items()}
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, optimizer, range(4, 6))

    for step, fits in ((0, False), (4, True)):
        again, other = build(step)
        again.load_state_dict(weights)
        theirs = {id(p): name for name, p in again.named_parameters()}
        if not fits:
            with pytest.raises(StateError, match=r"if session.step >= N: optimizer.add_param_group"):
                optimizer_state.restore(other, "optimizer", theirs, shared, rest)
            continue
        optimizer_state.restore(other, "optimizer", theirs, shared, rest)
        train(again, other, range(4, 6))
        assert all(a.equal(b) for a, b in zip(again.parameters(), net.parameters(), strict=True))
