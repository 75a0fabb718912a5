"""``Session.all_gather`` of tensors, in real ranks, against the same computation in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ratchet_contract.errors import UserError
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec
from ratchet_worker.training.all_gather import Gatherer
from tests.support.hook_cases import bitwise_equal


def _leaf(rank: int) -> torch.Tensor:
    """Whole numbers, so that no order of additions changes a bit."""
    numbers = torch.randint(-9, 10, (2, 3), generator=torch.Generator().manual_seed(rank))
    return numbers.double().requires_grad_()


def _loss(rank: int, everyone: torch.Tensor) -> torch.Tensor:
    return ((rank + 2) * everyone[rank] * everyone.sum(0)).sum() + (everyone[-1] ** 2).sum()


def check_gradients(rank: int) -> dict[str, bool]:
    """What must hold for the gathered tensor and for the gradient that comes back through it."""
    world, gatherer = dist.get_world_size(), Gatherer()
    own = _leaf(rank)
    everyone = gatherer.gather(own, None, True)
    _loss(rank, everyone).backward()
    leaves = [_leaf(r) for r in range(world)]
    plain = torch.stack(leaves)
    sum((_loss(r, plain) for r in range(world)), torch.zeros(())).backward()
    detached = gatherer.gather(_leaf(rank), None, False)
    with torch.no_grad():
        silent = gatherer.gather(_leaf(rank), None, True)
    grads = own.grad, leaves[rank].grad
    return {
        "stacked": bitwise_equal(everyone.detach(), plain.detach()),
        "gradient": grads[0] is not None and torch.equal(grads[0], grads[1]),  # type: ignore[arg-type]
        "a gradient of its own": len({str(leaf.grad) for leaf in leaves}) == world,
        "detached": not detached.requires_grad and not silent.requires_grad and bitwise_equal(detached, plain.detach()),
    }


def contrastive_gradient_difference(rank: int) -> float:
    """Largest difference of a weight's gradient, a loss over all ranks' features, from one process with the whole batch."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    ddp, _ = managed_ddp(module, AllreduceSpec(), ddp={"bucket_cap_mb": 0.00001})
    world, gatherer = dist.get_world_size(), Gatherer()
    inputs = torch.randn(world, 5, 4, dtype=torch.float64)
    labels = torch.arange(5)

    def loss(features: torch.Tensor, everyone: torch.Tensor, offset: int) -> torch.Tensor:
        return nn.functional.cross_entropy(features @ everyone.reshape(-1, 3).T, labels + offset)

    features = ddp(inputs[rank])
    loss(features, gatherer.gather(features, None, True), 5 * rank).backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    whole = module(inputs.reshape(-1, 4)).reshape(world, 5, 3)
    torch.stack([loss(whole[r], whole, 5 * r) for r in range(world)]).mean().backward()
    wanted = [p.grad for p in module.parameters() if p.grad is not None]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def changed_tensor_kinds(rank: int) -> list[str]:
    """Kinds of tensors that do not come back as they were."""
    gatherer, world = Gatherer(), dist.get_world_size()
    made: dict[str, Any] = {
        "bool": lambda r: torch.tensor([True, r == 1]),
        "bfloat16": lambda r: torch.full((2, 2), 1.5 + r, dtype=torch.bfloat16),
        "complex, conjugated": lambda r: torch.tensor([1 + 2j, r - 1j]).conj(),
        "int64": lambda r: torch.tensor([2**62 + r]),
        "no dimension": lambda r: torch.tensor(float(r)),
        "empty": lambda r: torch.empty(0, 3),
        "transposed": lambda r: torch.arange(6.0).reshape(2, 3).T + r,
    }
    out = []
    for name, make in made.items():
        found, wanted = gatherer.gather(make(rank), None, True), torch.stack([make(r) for r in range(world)])
        if found.shape != wanted.shape or found.dtype is not wanted.dtype or not torch.equal(found, wanted):
            out.append(name)
    return out


def gather_in_subgroup(rank: int) -> tuple[list[float], list[float]]:
    """(gathered, gradient) among ranks 0 and 1, and in rank 2 alone."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    own = torch.tensor(float(rank), requires_grad=True)
    everyone = Gatherer().gather(own, pair if rank < 2 else alone, True)
    (everyone * (rank + 1)).sum().backward()
    assert own.grad is not None
    return everyone.tolist(), own.grad.tolist()


def mismatch_errors(rank: int) -> list[str]:
    """What every rank is told where they differ; then they gather again."""
    gatherer, said = Gatherer(), []
    odd = [
        torch.zeros(2, 3 + (rank == 1)),
        torch.zeros(2, dtype=torch.float16 if rank == 2 else torch.float32),
        torch.zeros(2, requires_grad=rank != 1),
        torch.zeros((1,) * 14),
        torch.zeros(2).to_sparse(),
    ]
    for tensor in odd:
        try:
            gatherer.gather(tensor, None, True)
        except UserError as error:
            said.append(str(error))
    assert gatherer.gather(torch.tensor(rank), None, True).tolist() == list(range(dist.get_world_size()))
    return said
