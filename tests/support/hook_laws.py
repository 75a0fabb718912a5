"""What a hook must and must not do, as functions for the ranks of ``tests.support.groups``."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import ratchet_hooks
from ratchet_hooks.build import HookStateError, LayoutMismatch, UnsupportedModel, managed_ddp
from ratchet_hooks.specs import AllreduceSpec, Fp16CompressSpec, HookSpec, PowerSGDSpec
from tests.support.hook_cases import MANY_BUCKETS, ONE_BUCKET, SPECS, Case, Checkpoint, Net, Run, differences, same

CPU = torch.device("cpu")


class StockRun(Run):
    """The same training under plain DDP and torch's own hook, as people do without this package."""

    def __init__(self, rank: int, case: Case, *, hook: bool = True) -> None:
        torch.manual_seed(1000 + rank)
        self.rank, self.case, self.step = rank, case, 0
        self.module = self.make_module()
        self.stock = DistributedDataParallel(self.module, bucket_cap_mb=case.cap, **case.ddp)  # type: ignore[arg-type]
        self.ddp = self.stock  # type: ignore[assignment]
        self.state: Any = None
        if case.hook == "fp16_compress":
            self.stock.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif case.hook == "powerSGD":
            self.state = torch_powersgd.PowerSGDState(None, **case.the_spec.model_dump(exclude={"name", "wrapper"}))
            self.stock.register_comm_hook(self.state, torch_powersgd.powerSGD_hook)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.module.named_parameters()}


def equals_stock(rank: int, case: Case, steps: int) -> list[str]:
    """Names of weights that differ from plain DDP with torch's hook after ``steps``."""
    ours = Run(rank, case)
    ours.train(steps)
    stock = StockRun(rank, case)
    stock.train(steps)
    mine, theirs = weights(ours), weights(stock)
    return [name for name in mine if not same(mine[name], theirs[name])]


def equals_stock_in_one_thread(rank: int, case: Case, steps: int) -> list[str]:
    """Like ``equals_stock``, with torch's callbacks in this thread too: stock runs them in gloo's, in other bits."""
    real = dist.all_reduce

    def finished(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        if work is not None:
            work.get_future().wait()
        return work

    dist.all_reduce = finished
    try:
        return equals_stock(rank, case, steps)
    finally:
        dist.all_reduce = real


def repeats(rank: int, case: Case, steps: int, times: int) -> int:
    """How many different results ``times`` equal runs give."""
    results: list[Checkpoint] = []
    for _ in range(times):
        run = Run(rank, case)
        run.train(steps)
        done = run.save()
        if all(differences(done, other) for other in results):
            results.append(done)
    return len(results)


def naive_recipe(rank: int, kill: int, total: int) -> float:
    """Largest weight difference after a resume as documented by PyTorch: rank 0's hook state on all ranks, plain DDP."""
    case = Case(hook="powerSGD", cap=ONE_BUCKET)
    whole = Run(rank, case)
    whole.train(total)
    first = Run(rank, case)
    first.train(kill)
    saved = first.save()
    logging.disable(logging.WARNING)
    states = [first.hook._algorithm.state.__getstate__() if rank == 0 else None]  # type: ignore[union-attr,no-untyped-call]
    dist.broadcast_object_list(states)
    resumed = StockRun(rank, case)
    resumed.module.load_state_dict(saved.model)
    resumed.optimizer.load_state_dict(saved.optimizer)
    torch.set_rng_state(saved.rng)
    resumed.state.__setstate__(copy.deepcopy(states[0]))
    logging.disable(logging.NOTSET)
    resumed.step = kill
    resumed.train(total)
    return max(
        float((a - b).abs().max()) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True)
    )


def change_residual_of_rank_1(rank: int, saved: Checkpoint) -> None:
    if rank == 1:
        _scale(saved, "residual/")


def change_q(rank: int, saved: Checkpoint) -> None:
    _scale(saved, "q/", permute=True)


def change_rng(rank: int, saved: Checkpoint) -> None:
    key = saved.hook[0]["state/rng.state.key"]
    key.copy_(key.flip(0))


def change_rank_1_rng(rank: int, saved: Checkpoint) -> None:
    if rank == 1:
        saved.rng = torch.Generator().manual_seed(5).get_state()


def change_iteration(rank: int, saved: Checkpoint) -> None:
    pairs = saved.hook[1]["state"]["slots"]["dict"]
    for pair in pairs:
        if pair[0] == "iter":
            pair[1] = 0


def change_nothing(rank: int, saved: Checkpoint) -> None:
    pass


def _scale(saved: Checkpoint, prefix: str, *, permute: bool = False) -> None:
    for name, tensor in saved.hook[0].items():
        if name.startswith(prefix):
            tensor.copy_(tensor.flip(0) if permute else tensor * 0.5)


def ablation(
    rank: int, case: Case, kill: int, total: int, change: Callable[[int, Checkpoint], None], pin: bool = True
) -> bool:
    """Whether the run resumed at ``kill`` after ``change`` still ends in the weights of the undisturbed one."""
    whole = Run(rank, case)
    whole.train(kill)
    saved = whole.save()
    change(rank, saved)
    whole.train(total)
    resumed = Run(rank, case, saved, pin=pin)
    resumed.train(total)
    mine, theirs = weights(whole), weights(resumed)
    return all(same(mine[name], theirs[name]) for name in mine)


def residual_law(rank: int, case: Case, warm_up: int) -> tuple[list[str], list[bytes], float]:
    """(parameters that break the law, what was applied, residual norm) in one compressed step."""
    run = Run(rank, case)
    run.train(warm_up)
    before = run.hook.capture()[0]
    alone = copy.deepcopy(run.module)
    rng = torch.get_rng_state()
    x, y = run.batch(0)
    nn.functional.cross_entropy(alone(x, run.step), y).backward()
    torch.set_rng_state(rng)
    nn.functional.cross_entropy(run.ddp(x, run.step), y).backward()
    after = run.hook.capture()[0]
    broken, applied = [], []
    for (name, mine), (_, averaged) in zip(alone.named_parameters(), run.module.named_parameters(), strict=True):
        assert mine.grad is not None and averaged.grad is not None
        fed = mine.grad + before[f"residual/{name}"]
        if not same(fed - averaged.grad, after[f"residual/{name}"]):
            broken.append(name)
        applied.append(averaged.grad.numpy().tobytes())
    return broken, applied, run.hook.summary(rank=rank, step=run.step).residual_norm or 0.0


def factors(rank: int, batched: bool) -> list[str]:
    """Parameters whose stored P and Q do not give what was applied; layers of equal shape do not stand side by side."""
    torch.manual_seed(rank)
    layers = [
        nn.Linear(48, 48),
        nn.Tanh(),
        nn.Linear(48, 32),
        nn.Tanh(),
        nn.Linear(32, 48),
        nn.Tanh(),
        nn.Linear(48, 48),
    ]
    spec = PowerSGDSpec(start_powerSGD_iter=2, matrix_approximation_rank=3, batch_tensors_with_same_shape=batched)
    ddp, hook = managed_ddp(nn.Sequential(*layers), spec, ddp={}, device=CPU)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.randn(16, 48)).square().mean().backward()
    tensors = hook.capture()[0]
    grads = {name: p.grad for name, p in ddp.module.named_parameters() if p.dim() == 2 and p.grad is not None}
    assert {f"q/{name}" for name in grads} == {name for name in tensors if name.startswith("q/")}
    products = {name: tensors[f"p/{name}"] @ tensors[f"q/{name}"].T for name in grads}
    return [name for name, grad in grads.items() if not torch.allclose(products[name], grad, rtol=1e-5, atol=1e-8)]


def capture_all(rank: int, case: Case, steps: int) -> tuple[Any, Any]:
    """The hook state of this rank with its weights; sent to the test process as numpy."""
    run = Run(rank, case)
    run.train(steps)
    tensors, data = run.hook.capture()
    return {name: t.numpy() for name, t in tensors.items()}, data


def restore_redistributed(rank: int, case: Case, arrays: dict[str, Any], data: Any, steps: int) -> dict[str, Any]:
    """Residuals of this rank right after restoring one redistributed state; then trains on."""
    torch.manual_seed(0)
    run = Run(rank, case, None)
    run.ddp, run.hook = managed_ddp(
        run.make_module(), case.the_spec, ddp={"bucket_cap_mb": case.cap}, device=CPU, recorded_layout=data["layout"]
    )
    run.module = run.ddp.module
    run.optimizer = torch.optim.SGD(run.module.parameters(), lr=0.05)
    run.hook.restore({name: torch.from_numpy(a) for name, a in arrays.items()}, data)
    again = {name: t.numpy() for name, t in run.hook.capture()[0].items() if name.startswith("residual/")}
    run.train(steps)
    assert all(torch.isfinite(w).all() for w in weights(run).values())
    return again


def summaries(rank: int, case: Case, steps: list[int]) -> list[dict[str, Any]]:
    run, out = Run(rank, case), []
    for step in steps:
        run.train(step)
        out.append(run.hook.summary(rank=rank, step=run.step).model_dump())
    return out


def overflow_warnings(rank: int) -> list[tuple[str, str, int]]:
    """A loss that is too large on rank 1 only, at the second step."""
    module = nn.Linear(4, 4)
    ddp, hook = managed_ddp(module, Fp16CompressSpec(), ddp={}, device=CPU)
    for step in range(3):
        factor = 1e6 if step == 1 and rank == 1 else 1.0
        (ddp(torch.ones(2, 4)).sum() * factor).backward()
        ddp.zero_grad()
    return [(w.code, w.parameter, w.iteration) for w in hook.warnings()]


def zero_gradient_warnings(rank: int, epsilon: float) -> tuple[set[tuple[str, str, int]], bool]:
    """A parameter that no rank uses, under PowerSGD: (warnings, whether the residuals stayed finite)."""
    spec = PowerSGDSpec(start_powerSGD_iter=2, orthogonalization_epsilon=epsilon)
    case = Case(hook="powerSGD", cap=MANY_BUCKETS, spec=spec, unused=True, ddp={"find_unused_parameters": True})
    run = Run(rank, case)
    run.train(4)
    tensors = run.hook.capture()[0]
    return {(w.code, w.parameter, w.iteration) for w in run.hook.warnings()}, all(
        bool(t.isfinite().all()) for t in tensors.values()
    )


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


REFUSALS: dict[str, tuple[Callable[[], nn.Module], HookSpec, dict[str, object], str]] = {
    "sparse": (lambda: nn.Embedding(4, 4, sparse=True), AllreduceSpec(), {}, "weight produces sparse gradients"),
    "scalar": (Scalar, SPECS["powerSGD"], {}, "scale has shape"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), Fp16CompressSpec(), {}, "weight is complex"),
    "option": (
        lambda: nn.Linear(2, 2),
        AllreduceSpec(),
        {"mixed_precision": 1},
        "DDP option mixed_precision is not managed",
    ),
    "both": (
        lambda: nn.Linear(2, 2),
        AllreduceSpec(),
        {"static_graph": True, "find_unused_parameters": True},
        "give only one",
    ),
}


def refused(rank: int, name: str) -> str:
    make, spec, ddp, _ = REFUSALS[name]
    try:
        managed_ddp(make(), spec, ddp=ddp, device=CPU)
    except UnsupportedModel as exc:
        return str(exc)
    return "accepted"


def static_graph_under_no_sync(rank: int) -> str:
    ddp, _ = managed_ddp(nn.Linear(2, 2), AllreduceSpec(), ddp={"static_graph": True}, device=CPU)
    with torch.no_grad(), ddp.no_sync():
        ddp(torch.ones(1, 2))  # an evaluation is allowed
    try:
        with ddp.no_sync():
            ddp(torch.ones(1, 2)).sum().backward()
    except UnsupportedModel as exc:
        return str(exc)
    return "accepted"


def mismatches(rank: int) -> dict[str, tuple[str, str]]:
    """(key, message) of every way to restore into the wrong place."""
    case = Case(hook="powerSGD", cap=MANY_BUCKETS)
    run = Run(rank, case)
    run.train(5)
    tensors, data = run.hook.capture()
    layout = run.hook.layout()

    def attempt(act: Callable[[], object]) -> tuple[str, str]:
        try:
            act()
        except HookStateError as exc:
            return exc.key, str(exc)
        return "", "accepted"

    def build(
        module: nn.Module | None = None, spec: HookSpec | None = None, cap: float = MANY_BUCKETS, pin: bool = True
    ) -> Any:
        ddp = {"bucket_cap_mb": cap}
        recorded = layout if pin else None
        return managed_ddp(module or Net(), spec or case.the_spec, ddp=ddp, device=CPU, recorded_layout=recorded)[1]

    wide = Net()
    wide.extra = nn.Linear(3, 3)
    without = {name: t for name, t in tensors.items() if name != "residual/left.weight"}
    reshaped = {**tensors, "residual/left.weight": tensors["residual/left.weight"].flatten()}
    return {
        "newer": attempt(lambda: build().restore(tensors, {**data, "version": 99})),
        "not a state": attempt(lambda: build().restore(tensors, [])),
        "other hook": attempt(lambda: build(spec=AllreduceSpec()).restore(tensors, data)),
        "other rank": attempt(lambda: build(spec=PowerSGDSpec(start_powerSGD_iter=3)).restore(tensors, data)),
        "missing": attempt(lambda: build().restore(without, data)),
        "reshaped": attempt(lambda: build().restore(reshaped, data)),
        "left over": attempt(lambda: build().restore({**tensors, "residual/none": torch.ones(1)}, data)),
        "other model": attempt(lambda: build(module=wide)),
        "other model at restore": attempt(lambda: build(module=wide, pin=False).restore(tensors, data)),
        "other cap": attempt(lambda: build(cap=ONE_BUCKET)),
        "not pinned": attempt(lambda: build(pin=False).restore(tensors, data)),
        "laid out anew": attempt(lambda: build(cap=ONE_BUCKET, pin=False).restore(tensors, data, relayout=True)),
    }


class OtherBucket:
    """A bucket as another layout would hand it to the hook: in the place of bucket 0, with the parameters of bucket 1."""

    def __init__(self, run: Run) -> None:
        names = (run.hook.layout() or [])[1]
        self._parameters = [run.module.get_parameter(name) for name in names]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return False

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return torch.zeros(sum(p.numel() for p in self._parameters))


def foreign_bucket(rank: int) -> tuple[str, bool]:
    """A bucket of another layout reaches the hook: (the error, whether the hook's state was left alone)."""
    run = Run(rank, Case(hook="powerSGD", cap=MANY_BUCKETS))
    run.train(5)
    before = run.hook.capture()[0]
    try:
        run.hook.on_bucket(None, OtherBucket(run))
    except LayoutMismatch as exc:
        return str(exc), all(same(t, before[name]) for name, t in run.hook.capture()[0].items())
    return "", False


def capture_mid_backward(rank: int) -> str:
    run = Run(rank, Case(cap=MANY_BUCKETS))
    run.train(2)
    said: list[str] = []

    def probe(_: torch.Tensor) -> None:
        try:
            run.hook.capture()
        except RuntimeError as exc:
            said.append(str(exc))

    run.module.get_parameter("first.weight").register_hook(probe)  # reduced last: other buckets are under way
    run.one_step()
    return said[0] if said else ""


def save_to_disk(rank: int, directory: str, steps: int) -> None:
    """The script of the package's docstring, up to ``steps``; goes on from what the directory holds."""
    text = ratchet_hooks.__doc__ or ""
    source = "\n".join(line[4:] for line in text.split("\n\n", 2)[2].splitlines())
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "ratchet_hooks.__doc__", "exec"), scope)
    scope["train"](Path(directory), steps)


def environment(rank: int) -> tuple[int, int, int]:
    return rank, dist.get_world_size(), os.getppid()


def die_or_wait(rank: int, how: str) -> None:
    """Rank 1 ends badly; rank 0 waits for it in a collective."""
    if rank == 1 and how == "raise":
        raise ValueError("said by rank one")
    if rank == 1 and how == "exit":
        os._exit(7)
    dist.barrier()
