"""A DDP communication hook of one's own, with a state that has to come back: top-k compression with error feedback.

Of every weight matrix each rank sends the few entries of largest magnitude; what it does not send stays in this rank's residual
and is added to its next gradient (Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599).
Vectors (biases, norms) are sent whole. A gradient of larger norm than its parameter is scaled down first, on each rank.
Nothing here knows of Ratchet: ``ddp.register_comm_hook(TopKState(), top_k_hook)`` works too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class TopKState:
    """One residual per bucket. ``density``: the share of a matrix's entries that is sent."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, density: float = 0.05) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {density}")
        self.process_group, self.density = process_group, density
        self.residuals: dict[int, torch.Tensor] = {}  # by bucket index: right only on the buckets they were made on
        self.iteration = self.elements = self.sent = 0

    def __getstate__(self) -> dict[str, Any]:
        """What is saved: tensors, numbers, strings, lists and dicts. The process group is none of these; a resume sets it."""
        return {name: value for name, value in vars(self).items() if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements of gradient, elements sent) as torch's PowerSGDState tells them; ``ratchet hook JOB`` shows them."""
        return (self.elements / self.sent if self.sent else 1.0), self.elements, self.sent

    @classmethod
    def redistribute(cls, states: list[dict[str, Any]]) -> dict[str, Any]:
        """For another number of ranks: the mean of the residuals keeps what error feedback still owes to the average."""
        residuals = [state["residuals"] for state in states]
        mean = {bucket: torch.stack([r[bucket] for r in residuals]).mean(0) for bucket in residuals[0]}
        return {**states[0], "residuals": mean}


def top_k_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The average over the ranks of what each of them sends of this bucket."""
    flat = bucket.buffer()
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):  # gradients are views of flat
        gradient.mul_((parameter.detach().norm().clamp(min=1e-2) / gradient.norm().clamp(min=1e-12)).clamp(max=1.0))
    if bucket.index() in state.residuals:
        flat.add_(state.residuals[bucket.index()])
    places, offset = [], 0
    for parameter in bucket.parameters():
        size = parameter.numel()
        count = max(1, int(state.density * size)) if parameter.dim() > 1 else size
        places.append(flat.narrow(0, offset, size).abs().topk(count, sorted=False).indices + offset)
        offset += size
    index = torch.cat(places)
    values = flat[index]
    state.residuals[bucket.index()] = flat.index_fill(0, index, 0.0)

    ranks = dist.get_world_size(state.process_group)
    indices, parts = ([torch.empty_like(mine) for _ in range(ranks)] for mine in (index, values))
    dist.all_gather(indices, index, group=state.process_group)
    dist.all_gather(parts, values, group=state.process_group)
    average = torch.zeros_like(flat)
    for there, part in zip(indices, parts, strict=True):  # in rank order on every rank: the same bits everywhere
        average.index_add_(0, there, part)
    bucket.set_buffer(average.div_(ranks))

    state.elements += flat.numel()
    state.sent += 2 * index.numel()  # each value travels with its place
    if bucket.is_last():
        state.iteration += 1
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    future.set_result(bucket.buffer())
    return future
