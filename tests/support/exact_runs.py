"""One row of the exactness matrix, run inside the ranks of ``tests.support.gloo_ranks``: undisturbed, and interrupted again and
again. ``train_until_killed`` and ``resume_and_compare`` are the two ends of a SIGKILL: the state goes through a file to other
processes. ``run_row`` is quicker: it restores new objects of the same process.

The state goes through the worker's own ``JobState`` and through JSON, as it does on its way to a checkpoint and back.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.state.files import load_state, save_state
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state.hook_transfer import StateTransfer
from ratchet_worker.state.snapshot import Snapshot, digest
from tests.support.exact_matrix import Row, hook_spec
from tests.support.exact_models import FEATURES, MODELS, make_optimizers
from tests.support.hook_cases import bitwise_equal

CPU = torch.device("cpu")
BUCKETS = {"one": 25.0, "several": 0.004, "each": 1e-6}  # MiB
CHANGE = 3  # the step from which gradients become ready in another order, or ``spare`` is frozen
_AUTOCAST = {"bf16": torch.bfloat16, "fp16-scaler": torch.float16}


@dataclass
class Saved:
    """What a checkpoint holds of one rank."""

    step: int
    shared: dict[str, torch.Tensor]
    private: dict[str, torch.Tensor]
    state: str
    layout: Layout | None

    def snapshot(self) -> Snapshot:
        return Snapshot(dict(self.shared), dict(self.private), json.loads(self.state))


class Run:
    """One rank's run on ``device``: from scratch, or from ``saved`` as a new process would."""

    def __init__(self, rank: int, world: int, row: Row, saved: Saved | None = None, device: torch.device = CPU) -> None:
        self.rank, self.row, self.step, self.device = rank, row, 0, device
        torch._dynamo.reset()  # a new process has compiled nothing
        torch.manual_seed(1000 + rank + 10 * (saved is not None))
        module = MODELS[row["model"]]().to(device)
        self.net = module
        if row["compile"] == "inside":
            module.compile(backend="aot_eager")
        self.ddp, self.hook = managed_ddp(
            module, hook_spec(row["hook"], world), ddp=_ddp(row), device=device, node_ranks=2 if world == 4 else world,
            recorded_layout=saved.layout if saved is not None else None,
        )  # fmt: skip
        self.model: Callable[..., torch.Tensor] = self.ddp
        if row["compile"] == "outside":
            self.model = torch.compile(self.ddp, backend="aot_eager")
        self.optimizers = make_optimizers(row["optimizer"], module.parameters())
        self.scaler = None
        if row["precision"] == "fp16-scaler":
            self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)  # type: ignore[attr-defined]
        self.state = JobState(rank, device)
        self.state.set_model(self.ddp, self.hook)
        for number, optimizer in enumerate(self.optimizers):
            self.state.register(f"user:{number}", optimizer)
        if self.scaler is not None:
            self.state.register("scaler", self.scaler)
        if saved is not None:
            reports = self.state.restore(saved.snapshot(), StateTransfer())
            assert all(report.status == "exact" for report in reports), reports
            self.step = saved.step

    def save(self) -> Saved:
        layout = self.hook.layout()
        captured = self.state.capture()
        return Saved(
            self.step,
            row_major_copies(captured.shared),
            row_major_copies(captured.private),
            json.dumps(captured.state),
            layout,
        )

    def train(self, until: int) -> None:
        while self.step < until:
            if self.row["graph"] == "find-freeze" and self.step == CHANGE:
                self.net.spare.requires_grad_(False)
            for optimizer in self.optimizers:
                self.one_update(optimizer)
            self.step += 1

    def one_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.row["optimizer"] == "lbfgs":
            optimizer.step(lambda: self.gradients(fresh=True))
        elif optimizer is self.optimizers[0]:
            self.gradients()
        if optimizer is not self.optimizers[-1]:
            return
        for each in self.optimizers:
            if self.scaler is not None:
                self.scaler.step(each)
            elif self.row["optimizer"] != "lbfgs":
                each.step()
        if self.scaler is not None:
            self.scaler.update()
        self.hook.average_parameters()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.row["grads"] == "none")

    def gradients(self, *, fresh: bool = False) -> float:
        """The loss of all micro-batches, and its gradients; ``fresh``: without what is there."""
        if fresh:
            self.zero_grad()
        total, count = 0.0, 1 if self.row["accumulate"] == "one" else 2
        for micro in range(count):
            apart = self.row["accumulate"] == "no_sync" and micro < count - 1
            with self.ddp.no_sync() if apart else contextlib.nullcontext():
                loss = self.loss(micro)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def loss(self, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100_000 * micro + 1000 * self.step + self.rank)
        x = torch.randn(8, FEATURES, generator=generator).to(self.device)
        dtype = _AUTOCAST.get(self.row["precision"])
        with contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype):
            out = self.model(x, self.spare(), self.row["graph"].endswith("-turn") and self.step >= CHANGE)
        return cross_entropy(out.float(), x[:, :6].abs().argmax(1))

    def spare(self) -> bool:
        """Does this rank use the layer ``spare`` in this step?"""
        graph = self.row["graph"]
        if graph.endswith("-unused"):
            return False
        if graph == "find-steps":
            return self.step % 2 == 0
        return self.rank == 0 if graph == "find-ranks" else True


def _ddp(row: Row) -> dict[str, Any]:
    return {
        "bucket_cap_mb": BUCKETS[row["buckets"]],
        "static_graph": row["graph"].startswith("static"),
        "find_unused_parameters": row["graph"].startswith("find"),
        "gradient_as_bucket_view": row["views"] == "views",
        "broadcast_buffers": row["buffers"] == "broadcast",
    }


def row_major_copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Row-major and on the CPU, as a file holds them."""
    return {name: t.detach().clone(memory_format=torch.contiguous_format).cpu() for name, t in tensors.items()}


def differences(a: Saved, b: Saved) -> list[str]:
    """Names of everything that is not bit for bit equal in two checkpoints of one rank."""
    out = [] if a.layout == b.layout else ["layout"]
    for ours, theirs in ((a.shared, b.shared), (a.private, b.private)):
        out += sorted(set(ours) ^ set(theirs))
        out += [name for name in ours if name in theirs and not bitwise_equal(ours[name], theirs[name])]
    ours, theirs = json.loads(a.state), json.loads(b.state)
    return out + [f"state of {key}" for key in sorted(set(ours) | set(theirs)) if ours.get(key) != theirs.get(key)]


@dataclass
class Result:
    """What one rank saw. ``digest``: of what must be equal on all ranks; ``finite``: no weight became inf or NaN, which would
    make any two runs alike; ``moved``: training changed weights; ``buckets`` and the ``parameters`` in them; ``tensors``: how
    many were compared."""

    different: list[str]
    digest: str | None
    finite: bool
    moved: bool
    buckets: int
    parameters: int
    tensors: int


def run_row(
    rank: int, world: int, row: Row, total: int, saves: list[int], kills: list[int], spoil: str | None = None
) -> Result:
    """What differs after ``total`` steps between an undisturbed run and one that is saved after each step of ``saves`` and
    interrupted after each of ``kills``, where new objects of this process continue from the save. ``spoil``: of the last save
    one bit is turned, in the first tensor whose name begins so."""
    whole = _undisturbed(rank, world, row, total)
    run = Run(rank, world, row)
    for step in sorted({*saves, *kills}):
        run.train(step)
        saved = run.save()
        if step in kills:
            if spoil is not None and step == max(kills):
                _spoil(saved, spoil)
            run = Run(rank, world, row, saved)
    run.train(total)
    return _compare(whole, run)


def run_undisturbed(rank: int, world: int, row: Row, total: int, target: str, device: torch.device = CPU) -> None:
    """Write the end of an undisturbed run to the directory ``target``, in a file for each rank."""
    save_state(state_file(target, rank), asdict(_undisturbed(rank, world, row, total, device)))


def train_until_killed(
    rank: int, world: int, row: Row, source: str | None, saves: list[int], step: int, target: str
) -> None:
    """Continue from the file ``source`` (None: from scratch) to ``step``, and write the state to ``target``. Then train one more
    step, which is lost: the caller kills the ranks. Both are directories with a file for each rank. ``saves``: steps after which
    the state is only captured."""
    run = Run(rank, world, row, None if source is None else _read(source, rank))
    for each in sorted(each for each in saves if run.step < each < step):
        run.train(each)
        run.save()
    run.train(step)
    save_state(state_file(target, rank), asdict(run.save()))
    run.train(step + 1)


def resume_and_compare(
    rank: int,
    world: int,
    row: Row,
    source: str,
    undisturbed: str,
    saves: list[int],
    total: int,
    spoil: str | None = None,
    device: torch.device = CPU,
) -> Result:
    """What differs after ``total`` steps between the run that continues from the directory ``source`` and the one that
    ``run_undisturbed`` has written to ``undisturbed``. ``saves``, ``spoil``: as above."""
    saved = _read(source, rank)
    if spoil is not None:
        _spoil(saved, spoil)
    run = Run(rank, world, row, saved, device)
    for each in sorted(each for each in saves if each > run.step):
        run.train(each)
        run.save()
    run.train(total)
    whole = load_state(state_file(undisturbed, rank))
    return _compare(Whole(**{**whole, "saved": Saved(**whole["saved"])}), run)


def state_file(directory: str, rank: int) -> Path:
    return Path(directory, f"rank-{rank}.safetensors")


def _read(directory: str, rank: int) -> Saved:
    return Saved(**load_state(state_file(directory, rank)))


@dataclass
class Whole:
    """The end of an undisturbed run. ``finite``, ``moved``: as of ``Result``."""

    saved: Saved
    finite: bool
    moved: bool


def _undisturbed(rank: int, world: int, row: Row, total: int, device: torch.device = CPU) -> Whole:
    run = Run(rank, world, row, device=device)
    first = [p.detach().clone() for p in run.net.parameters()]
    run.train(total)
    finite = all(bool(p.isfinite().all()) for p in run.net.parameters())
    moved = any(not torch.equal(a, b) for a, b in zip(first, run.net.parameters(), strict=True))
    return Whole(run.save(), finite, moved)


def _compare(whole: Whole, run: Run) -> Result:
    expected = whole.saved
    equal = digest(expected.shared.values()) if expected.shared else None
    layout = expected.layout or []
    parameters, tensors = sum(len(bucket) for bucket in layout), len(expected.shared) + len(expected.private)
    different = differences(expected, run.save())
    return Result(different, equal, whole.finite, whole.moved, len(layout), parameters, tensors)


def _spoil(saved: Saved, prefix: str) -> None:
    tensors = {**saved.shared, **saved.private}
    tensor = next(tensors[name] for name in sorted(tensors) if name.startswith(prefix) and tensors[name].numel())
    tensor.view(-1).view(torch.uint8)[2] ^= 1  # not a float32 number's last bit, which the next sum may round away
