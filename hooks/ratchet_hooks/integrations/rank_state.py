"""Captures and restores the part of each rank's state that a framework's checkpoint lacks, such as the hook's state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ratchet_hooks.algorithms.state_version import redistribute
from ratchet_hooks.errors import HookStateError, UnsupportedModel
from ratchet_hooks.manage.register import hook_of, restore
from ratchet_hooks.specs.hook_specs import HookSpec
from ratchet_hooks.specs.registry import replicas_of
from ratchet_hooks.state import rng
from ratchet_hooks.state.files import load_state, save_state

VERSION = 1
_ENTRIES = ("version", "world_size", "rank", "hook", "buffers", "rng", "replica")
_NO_STATE = "not the state of a rank: this entry is missing"


def capture_rank(ddp: nn.parallel.DistributedDataParallel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return this rank's state, such as hook state and buffers. A collective, between two steps. Tensors may be live ones: store
    the result before the next step."""
    hook = hook_of(ddp)
    state: dict[str, Any] = {
        "version": VERSION,
        "world_size": ddp.process_group.size(),
        "rank": ddp.process_group.rank(),
        "hook": hook.capture(),
        "buffers": {name: buffer.detach() for name, buffer in ddp.module.named_buffers()},
        "rng": rng.capture(ddp.device),
        "replica": None,
    }
    if hook.replicas != "equal":
        parameters = {name: p.detach() for name, p in ddp.module.named_parameters()}
        state["replica"] = {"parameters": parameters, "optimizers": [o.state_dict() for o in optimizers]}
    return state


def redistribute_ranks(ddp: nn.parallel.DistributedDataParallel, states: Sequence[Any]) -> dict[str, Any]:
    """Return this rank's state for ``restore_rank``, made from ``states`` of all ranks of a group of another size, in rank order.
    Rank 0 issues a warning. Raises ``HookStateError`` for unsuitable states, or ``CustomHookError``."""
    hook, ranks, rank = hook_of(ddp), ddp.process_group.size(), ddp.process_group.rank()
    for number, state in enumerate(states):
        check_version(state)
        if (state["world_size"], state["rank"]) != (len(states), number):
            raise HookStateError(
                "world_size", f"{len(states)} states were found, and number {number} is of rank {state['rank']} of "
                f"{state['world_size']}: they do not belong to one checkpoint, or some are missing",
            )  # fmt: skip
        if state["replica"] is not None:
            raise HookStateError(
                "replica", f"recorded on {len(states)} ranks under {hook.spec.name}, whose models differ: start the same "
                "number of ranks",
            )  # fmt: skip
    if rank == 0:
        warnings.warn(
            f"recorded on {len(states)} ranks, resumed on {ranks}: the state of hook {hook.spec.name} is redistributed (the mean "
            "of the old residuals, on every rank), buffers are those of the old ranks, generators those of this start; not exact",
            stacklevel=2,
        )
    merged = redistribute([(state["hook"][0], state["hook"][1]) for state in states], hook.spec)
    return {**states[rank % len(states)], "world_size": ranks, "rank": rank, "hook": merged, "rng": None}


def restore_rank(ddp: nn.parallel.DistributedDataParallel, optimizers: Sequence[Optimizer], state: Any) -> None:
    """Restore the result of ``capture_rank`` except the generators, which the framework or ``restore_generators`` restores last.
    A collective, after model and optimizers were loaded and before the first forward. Raises ``HookStateError``."""
    check_rank(ddp, state)
    restore(ddp, state["hook"])
    _copy("buffer", dict(ddp.module.named_buffers()), state["buffers"])
    if (state["replica"] is None) != (hook_of(ddp).replicas == "equal"):
        raise HookStateError(
            "replica", "the checkpoint was saved with a hook that stores the ranks' parameters in another way"
        )
    if state["replica"] is not None:
        _copy("parameter", dict(ddp.module.named_parameters()), state["replica"]["parameters"])
        for optimizer, saved in zip(optimizers, state["replica"]["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


class RankFile:
    """This rank's file ``ratchet_hook_<rank>.safetensors`` in the checkpoint directory of a framework."""

    def __init__(
        self, ddp: nn.parallel.DistributedDataParallel, optimizers: Sequence[Optimizer], *, redistribute: bool = False
    ) -> None:
        """``redistribute`` True: ``load`` accepts files of another number of ranks, as ``redistribute_ranks`` describes;
        otherwise that is an error."""
        self.ddp, self.optimizers, self._redistribute = ddp, list(optimizers), redistribute

    def path(self, directory: str | os.PathLike[str], rank: int | None = None) -> Path:
        """Return the path of the file of ``rank`` in ``directory``; None: this rank."""
        return Path(directory, f"ratchet_hook_{self.ddp.process_group.rank() if rank is None else rank}.safetensors")

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write this rank's state to its file in ``directory``, atomically; missing directories are created. A collective,
        between two steps."""
        save_state(self.path(directory), capture_rank(self.ddp, self.optimizers))

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Restore this rank's state, except the generators, from ``directory``. A collective, after model and optimizers were
        loaded and before the first forward. Raises ``HookStateError``."""
        first = self.path(directory, 0)
        recorded = self._state(first)["world_size"] if self._redistribute and first.exists() else None
        if recorded is None or recorded == self.ddp.process_group.size():
            state = self._state(self.path(directory))
        else:
            state = redistribute_ranks(self.ddp, [self._state(self.path(directory, rank)) for rank in range(recorded)])
        restore_rank(self.ddp, self.optimizers, state)

    def _state(self, path: Path) -> Any:
        """Return the state in one file. Raises ``HookStateError`` if the file is missing or invalid."""
        if not path.exists():
            raise HookStateError(
                str(path), "no such file: this checkpoint was made without a managed hook, or by another number of ranks "
                "(load that with redistribute=True), or writing it was interrupted; use an older one, or start without a "
                "checkpoint",
            )  # fmt: skip
        state = load_state(path)
        try:
            check_version(state)
        except HookStateError as error:
            raise HookStateError(str(path), str(error)) from None
        return state


def check_rank(ddp: nn.parallel.DistributedDataParallel, state: Any) -> None:
    """Raise ``HookStateError`` unless ``state`` is the state of this rank in a group of this size."""
    check_version(state)
    ranks, rank = ddp.process_group.size(), ddp.process_group.rank()
    if state["world_size"] != ranks:
        raise HookStateError("world_size", world_size_mismatch(state["world_size"], ranks))
    if state["rank"] != rank:
        raise HookStateError("rank", f"the state of rank {state['rank']} was passed to rank {rank}")


def check_version(state: Any) -> None:
    """Raise ``HookStateError`` unless ``state`` has the entries of a rank's state, in a format that this version reads."""
    if not isinstance(state, dict) or not isinstance(state.get("version"), int):
        raise HookStateError("version", _NO_STATE)
    if state["version"] > VERSION:
        raise HookStateError(
            "version", f"recorded in format {state['version']}; this version of ratchet_hooks reads up to {VERSION}"
        )
    if missing := [entry for entry in _ENTRIES if entry not in state]:
        raise HookStateError(missing[0], _NO_STATE)


def check_equal_replicas(spec: HookSpec) -> None:
    """Raise ``UnsupportedModel`` for a hook whose replicas may differ: a gradient scaler does not work with them."""
    if replicas_of(spec) != "equal":
        raise UnsupportedModel(f"{spec.name} with float16: one rank could skip a step that the others take; use bf16")


def world_size_mismatch(recorded: int, ranks: int) -> str:
    """Return the message for a state of another number of ranks: why it is refused, and what to do."""
    return (
        f"recorded on {recorded} ranks, but this run has {ranks}; start as many as then, or pass redistribute=True: residuals "
        "become their mean, which is not exact"
    )


def restore_generators(ddp: nn.parallel.DistributedDataParallel, state: Any) -> None:
    """Restore the generators' state, if ``state`` has one. Must be the last step before training continues."""
    if state["rng"] is not None:
        rng.restore(state["rng"], ddp.device)


def gather_bytes(packed: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor] | None:
    """Return all ranks' uint8 tensors, in rank order, on rank 0 of ``group``; None on other ranks. A collective."""
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = packed.numel()
    dist.all_reduce(sizes, group=group)
    if group.rank() != 0:
        dist.send(packed.to(device), group=group, group_dst=0)
        return None
    gathered = [packed.cpu()]
    for rank in range(1, group.size()):
        part = torch.empty(int(sizes[rank]), dtype=torch.uint8, device=device)
        dist.recv(part, group=group, group_src=rank)
        gathered.append(part.cpu())
    return gathered


@torch.no_grad()
def _copy(kind: str, live: dict[str, Any], saved: dict[str, torch.Tensor]) -> None:
    """Copy the saved tensors into the live ones of the same name. Raises ``HookStateError`` if names, shapes or dtypes differ."""
    if odd := sorted(set(live) ^ set(saved)):
        raise HookStateError(odd[0], f"a {kind} that only the {'model' if odd[0] in live else 'checkpoint'} has")
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape or tensor.dtype is not saved[name].dtype:
            was, now = (f"{t.dtype} {list(t.shape)}" for t in (saved[name], tensor))
            raise HookStateError(name, f"this {kind} is {now}, the checkpoint has {was}")
        tensor.copy_(saved[name])
