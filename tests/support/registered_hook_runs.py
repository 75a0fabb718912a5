"""Runs under hooks that are registered on DDP instances made elsewhere, to be run inside ranks of
``tests.support.gloo_ranks``."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.manage.register import register, restore
from tests.support.hook_cases import Case, Checkpoint, Run, differences


class RegisteredRun(Run):
    """One rank's run on a plain DDP, which is put under its hook afterwards."""

    def __init__(self, rank: int, case: Case, checkpoint: Checkpoint | None = None) -> None:
        self.rank, self.case = rank, case
        torch.manual_seed(1000 + rank)
        self.module = self.make_module()
        self.ddp = plain_ddp(self.module, bucket_cap_mb=case.cap, **case.ddp)
        self.hook = self.register_hook()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.step = 0
        if checkpoint is not None:
            self.load(checkpoint)

    def register_hook(self) -> Any:
        return register(self.ddp, self.case.hook_spec)

    def load(self, checkpoint: Checkpoint, *, relayout: bool = False) -> None:
        self.module.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        torch.set_rng_state(checkpoint.rng)
        restore(self.ddp, checkpoint.hook)
        self.step = checkpoint.step


def plain_ddp(module: nn.Module, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return DistributedDataParallel(module, **kwargs)


def registered_differences(rank: int, case: Case, total: int, kill: int) -> list[str]:
    """What differs at ``total`` from a run under ``managed_ddp``: in a registered run, in one resumed at ``kill`` from its
    checkpoint, and in one resumed from the checkpoint of the managed run."""
    managed = Run(rank, case)
    managed.train(kill)
    theirs = managed.save()
    managed.train(total)
    expected = managed.save()
    whole = RegisteredRun(rank, case)
    whole.train(kill)
    ours = whole.save()
    whole.train(total)
    out = [f"whole {name}" for name in differences(expected, whole.save())]
    for kind, checkpoint in (("ours", ours), ("theirs", theirs)):
        resumed = RegisteredRun(rank, case, checkpoint)
        resumed.train(total)
        out += [f"{kind} {name}" for name in differences(expected, resumed.save())]
    return out


class Momentum:
    """State of a hook of one's own: a running average of every bucket."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.running: dict[int, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"share": self.share, "running": self.running}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.share, self.running = state["share"], state["running"]


def _own(state, bucket):  # type: ignore[no-untyped-def]
    def keep(done: Any) -> torch.Tensor:
        before = state.running.get(bucket.index(), torch.zeros_like(done.value()))
        state.running[bucket.index()] = state.share * before + done.value()
        return state.running[bucket.index()].clone()

    return default.allreduce_hook(None, bucket).then(keep)


class OwnRun(RegisteredRun):
    """Under a function and a state that no import path names."""

    def register_hook(self) -> Any:
        return register(self.ddp, (Momentum(0.5), lambda state, bucket: _own(state, bucket)))


def custom_hook_differences(rank: int, case: Case, total: int, kill: int, *, forget: bool = False) -> list[str]:
    """What differs at ``total`` between a run under a hook of one's own and one resumed at ``kill``. ``forget``: without its
    state, which must differ."""
    whole = OwnRun(rank, case)
    whole.train(kill)
    checkpoint = whole.save()
    whole.train(total)
    if forget:
        checkpoint.hook[1]["state"]["data"] = OwnRun(rank, case).hook.capture()[1]["state"]["data"]
        checkpoint.hook[0].clear()
    resumed = OwnRun(rank, case, checkpoint)
    resumed.train(total)
    return differences(whole.save(), resumed.save())


class _Counting:
    """A hook with a state, as somebody registered it before."""

    def __init__(self) -> None:
        self.calls = 0


def _count(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not names
    state.calls += 1
    return default.allreduce_hook(None, bucket)


def leftovers_after_register(rank: int) -> dict[str, Any]:
    """What is left of the reducer, and of the hook, that stood on a DDP before ``register``."""
    torch.manual_seed(rank)
    state = _Counting()
    gone = weakref.ref(state)
    ddp = plain_ddp(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 4)), bucket_cap_mb=0.001)
    reference = plain_ddp(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 4)), bucket_cap_mb=0.001)
    reference.load_state_dict(ddp.state_dict())
    ddp.register_comm_hook(state, _count)
    hook = register(ddp, "allreduce")
    seen: list[int] = []
    inner = hook._on_bucket
    hook._on_bucket = lambda bucket: (seen.append(bucket.index()), inner(bucket))[1]  # type: ignore[func-returns-value, method-assign]
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    gradients: list[list[torch.Tensor]] = []
    for _ in range(2):  # on one bucket, then on those that DDP rebuilds
        seen.clear()
        gradients.clear()
        for model in (ddp, reference):
            model.zero_grad()
            model(x).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    calls = state.calls
    del state
    gc.collect()
    return {
        "calls": calls, "alive": gone() is not None, "buckets": seen, "name": type(ddp).__name__,
        "same": all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)),
        "logged": ddp._get_ddp_logging_data()["comm_hook"],
    }  # fmt: skip
