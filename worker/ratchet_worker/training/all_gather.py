"""Gathers the tensors of a group's ranks, stacked, on each of them; gradients can flow back through the gather."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ratchet_contract.errors import UserError
from ratchet_hooks.ddp.process_groups import duplicate_group

_HEADER: Final = 16  # number of integers that describe a tensor: dtype, whether it needs a gradient, dimensions, shape
_DTYPES: Final = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)  # each dtype's index is its code, the same in every process with the same torch


class Gatherer:
    """One rank's side of gathers, in which every rank of a group gets the tensors of all of them."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}

    def gather(self, tensor: torch.Tensor, group: dist.ProcessGroup | None, sync_grads: bool) -> torch.Tensor:
        """Return the ``tensor`` of every rank of ``group`` (None: all), stacked: (ranks, *shape). Its backward pass is a
        collective, too. Without ``sync_grads`` the result is detached. Raises ``UserError`` if the tensors cannot be gathered."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UserError(f"all_gather takes dense tensors, not one of layout {tensor.layout}; make it dense first")
        if tensor.dim() > _HEADER - 3:
            raise UserError(f"all_gather takes tensors of up to {_HEADER - 3} dimensions, not {tensor.dim()}")
        ranks = self._group(tensor.device) if group is None else group
        if dist.get_rank(ranks) < 0:
            raise UserError("all_gather: this rank is not in the specified group; only its ranks may call it")
        differentiable = sync_grads and tensor.requires_grad and torch.is_grad_enabled()
        _check_same_kind(tensor, differentiable, ranks)
        if differentiable:
            return _Gather.apply(tensor, ranks)  # type: ignore[no-untyped-call,no-any-return]
        return _gather_stacked(tensor, ranks)

    def _group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the process group for tensors on ``device``. The first call for a type of device is a collective."""
        # Not DDP's group: a backward pass gathers while DDP reduces, and the order of the two may differ between ranks.
        if device.type not in self._groups:
            main = dist.group.WORLD
            assert main is not None
            self._groups[device.type] = duplicate_group(main, device)
        return self._groups[device.type]


class _Gather(torch.autograd.Function):
    """Gather with a gradient: a rank's tensor gets the sum, over the ranks, of the gradients of its slice."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather_stacked(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the sum of all ranks' gradients for this rank's slice, added in rank order. A collective."""
        sent = gradient.resolve_conj().resolve_neg().contiguous()
        received = torch.empty_like(sent)
        if sent.numel():
            dist.all_to_all_single(_bytes(received), _bytes(sent), group=ctx.group)
        total = received[0].clone()
        for part in received[1:]:  # in rank order: the same bits on every back end
            total += part
        return total, None


def _gather_stacked(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather detached copies of the ranks' tensors into one new tensor (ranks, *shape). A collective."""
    own = tensor.detach().resolve_conj().resolve_neg().contiguous()
    out = own.new_empty((group.size(), *own.shape))
    if own.numel():
        dist.all_gather(list(_bytes(out).view(group.size(), -1)), _bytes(own), group=group)
    return out


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor's bytes, which every back end can move, unlike some dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _check_same_kind(tensor: torch.Tensor, differentiable: bool, group: dist.ProcessGroup) -> None:
    """Raise ``UserError`` on every rank unless all tensors have the same dtype, shape and need of a gradient. A collective."""
    numbers = [_DTYPES.index(tensor.dtype), int(differentiable), tensor.dim(), *tensor.shape]
    header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64, device=tensor.device)
    found = [torch.empty_like(header) for _ in range(group.size())]
    dist.all_gather(found, header, group=group)
    kinds = [_describe_kind(numbers) for numbers in torch.stack(found).tolist()]
    odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise UserError(
            f"all_gather: rank 0 gave a tensor of {kinds[0]}, rank {odd} one of {kinds[odd]}. All ranks must give the same kind: "
            "pad the shorter ones, convert them, or detach them all (sync_grads=False)",
            code="gather-mismatch",
        )


def _describe_kind(numbers: list[int]) -> str:
    """Return the text of a tensor's kind for an error, from the numbers that ``_check_same_kind`` gathers."""
    dtype, differentiable, dimensions, *shape = numbers
    return f"{_DTYPES[dtype]} {shape[:dimensions]} {'with' if differentiable else 'without'} a gradient"
