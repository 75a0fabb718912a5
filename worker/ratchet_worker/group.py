"""A rank's place in its group: identity, rendezvous store, process group."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import init_process_group, is_initialized
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from ratchet_contract import environment as names
from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile
from ratchet_worker.exchange import until_present


@dataclass(frozen=True)
class Identity:
    """Who this process is, from the variables that the agent sets."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    store_fd: int | None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Identity:
        """Raises ``KeyError`` or ``ValueError`` when the agent's variables are missing."""
        fd = env.get(names.STORE_FD)
        return cls(
            rank=int(env[names.RANK]),
            local_rank=int(env[names.LOCAL_RANK]),
            world_size=int(env[names.WORLD_SIZE]),
            host=env[names.MASTER_ADDR],
            port=int(env[names.MASTER_PORT]),
            store_fd=int(fd) if fd is not None else None,
        )


@dataclass(frozen=True)
class Clients:
    """One store client per thread that waits: the main thread, the side thread, the saving thread, the process group. Rank 0 has
    the server."""

    main: Store
    side: Store
    saver: Store
    group: Store
    server: Store | None


def named_device(launch: LaunchFile, identity: Identity) -> torch.device:
    """This rank's device; CUDA is not touched."""
    return torch.device("cpu") if launch.resolved.device == "cpu" else torch.device("cuda", identity.local_rank)


def device_of(launch: LaunchFile, identity: Identity) -> torch.device:
    """This rank's device, made current. Raises ``UserError`` when the machine does not have it."""
    device = named_device(launch, identity)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available() or identity.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {identity.rank} needs CUDA device {identity.local_rank}, this machine offers {torch.cuda.device_count()} to "
            "it: submit with world.device cpu, or with fewer ranks"
        )
    torch.cuda.set_device(device)
    return device


def connect(identity: Identity, timeout: float) -> Clients:
    """Rank 0 serves on the socket that its agent has bound; every rank connects. ``timeout`` in seconds."""
    limit = timedelta(seconds=timeout)
    server = None
    if identity.rank == 0:
        server = TCPStore(
            identity.host, identity.port, is_master=True, timeout=limit, wait_for_workers=False,
            master_listen_fd=_free_copy(identity.store_fd),
        )  # fmt: skip

    def client() -> Store:
        return TCPStore(identity.host, identity.port, is_master=False, timeout=limit)

    return Clients(client(), client(), client(), client(), server)


def _free_copy(fd: int | None) -> int | None:
    """For libuv, which closes it; the inherited one goes: children of this process would inherit it too, and keep the port."""
    if fd is None:
        return None
    copy = os.dup(fd)
    os.close(fd)
    return copy


def refuse_other_group() -> None:
    """Raises ``UserError`` where the script has started a process group."""
    if is_initialized():
        raise UserError(
            "torch.distributed.init_process_group was called before the Session was made, which starts the group itself, with "
            "the back end that ddp.backend names, and ends it: remove that line. transformers' TrainingArguments and "
            "accelerate's Accelerator call it, too: make the Session before them",
            code="group-exists",
        )


def join(launch: LaunchFile, identity: Identity, clients: Clients, device: torch.device, timeout: float) -> None:
    """``init_process_group`` with the job's back end; ``timeout`` (seconds) bounds every collective. Raises ``UserError`` where
    the script has done it already."""
    refuse_other_group()
    init_process_group(
        launch.resolved.backend,
        store=PrefixStore("group", clients.group),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if launch.resolved.backend == "nccl" else None,
    )


def farewell(store: Store, identity: Identity, seconds: float) -> None:
    """The last use of the store by this rank; rank 0, which serves it, waits for the others' for up to ``seconds``."""
    with suppress(RuntimeError):  # rank 0 has gone already
        store.set(f"farewell/{identity.rank}", "1")
        if identity.rank == 0:
            end = time.monotonic() + seconds
            for _ in until_present(store, [f"farewell/{rank}" for rank in range(identity.world_size)]):
                if time.monotonic() > end:
                    return
