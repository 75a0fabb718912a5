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

Hook, DDP's settings, ranks and devices are those of the spec, so ``DistributedDataParallelKwargs`` is refused, and with it what
trains by other means than DDP. ``save_state`` and ``load_state`` go out of the script: what ``prepare`` is given is registered
with the Session, which saves and restores it. A ``TrainLoader`` reads and orders samples by itself, so options of
``DataLoaderConfiguration`` that ask for another order or other batches are refused; the others have nothing to do.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("Accelerate is not installed: pip install 'ratchet-train[worker,accelerate]'") from error

from ratchet_contract.errors import UserError
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session

_DDP_ALONE: Final = ("deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")


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
    for name in _DDP_ALONE:
        if getattr(accelerator.state, name, None) is not None:
            raise UserError(f"{name}: not supported within a Session, which trains with DDP; drop it")
    _refuse_loader_options(session, accelerator)
    wrapped = wrap(session, accelerator, model)
    prepared = [accelerator.prepare(item) for item in (optimizer, *schedulers)]
    state: dict[str, Any] = {f"scheduler_{n}" if n else "scheduler": item for n, item in enumerate(schedulers)}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    session.register(optimizer=optimizer, accelerate=_Counts(accelerator), **state)
    return [wrapped, *prepared]


def refuse_other_ranks(session: Session, accelerator: Any) -> None:
    """Raises ``UserError`` where Accelerate has made something else of this process."""
    if accelerator.num_processes != session.world_size or accelerator.device.type != session.device.type:
        raise UserError(
            f"Accelerate runs {accelerator.num_processes} processes on {accelerator.device.type}, the job {session.world_size} "
            f"on {session.device.type}: make the Session first, and pass cpu=session.device.type == 'cpu' to Accelerator; for a "
            "Trainer on the CPU TrainingArguments(use_cpu=True), --use_cpu"
        )


def wrap(session: Session, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """``accelerator.prepare_model(model)``, autocast included, with the job's DDP. Raises ``UserError`` for other ranks."""
    refuse_other_ranks(session, accelerator)
    wrapped: nn.Module = accelerator.prepare_model(session.wrap(model), evaluation_mode=True)  # no DDP of Accelerate's
    return wrapped


def _refuse_loader_options(session: Session, accelerator: Accelerator) -> None:
    """Raises ``UserError`` for an option that a ``TrainLoader``, which Accelerate does not prepare, would leave out silently."""
    config, data = accelerator.dataloader_config, session._runtime.state.data
    refused = {
        "split_batches": "register TrainLoader(..., batch_is='global'), whose batch_size is that of all ranks together",
        "dispatch_batches": "every rank of a job reads its own samples, not rank 0 for all; drop it",
        "data_seed": "the order of a job's data follows from its seed (seed in the spec); drop it",
    }
    for name, why in refused.items():
        if getattr(config, name) in (None, False):
            continue
        if data is None:
            raise UserError(
                f"{name}: session.register(data=...) comes before prepare, so that it is known what this is for"
            )
        global_batch = name == "split_batches" and isinstance(data, TrainLoader) and data.batch_is == "global"
        if isinstance(data, TrainLoader) and not global_batch:
            raise UserError(f"{name}: {why}")


class _Counts:
    """How many batches Accelerate has accumulated."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
