"""Small training runs under managed hooks, to be run inside ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import (
    AllreduceSpec,
    Bf16CompressSpec,
    Fp16CompressSpec,
    HookSpec,
    NoopSpec,
    PowerSGDSpec,
    QuantizationPerchannelSpec,
    QuantizationPertensorSpec,
)

SPECS: dict[str, HookSpec] = {
    "allreduce": AllreduceSpec(),
    "fp16_compress": Fp16CompressSpec(),
    "bf16_compress": Bf16CompressSpec(),
    "quantization_pertensor": QuantizationPertensorSpec(),
    "quantization_perchannel": QuantizationPerchannelSpec(bucket_size=100),
    "noop": NoopSpec(),
    "powerSGD": PowerSGDSpec(matrix_approximation_rank=2, start_powerSGD_iter=3),
}
ONE_BUCKET = 25.0  # MiB
MANY_BUCKETS = 0.1


class Net(nn.Module):
    """A small net with BatchNorm and dropout. Its gradient-ready order changes at step ``turn``."""

    def __init__(self, *, turn: int | None = None, unused: bool = False) -> None:
        super().__init__()
        self.turn = turn
        self.head = nn.Linear(200, 10)  # registered first, used last: ready order differs from registration order
        self.first = nn.Linear(64, 300)
        self.second = nn.Linear(300, 200)
        self.norm = nn.BatchNorm1d(300)
        self.drop = nn.Dropout(0.1)
        self.left = nn.Linear(200, 200)
        self.right = nn.Linear(200, 200)
        if unused:
            self.spare = nn.Linear(50, 50)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        h = torch.relu(self.second(self.drop(self.norm(torch.relu(self.first(x))))))
        pair = (self.left, self.right)
        if self.turn is not None and step >= self.turn:
            pair = (self.right, self.left)
        for layer in pair:
            h = torch.tanh(layer(h))
        out: torch.Tensor = self.head(h)
        return out


class MixedNet(Net):
    """Two dtypes, so that each rebuild ends with two unfilled buckets; a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(10, 30).double()
        self.tied = nn.Linear(10, 30).double()
        self.tied.weight = self.tail.weight
        self.frozen = nn.Linear(200, 200)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        out = super().forward(x, step).double()
        return (self.tail(out) + self.tied(out))[:, :10].float()


@dataclass(frozen=True)
class Case:
    """One training run; ``ddp`` are DDP keywords, ``accumulate`` micro-batches per step (all but the last in no_sync)."""

    hook: str = "allreduce"
    cap: float = ONE_BUCKET
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    turn: int | None = None
    unused: bool = False
    mixed: bool = False
    keep_grads: bool = False  # zero_grad(set_to_none=False)
    spec: HookSpec | None = None

    @property
    def hook_spec(self) -> HookSpec:
        return self.spec or SPECS[self.hook]


@dataclass
class Checkpoint:
    """Everything of one rank at one step boundary."""

    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rng: torch.Tensor
    hook: tuple[dict[str, torch.Tensor], Any]
    layout: list[list[str]] | None


class Run:
    """One rank's run: fresh, or resumed from ``checkpoint`` as a new process would (new module, DDP, optimizer and hook)."""

    def __init__(self, rank: int, case: Case, checkpoint: Checkpoint | None = None, *, pin: bool = True) -> None:
        self.rank, self.case = rank, case
        torch.manual_seed(1000 + rank)
        self.module = self.make_module()
        layout = checkpoint.layout if checkpoint and pin else None
        self.ddp, self.hook = managed_ddp(
            self.module,
            case.hook_spec,
            ddp={"bucket_cap_mb": case.cap, **case.ddp},
            device=torch.device("cpu"),
            recorded_layout=layout,
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.step = 0
        if checkpoint is not None:
            self.load(checkpoint, relayout=not pin)

    def make_module(self) -> nn.Module:
        return MixedNet() if self.case.mixed else Net(turn=self.case.turn, unused=self.case.unused)

    def load(self, checkpoint: Checkpoint, *, relayout: bool = False) -> None:
        self.module.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        torch.set_rng_state(checkpoint.rng)
        self.hook.restore(*checkpoint.hook, relayout=relayout)
        self.step = checkpoint.step

    def save(self) -> Checkpoint:
        hook = self.hook.capture()
        model = {k: v.clone() for k, v in self.module.state_dict().items()}
        optimizer = {**self.optimizer.state_dict()}
        optimizer["state"] = {
            k: {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in s.items()}
            for k, s in optimizer["state"].items()
        }
        return Checkpoint(self.step, model, optimizer, torch.get_rng_state(), hook, self.hook.layout())

    def train(self, until: int) -> None:
        while self.step < until:
            self.one_step()

    def one_step(self) -> None:
        for micro in range(self.case.accumulate):
            last = micro == self.case.accumulate - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                x, y = self.batch(micro)
                nn.functional.cross_entropy(self.ddp(x, self.step), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.case.keep_grads)
        self.end_step()

    def end_step(self) -> None:
        self.hook.average_parameters()
        self.step += 1

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100_000 * micro + 1000 * self.step + self.rank)
        x = torch.randn(16, 64, generator=generator)
        return x, x[:, :10].abs().argmax(1)


def differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Names of everything that is not bit for bit equal in two checkpoints of one rank."""
    out = [f"model.{k}" for k in a.model if not bitwise_equal(a.model[k], b.model[k])]
    for key, state in a.optimizer["state"].items():
        out += [f"optimizer.{key}.{n}" for n, v in state.items() if not bitwise_equal(v, b.optimizer["state"][key][n])]
    out += [] if torch.equal(a.rng, b.rng) else ["rng"]
    tensors, data = a.hook
    others, other = b.hook
    out += [f"hook.{k}" for k in sorted(set(tensors) ^ set(others))]
    out += [f"hook.{k}" for k in tensors if k in others and not bitwise_equal(tensors[k], others[k])]
    out += [] if data == other else ["hook.json"]
    out += [] if a.layout == b.layout else ["layout"]
    return out


def bitwise_equal(a: object, b: object) -> bool:
    """Equal, tensors bit for bit (a NaN equals itself)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*flat)
    return a == b


def resume_differences(rank: int, case: Case, total: int, kills: list[int]) -> dict[int, list[str]]:
    """For every step of ``kills``: what differs at ``total`` between an undisturbed run and one resumed there.

    The undisturbed run takes no checkpoint on its way; the one that gives the checkpoints goes on and is compared too.
    """
    whole = Run(rank, case)
    whole.train(total)
    expected = whole.save()
    saver, checkpoints = Run(rank, case), []
    for kill in kills:
        saver.train(kill)
        checkpoints.append(saver.save())
    saver.train(total)
    out = {-1: differences(expected, saver.save())}
    for checkpoint in checkpoints:
        resumed = Run(rank, case, checkpoint)
        resumed.train(total)
        out[checkpoint.step] = differences(expected, resumed.save())
    return {step: names for step, names in out.items() if names}


def bucket_count(rank: int, case: Case) -> int:
    """Number of buckets that the case has once it is rebuilt."""
    run = Run(rank, case)
    run.train(1)
    return len(run.hook.layout() or [])
