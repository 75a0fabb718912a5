"""PowerSGD and batched PowerSGD against torch's code and on gradients of choice, as functions for the ranks of
``tests.support.gloo_ranks``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from ratchet_hooks.algorithms.base import Setup
from ratchet_hooks.algorithms.powersgd.batched import BatchedPowerSGD
from ratchet_hooks.algorithms.powersgd.powersgd import PowerSGD
from ratchet_hooks.algorithms.powersgd.state_by_name import PowerSGDState, make_state
from ratchet_hooks.manage.managed_ddp import ManagedHook, managed_ddp
from ratchet_hooks.specs.hook_specs import BatchedPowerSGDSpec, PowerSGDSpec
from tests.support.hook_cases import ONE_BUCKET, Case, Run, bitwise_equal
from tests.support.hook_properties import CPU

Spec = PowerSGDSpec | BatchedPowerSGDSpec
Shape = tuple[int, ...]

# Equal shapes apart from each other; a kernel of four dimensions; a bucket with nothing to compress; one that is a full square.
BUCKETS: list[list[Shape]] = [
    [(40, 30), (40,), (30, 40), (40, 30), (7,), (20, 9, 3, 3)],
    [(3,), (5, 6)],
    [(64, 64), (13, 5), (5,)],
    [(16, 9)],
]
# Large enough for products that are made column by column, at the beginning of a cache line and within one.
LARGE: list[list[Shape]] = [[(512, 256), (3,), (256, 512), (300, 257)], [(270, 300), (256, 4, 8, 8)]]


class Bucket:
    """What DDP hands to a hook, with gradients of choice."""

    def __init__(self, index: int, shapes: Sequence[Shape], last: bool, dtype: torch.dtype) -> None:
        self._index, self._last, self.shapes = index, last, [torch.Size(shape) for shape in shapes]
        self.flat = torch.zeros(sum(shape.numel() for shape in self.shapes), dtype=dtype)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self.flat, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@contextmanager
def synchronous_torch_hook() -> Iterator[None]:
    """torch's hooks with every all-reduce complete at once, which keeps their callbacks in this thread and buckets apart; and a
    matrix that is no batch is orthonormalised as a batch of one, without which ``batched_powerSGD_hook`` fails."""
    reduce, orthogonalize = dist.all_reduce, torch_powersgd._orthogonalize

    def finished(*args: Any, **kwargs: Any) -> Any:
        work = reduce(*args, **kwargs)
        work.get_future().wait()
        return work

    def of_one(matrices: torch.Tensor, epsilon: float = 0) -> None:
        orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)  # type: ignore[no-untyped-call]

    dist.all_reduce, torch_powersgd._orthogonalize = finished, of_one
    try:
        yield
    finally:
        dist.all_reduce, torch_powersgd._orthogonalize = reduce, orthogonalize


def differences_from_torch(
    rank: int,
    cases: Sequence[tuple[Spec, torch.dtype]],
    steps: int,
    alone: bool = False,
    shapes: Sequence[Sequence[Shape]] = BUCKETS,
) -> list[str]:
    """Where averages or states differ from what torch's own code gives for the same gradients; ``alone``: in groups of one.

    Before the last three steps what a hook may have remembered is put elsewhere: buckets, then residuals, then P and Q.
    """
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())] if alone else []
    group = groups[rank] if alone else dist.group.WORLD
    assert group is not None
    found = []
    for spec, dtype in cases:
        generator = torch.Generator().manual_seed(rank)
        ours, theirs = (
            _Both.ours(spec, _buckets(shapes, dtype), group),
            _Both.torchs(spec, _buckets(shapes, dtype), group),
        )
        for step in range(steps):
            ours.move(steps - 1 - step)
            _step(ours, theirs, generator)
            for i in range(len(shapes)):
                parts = _differences(ours, theirs, i)
                found += [f"{spec!r} {dtype} step {step} bucket {i}: {part}" for part in parts]
    return found


def recovers_after_aborted_step(rank: int, spec: Spec) -> bool:
    """Whether a step whose last buckets never came is forgotten: without error feedback and warm start, the next one gives what
    torch's gives that was not interrupted."""
    group = dist.group.WORLD
    assert group is not None
    bare = replace(spec, use_error_feedback=False, warm_start=False)
    ours, theirs = (make(bare, _buckets(BUCKETS, torch.float32), group) for make in (_Both.ours, _Both.torchs))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        _step(ours, theirs, generator)
    drawn = ours.state.rng.get_state()
    ours.run(0, torch.ones(ours.buckets[0].flat.numel()))
    ours.run(1, torch.ones(ours.buckets[1].flat.numel()))
    ours.averages = []
    ours.state.rng.set_state(drawn)
    _step(ours, theirs, generator)
    return all(bitwise_equal(mine.flat, other.flat) for mine, other in zip(ours.buckets, theirs.buckets, strict=True))


@dataclass
class _Both:
    """One of the two that are compared: a state, buckets, and what to do with one."""

    state: PowerSGDState
    buckets: list[Bucket]
    hook: Callable[[Bucket], torch.futures.Future[torch.Tensor]]
    averages: list[torch.futures.Future[torch.Tensor]] = field(default_factory=list)

    @classmethod
    def ours(cls, spec: Spec, buckets: list[Bucket], group: dist.ProcessGroup) -> _Both:
        names = [[f"{i}.{j}" for j in range(len(bucket.shapes))] for i, bucket in enumerate(buckets)]
        parameters = {
            name: torch.zeros(shape, dtype=bucket.flat.dtype)
            for bucket, of_it in zip(buckets, names, strict=True)
            for name, shape in zip(of_it, bucket.shapes, strict=True)
        }
        setup = Setup(group=group, parameters=parameters, device=CPU, node_ranks=1)
        hook = PowerSGD(spec, setup) if isinstance(spec, PowerSGDSpec) else BatchedPowerSGD(spec, setup)
        return cls(hook.state, buckets, lambda bucket: hook.run(bucket, names[bucket.index()])[0])

    @classmethod
    def torchs(cls, spec: Spec, buckets: list[Bucket], group: dist.ProcessGroup) -> _Both:
        state = make_state(spec, group)
        named = {"powerSGD": torch_powersgd.powerSGD_hook, "batched_powerSGD": torch_powersgd.batched_powerSGD_hook}
        hook: Any = named[spec.name]
        return cls(state, buckets, lambda bucket: hook(state, bucket))

    def run(self, index: int, gradients: torch.Tensor) -> None:
        bucket = self.buckets[index]
        bucket.flat.copy_(gradients)
        self.averages.append(self.hook(bucket))

    def finish(self) -> None:
        """As DDP does behind the last bucket."""
        for average, bucket in zip(self.averages, self.buckets, strict=True):
            assert average.wait().data_ptr() == bucket.flat.data_ptr()
        self.averages = []

    def move(self, steps_left: int) -> None:
        """Buckets or part of the state to other memory; what stays behind is spoiled."""
        if steps_left == 2:
            for bucket in self.buckets:
                bucket.flat = _elsewhere(bucket.flat)
        for key in {1: ["error_dict"], 0: ["p_memory_dict", "q_memory_dict"]}.get(steps_left, []):
            tensors = getattr(self.state, key)
            tensors.update({index: _elsewhere(tensor) for index, tensor in tensors.items()})


def _step(ours: _Both, theirs: _Both, generator: torch.Generator) -> None:
    for i, bucket in enumerate(ours.buckets):
        gradients = torch.randn(bucket.flat.numel(), generator=generator).to(bucket.flat.dtype)
        ours.run(i, gradients)
        with synchronous_torch_hook():
            theirs.run(i, gradients)
    ours.finish()
    theirs.finish()


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    tensor.fill_(float("nan"))
    return copy


def _buckets(shapes: Sequence[Sequence[Shape]], dtype: torch.dtype) -> list[Bucket]:
    return [Bucket(i, of_it, i == len(shapes) - 1, dtype) for i, of_it in enumerate(shapes)]


def _differences(ours: _Both, theirs: _Both, index: int) -> list[str]:
    found = [] if bitwise_equal(ours.buckets[index].flat, theirs.buckets[index].flat) else ["average"]
    for key in ("error_dict", "p_memory_dict", "q_memory_dict"):
        mine, other = getattr(ours.state, key), getattr(theirs.state, key)
        found += [] if mine.keys() == other.keys() and all(bitwise_equal(mine[i], other[i]) for i in mine) else [key]
    if ours.state.rng.get_state()[2] != theirs.state.rng.get_state()[2]:
        found.append("rng")
    counted = [(s.iter, s.next_stats_report, s.compression_stats()) for s in (ours.state, theirs.state)]  # type: ignore[no-untyped-call]
    return found + ([] if counted[0] == counted[1] else ["statistics"])


class Chosen(nn.Module):
    """A module whose gradients are what its forward is given."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        super().__init__()
        self.of = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.of, gradients, strict=True)]).sum()


class Fed:
    """A DDP under a hook that gets gradients of choice."""

    def __init__(self, spec: Spec, shapes: Sequence[Shape], dtype: torch.dtype, **ddp: Any) -> None:
        self.module = Chosen(shapes, dtype)
        self.ddp, self.hook = managed_ddp(self.module, spec, ddp=ddp, device=CPU)

    def step(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is applied in their place."""
        self.ddp.zero_grad()
        self.ddp(gradients).backward()
        return [p.grad.clone() for p in self.module.of if p.grad is not None]


def random_gradients(
    rank: int, shapes: Sequence[Shape], steps: int, dtype: torch.dtype = torch.float64
) -> list[list[torch.Tensor]]:
    """The same for the same rank, per step and parameter."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [[torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(steps)]


def train_on_random_gradients(
    rank: int, spec: Spec, shapes: Sequence[Shape], steps: int, cap: float
) -> tuple[list[list[str]], list[list[np.ndarray[Any, Any]]], dict[str, np.ndarray[Any, Any]]]:
    """(layout, what was applied at each step, this rank's tensors afterwards) for ``random_gradients`` in float64."""
    fed = Fed(spec, shapes, torch.float64, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    applied = [[g.numpy() for g in fed.step(gradients)] for gradients in random_gradients(rank, shapes, steps)]
    tensors, _ = fed.hook.capture()
    return fed.hook.layout() or [], applied, {name: tensor.numpy() for name, tensor in tensors.items()}


SPOILED: list[Shape] = [(64, 64), (64,), (32, 96)]


def collect_warnings(
    rank: int, spec: Spec, dtype: torch.dtype, factor: float, what: str, steps: int
) -> tuple[set[tuple[str, str, int]], list[float]]:
    """Gradients of ``factor`` times noise (``what``: "ones" instead); in the last step rank 1's first matrix or vector gets an
    inf or a nan ("inf matrix", "nan vector"). (warnings, largest magnitude of what that step applied to each parameter)."""
    fed = Fed(spec, SPOILED, dtype)
    for i, gradients in enumerate(random_gradients(0, SPOILED, steps, torch.float32), start=1):
        chosen = [torch.ones_like(g) if what == "ones" else g for g in gradients]
        chosen = [(g * factor).to(dtype) for g in chosen]
        if i == steps and rank == 1 and what.startswith(("inf", "nan")):
            chosen[0 if what.endswith("matrix") else 1].view(-1)[33] = float(what[:3])
        applied = fed.step(chosen)
    return warning_keys(fed.hook), [float(g.abs().max()) for g in applied]


def warning_keys(hook: ManagedHook) -> set[tuple[str, str, int]]:
    return {(w.code, w.parameter, w.iteration) for w in hook.warnings()}


def resumes_identically_without(rank: int, case: Case, kill: int, total: int, prefix: str) -> bool:
    """Whether a run resumed at ``kill`` ends in the same weights although tensors of this kind are gone or mixed up."""
    whole = Run(rank, case)
    whole.train(kill)
    saved = whole.save()
    for name, tensor in saved.hook[0].items():
        if name.startswith(f"{prefix}/"):
            tensor.copy_(tensor.flip(0))
    whole.train(total)
    resumed = Run(rank, case, saved)
    resumed.train(total)
    return all(bitwise_equal(a, b) for a, b in zip(whole.module.parameters(), resumed.module.parameters(), strict=True))


def restore_on_other_buckets(rank: int, case: Case, steps: int) -> tuple[int, bool, bool]:
    """Restored on other buckets: (residuals that are the same, whether the padding's are zero, whether P and Q are gone)."""
    run = Run(rank, case)
    run.train(steps)
    saved = run.save()
    before = saved.hook[0]
    other = Run(rank, replace(case, cap=ONE_BUCKET), saved, pin=False)
    after = other.hook.capture()[0]
    kept = sum(bitwise_equal(after[name], tensor) for name, tensor in before.items() if name.startswith("residual/"))
    padding = [tensor for name, tensor in after.items() if name.startswith("residual_padding/")]
    fresh = not any(name.startswith(("p/", "q/")) for name in after)
    other.train(steps + 2)
    return kept, len(padding) == 1 and not any(bool(t.any()) for t in padding), fresh


def bucket_lengths(rank: int, case: Case) -> list[int]:
    run = Run(rank, case)
    run.train(1)
    return [sum(run.module.get_parameter(n).numel() for n in bucket) for bucket in run.hook.layout() or []]
