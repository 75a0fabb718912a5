"""Accelerate in a job: its ``prepare`` with the Session's DDP.

    with Session() as session:
        accelerator = Accelerator(cpu=session.device.type == "cpu", gradient_accumulation_steps=2)
        data = TrainLoader(my_dataset(), batch_size=32, seed=session.seed, rank=session.rank, world_size=session.world_size)
        session.register(data=data)
        model, optimizer, scheduler = prepare(session, accelerator, net, optimizer, scheduler)
        batches = session.batches()
        for step in session.steps(1000):
            for x, y in islice(batches, accelerator.gradient_accumulation_steps):
                with accelerator.accumulate(model):
                    accelerator.backward(cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

Hook, DDP's settings, ranks and devices are those of the spec, so ``DistributedDataParallelKwargs`` is refused. ``save_state`` and
``load_state`` go out of the script: what ``prepare`` is given is registered with the Session, which saves and restores it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("Accelerate is not installed: pip install 'ratchet-train[worker,accelerate]'") from error

from ratchet_contract.errors import UserError
from ratchet_worker.session import Session


def prepare(
    session: Session, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, *schedulers: Any
) -> list[Any]:
    """``accelerator.prepare(model, optimizer, *schedulers)``, with the model in the job's DDP and all of it registered.

    Once, on every rank; a collective. Raises ``UserError`` for what the job's spec decides, or what cannot be resumed.
    """
    if accelerator.ddp_handler is not None:
        raise UserError(
            "DistributedDataParallelKwargs: hook and DDP's settings are those of the job's spec (hook, ddp); drop it"
        )
    wrapped = wrap(session, accelerator, model)
    prepared = [accelerator.prepare(item) for item in (optimizer, *schedulers)]
    state: dict[str, Any] = {f"scheduler_{n}" if n else "scheduler": item for n, item in enumerate(schedulers)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    session.register(optimizer=optimizer, accelerate=_Counts(accelerator), **state)
    return [wrapped, *prepared]


def wrap(session: Session, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """``accelerator.prepare_model(model)``, autocast included, with the job's DDP. Raises ``UserError`` for other ranks."""
    if accelerator.num_processes != session.world_size or accelerator.device.type != session.device.type:
        raise UserError(
            f"Accelerate runs {accelerator.num_processes} processes on {accelerator.device.type}, the job {session.world_size} "
            f"on {session.device.type}: make the Session first, and pass cpu=session.device.type == 'cpu' to Accelerator"
        )
    wrapped: nn.Module = accelerator.prepare_model(session.wrap(model), evaluation_mode=True)  # no DDP of Accelerate's
    return wrapped


class _Counts:
    """How many batches Accelerate has accumulated."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
