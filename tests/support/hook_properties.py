"""What a hook must and must not do, as functions for the ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.algorithms.user_import import find_hook
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.hook_specs import CustomSpec, PostLocalSGDSpec, PowerSGDSpec
from tests.support.hook_cases import ONE_BUCKET, Case, Checkpoint, Run, bitwise_equal, differences

CPU = torch.device("cpu")


STOCK: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "powerSGD": torch_powersgd.powerSGD_hook,
    "post_localSGD": post_localSGD_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "noop": debugging_hooks.noop_hook,
}


def renamed_hook(stock: Callable[..., Any]) -> Callable[..., Any]:
    """torch's hook by another name: DDP refuses bfloat16 on the CPU by the function's."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return stock(state, bucket)

    return hook


class StockRun(Run):
    """The same training under plain DDP and torch's own hook, as people do without this package."""

    def __init__(self, rank: int, case: Case, *, hook: bool = True) -> None:
        torch.manual_seed(1000 + rank)
        self.rank, self.case, self.step = rank, case, 0
        self.module = self.make_module()
        self.stock = DistributedDataParallel(self.module, bucket_cap_mb=case.cap, **case.ddp)  # type: ignore[arg-type]
        self.ddp = self.stock  # type: ignore[assignment]
        self.state: Any = None
        self.averager: Any = None
        wrapper = case.hook_spec.wrapper
        if isinstance(case.hook_spec, CustomSpec):
            self.state = dist.group.WORLD
        elif isinstance(case.hook_spec, PostLocalSGDSpec):
            start, period = case.hook_spec.start_localSGD_iter, case.hook_spec.period
            self.averager = PeriodicModelAverager(period, start)  # type: ignore[no-untyped-call]
            self.state = PostLocalSGDState(dist.group.WORLD, None, start, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        elif case.hook == "powerSGD":
            self.state = torch_powersgd.PowerSGDState(None, **case.hook_spec.parameters())
        if case.hook != "allreduce" or wrapper is not None:  # whose bits are those of DDP without a hook
            stock = find_hook(case.hook_spec.hook) if isinstance(case.hook_spec, CustomSpec) else STOCK[case.hook]
            stock = stock if wrapper is None else getattr(default_hooks, wrapper)(stock)
            self.stock.register_comm_hook(self.state, renamed_hook(stock))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)

    def end_step(self) -> None:
        if self.averager is not None:
            self.averager.average_parameters(list(self.module.parameters()))  # type: ignore[no-untyped-call]
        self.step += 1


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.module.named_parameters()}


def weight_bits(rank: int, case: Case, steps: int) -> dict[str, bytes]:
    run = Run(rank, case)
    run.train(steps)
    return {name: weight.numpy().tobytes() for name, weight in weights(run).items()}


def differences_from_torch(rank: int, case: Case, steps: int) -> list[str]:
    """Names of weights that differ from plain DDP with torch's hook after ``steps``."""
    ours = Run(rank, case)
    ours.train(steps)
    stock = StockRun(rank, case)
    stock.train(steps)
    mine, theirs = weights(ours), weights(stock)
    return [name for name in mine if not bitwise_equal(mine[name], theirs[name])]


def differences_from_torch_in_one_thread(rank: int, case: Case, steps: int) -> list[str]:
    """Like ``differences_from_torch``, with torch's callbacks in this thread too: stock runs them in gloo's, in other bits."""
    real = dist.all_reduce

    def finished(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        if work is not None:
            work.get_future().wait()
        return work

    dist.all_reduce = finished
    try:
        return differences_from_torch(rank, case, steps)
    finally:
        dist.all_reduce = real


def count_distinct_results(rank: int, case: Case, steps: int, times: int) -> int:
    """How many different results ``times`` equal runs give."""
    results: list[Checkpoint] = []
    for _ in range(times):
        run = Run(rank, case)
        run.train(steps)
        done = run.save()
        if all(differences(done, other) for other in results):
            results.append(done)
    return len(results)


def documented_recipe_difference(rank: int, kill: int, total: int) -> float:
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


def resumes_identically_after(
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
    return all(bitwise_equal(mine[name], theirs[name]) for name in mine)


def check_residual_law(rank: int, case: Case, warm_up: int) -> tuple[list[str], list[bytes], float]:
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
        if not bitwise_equal(fed - averaged.grad, after[f"residual/{name}"]):
            broken.append(name)
        applied.append(averaged.grad.numpy().tobytes())
    return broken, applied, run.hook.summary(rank=rank, step=run.step).residual_norm or 0.0


def mismatched_factors(rank: int, batched: bool) -> list[str]:
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
        run.make_module(), case.hook_spec, ddp={"bucket_cap_mb": case.cap}, device=CPU, recorded_layout=data["layout"]
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
        out.append(run.hook.summary(rank=rank, step=run.step).values())
    return out
