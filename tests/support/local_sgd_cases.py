"""Post-local SGD in real ranks: under a managed hook, and as one writes it by hand with torch's own parts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.ddp.parameter_averaging import average_in_place
from ratchet_hooks.ddp.process_groups import timeout_of
from ratchet_hooks.manage.convert_state import convert_state
from ratchet_hooks.manage.managed_ddp import managed_ddp
from ratchet_hooks.specs.compatibility import hook_change
from ratchet_hooks.specs.hook_specs import PostLocalSGDSpec
from tests.support.hook_cases import MANY_BUCKETS, Case, Run, bitwise_equal
from tests.support.hook_properties import weights

START = 3


def local_sgd_spec(**parameters: Any) -> PostLocalSGDSpec:
    return PostLocalSGDSpec(start_localSGD_iter=START, **{"subgroup_size": 2, **parameters})


SPECS = {
    "periodic": local_sgd_spec(model_averaging_period=2),
    "alone": local_sgd_spec(model_averaging_period=3, post_local_gradient_allreduce=False),
    "levels": local_sgd_spec(period_group_size_dict={2: 2, 4: 4}, post_local_gradient_allreduce=False),
    "at once": PostLocalSGDSpec(start_localSGD_iter=0, subgroup_size=2),
}
TOTAL = 10


def case_of(name: str, **changes: Any) -> Case:
    return Case(hook="post_localSGD", spec=SPECS[name], cap=MANY_BUCKETS, **changes)


class HandWritten(Run):
    """Plain DDP, torch's hook and averager, put together as torch's documentation does: averaged before ``zero_grad``."""

    def __init__(self, rank: int, case: Case, *, subgroup: dist.ProcessGroup | None, averager: Any) -> None:
        torch.manual_seed(1000 + rank)
        self.rank, self.case, self.step = rank, case, 0
        self.module = self.make_module()
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=case.cap, **case.ddp)  # type: ignore[assignment,arg-type]
        spec: Any = case.hook_spec
        state = PostLocalSGDState(None, subgroup, spec.start_localSGD_iter, spec.post_local_gradient_allreduce)  # type: ignore[no-untyped-call]
        self.ddp.register_comm_hook(state, post_localSGD_hook)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.averager = averager

    def one_step(self) -> None:
        x, y = self.batch(0)
        nn.functional.cross_entropy(self.ddp(x, self.step), y).backward()
        self.optimizer.step()
        self.averager.average_parameters(self.ddp.parameters())
        self.optimizer.zero_grad()
        self.step += 1


def torch_averager(spec: PostLocalSGDSpec) -> Any:
    if spec.period_group_size_dict is not None:
        levels = dict(sorted(spec.period_group_size_dict.items()))
        return hierarchical_model_averager.HierarchicalModelAverager(levels, warmup_steps=spec.start_localSGD_iter)  # type: ignore[no-untyped-call]
    return averagers.PeriodicModelAverager(spec.period, warmup_steps=spec.start_localSGD_iter)  # type: ignore[no-untyped-call]


def differences_from_torch_parts(rank: int, name: str) -> dict[int, list[str]]:
    """By step: weights and buffers that differ from torch's own parts; at every step, since averaging hides what was before."""
    case = case_of(name)
    subgroup, _ = dist.new_subgroups(group_size=2)
    ours = Run(rank, case)
    theirs = HandWritten(rank, case, subgroup=subgroup, averager=torch_averager(SPECS[name]))
    out = {}
    for step in range(1, TOTAL + 1):
        for run in (ours, theirs):  # each with the generator of its own steps
            torch.manual_seed(100 * step + rank)
            run.train(step)
        mine, other = ours.module.state_dict(), theirs.module.state_dict()
        out[step] = [key for key in mine if not bitwise_equal(mine[key], other[key])]
    return {step: names for step, names in out.items() if names}


@dataclass(frozen=True)
class Seen:
    """One rank after one step: its weights as bytes, and what its summary says."""

    weights: bytes
    phase: str
    iteration: int
    averager_step: int | None
    next_averaging: int | None
    sent: int


def watch_steps(rank: int, name: str, steps: int = TOTAL, passes: int = 1) -> list[Seen]:
    """Every step of a run; ``passes``: synchronised backward passes in each."""
    run = Run(rank, case_of(name))
    out = []
    for _ in range(steps):
        for _ in range(passes - 1):
            nn.functional.cross_entropy(run.ddp(run.batch(0)[0], 0), run.batch(0)[1]).backward()
        run.one_step()
        said = run.hook.summary(rank=rank, step=run.step)
        flat = b"".join(w.numpy().tobytes() for w in weights(run).values())
        out.append(Seen(flat, said.phase, said.iteration, said.averager_step, said.next_averaging, said.bytes_after))
    return out


def differences_in_pairs(rank: int) -> list[str]:
    """Differences between a group of two made of every two ranks, and torch's parts on that group."""
    pair, _ = dist.new_subgroups(group_size=2)
    spec = PostLocalSGDSpec(start_localSGD_iter=1, subgroup_size=1, model_averaging_period=2)
    modules = []
    for own in (True, False):
        torch.manual_seed(dist.get_rank(pair))
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        ddp: Any
        if own:
            ddp, hook = managed_ddp(module, spec, process_group=pair, node_ranks=2)
            average = hook.average_parameters
        else:
            ddp = DistributedDataParallel(module, process_group=pair)
            ddp.register_comm_hook(PostLocalSGDState(pair, None, 1, False), post_localSGD_hook)  # type: ignore[no-untyped-call]
            stock = averagers.PeriodicModelAverager(2, warmup_steps=1, process_group=pair)  # type: ignore[no-untyped-call]
            average = lambda stock=stock, module=module: stock.average_parameters(module.parameters())  # noqa: E731
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            ddp(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
            optimizer.step()
            average()
        modules.append(module)
    mine, theirs = (module.state_dict() for module in modules)
    return [name for name in mine if not bitwise_equal(mine[name], theirs[name])]


def train_with_skipped_step(rank: int) -> tuple[int, int | None, bool]:
    """(optimizer steps done, averager step, equal to rank 0 at the end) where rank 1's gradients overflow once."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    spec = PostLocalSGDSpec(start_localSGD_iter=1, model_averaging_period=2, post_local_gradient_allreduce=False)
    ddp, hook = managed_ddp(module, spec)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler, done = torch.amp.GradScaler("cpu", init_scale=4.0), 0
    for step in range(6):
        x = torch.full((2, 4), float("inf") if (rank, step) == (1, 4) else 1.0 + rank)
        scaler.scale(ddp(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        before = module.weight.detach().clone()
        scaler.step(optimizer)
        done += not torch.equal(before, module.weight)
        scaler.update()
        optimizer.zero_grad()
        hook.average_parameters()
    first = module.weight.detach().clone()
    dist.broadcast(first, 0)
    return done, hook.summary(rank=rank, step=6).averager_step, torch.equal(first, module.weight)


def check_memory_kept(rank: int) -> dict[str, bool]:
    """What averaging must not touch: where a parameter lies, and in which order; and what evaluating on the mean leaves."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    module(torch.randn(2, 3, 8, 8))
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    spec = PostLocalSGDSpec(start_localSGD_iter=0, subgroup_size=1, model_averaging_period=2)
    ddp, hook = managed_ddp(module, spec)
    torch.manual_seed(rank)
    conv: Any = module[0]
    own = conv.weight.data_ptr(), conv.weight.stride(), id(conv.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(3):
        ddp(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < 2:
            hook.average_parameters()
    apart = [torch.empty_like(conv.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(apart, conv.weight.detach().contiguous(memory_format=torch.channels_last))
    kept = conv.weight.detach().clone()
    with hook.averaged_parameters():
        inside = conv.weight.detach().clone()
    return {
        "in place": own == (conv.weight.data_ptr(), conv.weight.stride(), id(conv.weight)),
        "replicas differ": not torch.equal(apart[0], apart[1]),
        "mean inside": torch.allclose(inside, torch.stack(apart).mean(0), atol=1e-6)
        and not bitwise_equal(inside, kept),
        "own afterwards": bitwise_equal(conv.weight.detach(), kept),
    }


def mean_over_three_equals_torch(rank: int) -> bool:
    """Are the bits torch's where the number of ranks is no power of two, and dividing before or after the sum is not the same?"""
    three = dist.new_group([0, 1, 2])
    if rank == 3:
        return True
    ours = nn.Linear(50, 40)
    with torch.no_grad():
        ours.weight.normal_(generator=torch.Generator().manual_seed(rank))
    theirs = copy.deepcopy(ours)
    average_in_place(list(ours.parameters()), three)
    average_parameters(iter(list(theirs.parameters())), three)
    return all(bitwise_equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def refusal_messages(rank: int) -> list[str]:
    """What is said to specs that do not fit four ranks, and to a state recorded under other parameters."""
    said = []
    for spec in (PostLocalSGDSpec(subgroup_size=3), PostLocalSGDSpec(period_group_size_dict={2: 2, 4: 8})):
        try:
            managed_ddp(nn.Linear(2, 2), spec)
        except ValueError as error:
            said.append(str(error))
    _, hook = managed_ddp(nn.Linear(2, 2), SPECS["periodic"])
    captured = hook.capture()
    asked = [(captured, SPECS[name], 4) for name in ("alone", "levels", "at once")]
    by_node = local_sgd_spec(subgroup_size=None)
    asked.append((managed_ddp(nn.Linear(2, 2), by_node, node_ranks=2)[1].capture(), by_node, 4))
    for before, spec, node_ranks in asked:
        try:
            managed_ddp(nn.Linear(2, 2), spec, captured=before, node_ranks=node_ranks)
        except ValueError as error:
            said.append(str(error))
    return said


def group_timeouts(rank: int) -> list[timedelta]:
    """Of the main group, of a subgroup, and of an averager's smaller level."""
    main = dist.group.WORLD
    assert main is not None
    _, hook = managed_ddp(nn.Linear(2, 2), local_sgd_spec(period_group_size_dict={2: 2, 4: 4}))
    algorithm: Any = hook._algorithm
    groups = [main, algorithm.state.subgroup, algorithm.averager._groups[2]]
    assert groups[1] is groups[2]  # one group per size
    return [timeout_of(group, torch.device("cpu")) for group in groups]


def resume_with_changed_start(rank: int, starts: list[int]) -> list[tuple[str, int | None, bool]]:
    """(phase, next averaging, were replicas to become their mean) of a hook that goes on with another start after step 6."""
    run, out, old = Run(rank, case_of("periodic")), [], SPECS["periodic"]
    run.train(6)
    tensors, data = run.hook.capture()
    for start in starts:
        new = replace(old, start_localSGD_iter=start)
        change = hook_change(old.name, old.values(), new)
        assert change is not None
        ddp, hook = managed_ddp(
            run.make_module(), new, ddp={"bucket_cap_mb": MANY_BUCKETS}, recorded_layout=run.hook.layout()
        )
        hook.restore(*convert_state(tensors, data, change, old, new, ddp.trained_parameters()))
        said = hook.summary(rank=rank, step=6)
        out.append((said.phase, said.next_averaging, change.averages))
    return out
