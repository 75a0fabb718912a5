"""Buffers in an evaluation, in real ranks, for models that DDP trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec
from ratchet_worker.training.evaluation import preserving_state
from tests.support.hook_cases import bitwise_equal

CPU = torch.device("cpu")
FORMS: dict[str, Any] = {
    "every second element": lambda whole: whole[::2],
    "columns": lambda whole: whole.view(4, 4)[:, 1:3],
    "transposed": lambda whole: whole.view(2, 8).t(),
    "conjugated": lambda whole: whole.view(torch.complex64).conj(),
}


def buffers_by_form(rank: int) -> dict[str, list[bool]]:
    """By form: the values are rank 0's within an evaluation, the rest of the memory is untouched there, and all is put back."""
    return {name: _evaluate(rank, form) for name, form in FORMS.items()}


def _evaluate(rank: int, form: Any) -> list[bool]:
    def memory(of: int) -> torch.Tensor:
        return torch.arange(16.0) + 100 * of

    whole = memory(rank)
    net = nn.Linear(2, 2)
    net.register_buffer("part", form(whole))
    ddp, hook = managed_ddp(net, AllreduceSpec(), device=CPU)
    ddp(torch.ones(1, 2)).sum().backward()
    whole.copy_(memory(rank))  # DDP has given every rank the values of rank 0
    expected = memory(rank)
    form(expected).copy_(form(memory(0)))
    with preserving_state(ddp, hook, None, CPU, broadcast=True):
        found = [
            bitwise_equal(net.get_buffer("part").resolve_conj(), form(memory(0)).resolve_conj()),
            bitwise_equal(whole, expected),
        ]
    return [*found, bitwise_equal(whole, memory(rank))]


def ignored_buffers(rank: int) -> list[list[float]]:
    """A buffer that DDP ignores and another one, within an evaluation and after it. The ignored one has one shape per rank."""
    net = nn.Linear(2, 2)
    net.register_buffer("seen", torch.full((1 + 2 * rank,), float(rank)))
    net.register_buffer("shared", torch.zeros(1))
    net.__dict__["_ddp_params_and_buffers_to_ignore"] = ["seen"]
    ddp, hook = managed_ddp(net, AllreduceSpec(), device=CPU)
    ddp(torch.ones(1, 2)).sum().backward()
    seen, shared = net.get_buffer("seen"), net.get_buffer("shared")
    shared.fill_(rank + 1)
    with preserving_state(ddp, hook, None, CPU, broadcast=True):
        within = [seen.tolist(), shared.tolist()]
        seen += 1
    return [*within, seen.tolist(), shared.tolist()]
