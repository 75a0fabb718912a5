"""Objects of torch's that are given to ``register``, and what it refuses, for ranks of ``tests.support.gloo_ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks.manage.register import capture, hook_of, register, resolve, restore
from tests.support.registered_hook_runs import plain_ddp


def spec_from(rank: int, name: str) -> dict[str, Any]:
    """The spec that a row of ``OBJECTS`` becomes."""
    return resolve(plain_ddp(nn.Linear(4, 4)), **OBJECTS[name]()).values()


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


def refusal_message(rank: int, what: str) -> str:
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
