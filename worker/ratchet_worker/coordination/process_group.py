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

from ratchet_contract import env_vars as names
from ratchet_contract.errors import UserError
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.coordination.store_exchange import poll_until_present


@dataclass(frozen=True)
class Identity:
    """The rank and world size of this process, and the address of the rendezvous store. ``store_fd``: the inherited socket on
    which rank 0 serves the store; None on other ranks, and if none was inherited."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    store_fd: int | None

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Identity:
        """Read the identity from torchrun's variables, and ``store_fd`` from the agent's. Raises ``KeyError`` if a required one
        is missing, ``ValueError`` if one is invalid."""
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
    """Clients of the rendezvous store for the threads and the process group of this rank. ``server``: set if this rank serves the
    store."""

    main: Store
    side: Store
    saver: Store
    group: Store
    server: Store | None


def rank_device(launch: LaunchFile, identity: Identity) -> torch.device:
    """Return this rank's device, by its number on the node. Does not touch CUDA."""
    return torch.device("cpu") if launch.resolved.device == "cpu" else torch.device("cuda", identity.local_rank)


def select_device(launch: LaunchFile, identity: Identity) -> torch.device:
    """Make this rank's device current and return it. Raises ``UserError`` if it is not available to this process."""
    device = rank_device(launch, identity)
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
    """Connect to the rendezvous store; rank 0 first starts its server. ``timeout``: seconds per operation. May raise torch's
    ``DistNetworkError``."""
    limit = timedelta(seconds=timeout)
    server = None
    if identity.rank == 0:
        server = TCPStore(
            identity.host, identity.port, is_master=True, timeout=limit, wait_for_workers=False,
            master_listen_fd=_dup_and_close(identity.store_fd),
        )  # fmt: skip

    def client() -> Store:
        return TCPStore(identity.host, identity.port, is_master=False, timeout=limit)

    return Clients(client(), client(), client(), client(), server)


def _dup_and_close(fd: int | None) -> int | None:
    """Return a duplicate of ``fd``, for libuv to close, and close ``fd`` itself. Return None for None."""
    if fd is None:
        return None
    copy = os.dup(fd)
    # Children of this process would inherit it and keep the port open.
    os.close(fd)
    return copy


def check_no_process_group() -> None:
    """Raise ``UserError`` (``group-exists``) if torch's default process group exists already."""
    if is_initialized():
        raise UserError(
            "torch.distributed.init_process_group was called before the Session was made, which starts the group itself, with "
            "the back end that ddp.backend names, and ends it: remove that line. transformers' TrainingArguments and "
            "accelerate's Accelerator call it, too: make the Session before them",
            code="group-exists",
        )


def init_group(launch: LaunchFile, identity: Identity, clients: Clients, device: torch.device, timeout: float) -> None:
    """Start the process group. ``timeout``: seconds per collective. Raises ``UserError`` if one exists already."""
    check_no_process_group()
    init_process_group(
        launch.resolved.backend,
        store=PrefixStore("group", clients.group),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if launch.resolved.backend == "nccl" else None,
    )


def sign_off(store: Store, identity: Identity, seconds: float) -> None:
    """Record that this rank is done with the store. Rank 0 then waits up to ``seconds`` for all ranks' records."""
    with suppress(RuntimeError):  # rank 0 has exited already
        store.set(f"farewell/{identity.rank}", "1")
        if identity.rank == 0:
            end = time.monotonic() + seconds
            for _ in poll_until_present(store, [f"farewell/{rank}" for rank in range(identity.world_size)]):
                if time.monotonic() > end:
                    return
