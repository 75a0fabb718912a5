"""Runs under hooks that are registered on DDP instances made elsewhere, to be run inside ranks of ``tests.support.groups``."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.registration import capture, hook_of, register, resolve, restore
from tests.support.hook_cases import Case, Checkpoint, Net, Run, differences


class RegisteredRun(Run):
    """One rank's run on a plain DDP, which is put under its hook afterwards."""

    def __init__(self, rank: int, case: Case, checkpoint: Checkpoint | None = None) -> None:
        self.rank, self.case = rank, case
        torch.manual_seed(1000 + rank)
        self.module = self.make_module()
        self.ddp = plain_ddp(self.module, bucket_cap_mb=case.cap, **case.ddp)
        self.hook = self.put_hook()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.step = 0
        if checkpoint is not None:
            self.load(checkpoint)

    def put_hook(self) -> Any:
        return register(self.ddp, self.case.the_spec)

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


def documented(rank: int, recipe: str, total: int, kill: int) -> float:
    """Largest difference of a weight between a run and one resumed at ``kill`` as PyTorch's page does (``documented``: rank 0's
    model and hook state, everywhere), or with Ratchet's three lines (``ratchet``). One bucket, which the stock hook can do."""
    whole = _Script(rank, recipe)
    whole.train(kill)
    saved = whole.save()
    whole.train(total)
    resumed = _Script(rank, recipe)
    resumed.load(saved)
    resumed.train(total)
    pairs = zip(whole.net.parameters(), resumed.net.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class _Script:
    """A script after the example of PyTorch's page, with optimizer and generator saved as well."""

    def __init__(self, rank: int, recipe: str) -> None:
        self.rank, self.recipe, self.step = rank, recipe, 0
        torch.manual_seed(rank)
        self.net = Net()
        self.ddp: Any = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        if recipe == "ratchet":
            register(self.ddp, (self.state, power_sgd.powerSGD_hook))
        elif recipe == "documented":
            self.registered = False

    def save(self) -> Any:
        state = {
            "model": {k: v.clone() for k, v in self.net.state_dict().items()}, "rng": torch.get_rng_state(), "step": self.step,
            "optimizer": _copied(self.optimizer.state_dict()),
        }  # fmt: skip
        if self.recipe == "ratchet":
            return {**state, "hook": capture(self.ddp)}
        file = io.BytesIO()
        torch.save({**state, "comm_hook": power_sgd.powerSGD_hook, "comm_hook_state": self.state}, file)
        content = [file.getvalue()]
        dist.broadcast_object_list(content)  # rank 0's file is what all ranks load
        return content[0]

    def load(self, saved: Any) -> None:
        if self.recipe == "documented":
            saved = torch.load(io.BytesIO(saved), weights_only=False)
            self.state = saved["comm_hook_state"]
        else:
            restore(self.ddp, saved["hook"])
        self.net.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        self.step = saved["step"]

    def train(self, until: int) -> None:
        if self.recipe == "documented" and not self.registered:
            self.ddp.register_comm_hook(self.state, power_sgd.powerSGD_hook)
            self.registered = True
        while self.step < until:
            generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
            x = torch.randn(16, 64, generator=generator)
            nn.functional.cross_entropy(self.ddp(x, self.step), x[:, :10].abs().argmax(1)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: _copied(v) for k, v in state.items()}
    return [_copied(v) for v in state] if isinstance(state, list) else state


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

    def put_hook(self) -> Any:
        return register(self.ddp, (Momentum(0.5), lambda state, bucket: _own(state, bucket)))


def own_differences(rank: int, case: Case, total: int, kill: int, *, forget: bool = False) -> list[str]:
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


def taken_over(rank: int) -> dict[str, Any]:
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


def spec_from(rank: int, name: str) -> dict[str, Any]:
    """The spec that a row of ``OBJECTS`` becomes."""
    return resolve(plain_ddp(nn.Linear(4, 4)), **OBJECTS[name]()).model_dump(exclude_unset=True)


def _power_sgd() -> power_sgd.PowerSGDState:
    return power_sgd.PowerSGDState(
        None, matrix_approximation_rank=3, start_powerSGD_iter=8, use_error_feedback=False, random_seed=5
    )


OBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "allreduce": lambda: {"hook": default.allreduce_hook},
    "fp16": lambda: {"hook": (None, default.fp16_compress_hook)},
    "pertensor": lambda: {"hook": quantization.quantization_pertensor_hook},
    "powerSGD": lambda: {"hook": (_power_sgd(), power_sgd.powerSGD_hook)},
    "wrapped": lambda: {"hook": (_power_sgd(), default.fp16_compress_wrapper(power_sgd.powerSGD_hook))},
    "wrapper": lambda: {
        "hook": (_power_sgd(), power_sgd.powerSGD_hook),
        "wrapper": default.bf16_compress_wrapper,
        "warm_start": False,
    },
}


def refusal(rank: int, what: str) -> str:
    """The message of the error that ``what`` is answered with."""
    ddp = plain_ddp(nn.Linear(4, 4))
    try:
        _REFUSED[what](ddp)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _after_forward(ddp: Any) -> None:
    ddp(torch.zeros(1, 4)).sum().backward()
    register(ddp, "allreduce")


def _restored_late(ddp: Any) -> None:
    hook = register(ddp, "allreduce")
    ddp(torch.zeros(1, 4)).sum().backward()
    captured = hook.capture()
    captured[1]["layout"] = [["module.bias", "module.weight"]]  # type: ignore[index, call-overload]
    restore(ddp, captured)


def _used_state(ddp: Any) -> None:
    state = power_sgd.PowerSGDState(None)
    state.iter = 7
    register(ddp, (state, power_sgd.powerSGD_hook))


class _Subclass(DistributedDataParallel):
    pass


def _twice(ddp: Any) -> None:
    register(ddp, "allreduce")
    register(ddp, "fp16_compress")


_REFUSED: dict[str, Callable[[Any], object]] = {
    "after a forward": _after_forward,
    "restored late": _restored_late,
    "used state": _used_state,
    "no hook": lambda ddp: register(ddp),
    "twice": _twice,
    "not a DDP": lambda ddp: register(ddp.module, "allreduce"),
    "subclass": lambda ddp: register(_Subclass(ddp.module), "allreduce"),
    "wrapped twice": lambda ddp: register(ddp, {"name": "powerSGD", "wrapper": "fp16"}, wrapper="bf16"),
    "unknown parameter": lambda ddp: register(ddp, "allreduce", matrix_approximation_rank=2),
    "unmanaged capture": lambda ddp: capture(ddp),
    "unmanaged": lambda ddp: hook_of(ddp),
    "other group": lambda ddp: register(ddp, (object(), default.allreduce_hook)),
}
