"""From a launch file to what each rank's process is started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ratchet_contract import environment as names
from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.spec import WorldSpec
from ratchet_worker.meeting import Rendezvous
from ratchet_worker.starter import RankPlan

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def plan_ranks(
    launch: LaunchFile,
    paths: AttemptPaths,
    rendezvous: Rendezvous,
    *,
    inherited: Mapping[str, str],
    code_digest: str | None = None,
) -> list[RankPlan]:
    """One plan per rank of this node; the rendezvous' socket goes to rank 0 alone. ``inherited`` is the agent's own environment;
    ``code_digest``: of code that lies on the nodes.

    Where the spec names no interpreter the ranks run the agent's, which is of the service's version of today: the one that was
    found at submission may be another version's by now, or gone.

    Raises ``UserError`` when a secret's variable is not set.
    """
    common = _common(launch, inherited, rendezvous.interface)
    if code_digest is not None:
        common[names.CODE_DIGEST] = code_digest
    python = sys.executable if launch.spec.python is None else launch.resolved.python
    plans = []
    for local_rank, rank in enumerate(launch.ranks):
        env = common | _identity(launch, paths, rank, local_rank, rendezvous)
        fds: tuple[int, ...] = ()
        if rank == 0 and rendezvous.listener is not None:
            fds = (rendezvous.listener.fileno(),)
            env[names.STORE_FD] = str(fds[0])
        # -P: nothing is imported from the current directory
        command = [python, "-P", "-m", "ratchet_worker.rank"]
        plans.append(RankPlan(rank, command, Path(launch.workdir), env, paths.log(rank), fds))
    return plans


def _common(launch: LaunchFile, inherited: Mapping[str, str], interface: str) -> dict[str, str]:
    """What all ranks share, the later winning: inherited, defaults, the spec's variables, secrets, NCCL settings."""
    spec = launch.spec
    env = {k: v for k, v in inherited.items() if not k.startswith(names.RESERVED_PREFIXES)}
    env["PYTHONUNBUFFERED"] = "1"
    env.update(dict.fromkeys(_THREAD_VARIABLES, str(launch.resolved.threads_per_rank)))
    _choose_interface(env, spec.world, interface)
    if spec.determinism != "off":
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        env["PYTHONHASHSEED"] = str(spec.seed % 2**32)
        env.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # no choice of kernels by a stop watch
    if spec.script is not None:  # as torchrun sets it; torch's own default, for tasks, ends the process without abort
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.update(spec.env)
    env.update(_secrets(launch, inherited))
    if launch.resolved.backend == "nccl":
        env.update(spec.nccl)
    if launch.resolved.device != "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("ACCELERATE_USE_CPU", "true")  # else a Trainer there trains each rank for itself
    elif launch.gpus:  # else an engine has chosen them
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts; CUDA's own is the fastest first
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
    return env


def _choose_interface(env: dict[str, str], world: WorldSpec, interface: str) -> None:
    """gloo goes by the name of the host where it is told nothing, which on many machines leads to the loopback interface; NCCL
    takes the first interface that it likes. On several nodes both are told the one over which the nodes have found each other,
    unless the nodes' own environment says otherwise; NCCL uses it for data only where it has no InfiniBand of its own."""
    if world.nodes == 1:
        env["GLOO_SOCKET_IFNAME"] = "lo"
        return
    for name, value in (
        ("GLOO_SOCKET_IFNAME", interface),
        ("NCCL_SOCKET_IFNAME", f"={interface}"),
    ):  # "=": not as a prefix
        env[name] = value if world.interface is not None else env.get(name, value)


def _secrets(launch: LaunchFile, inherited: Mapping[str, str]) -> dict[str, str]:
    """Values by name. Launchers hand a value over under the secret's own name; the variable of the same name as its source may
    be another secret by now, or the node's own."""
    values = {}
    for name, secret in launch.spec.secrets.items():
        value = inherited.get(name, inherited.get(secret.from_env or name))
        if value is None and secret.from_secret is not None:
            raise UserError(
                f"secret {name}: the engine gave this node no variable of that name from the key {secret.from_secret.key} of the "
                f"Secret {secret.from_secret.name}"
            )
        if value is None:
            raise UserError(
                f"secret {name}: variable {secret.from_env} is not set in the launcher's environment; "
                f"set it where the service is started, start it again, then `ratchet resume {launch.job_id}`"
            )
        values[name] = value
    return values


def _identity(
    launch: LaunchFile, paths: AttemptPaths, rank: int, local_rank: int, rendezvous: Rendezvous
) -> dict[str, str]:
    local, world = str(len(launch.ranks)), str(launch.world_size)
    return {
        names.LAUNCH_FILE: str(paths.launch_file),
        names.JOB_ID: launch.job_id,
        names.ATTEMPT: str(launch.epoch),
        names.ATTEMPT_DIR: str(paths.root),
        names.NODE_DIR: str(paths.node(launch.node).root),
        names.AGENT_PID: str(os.getpid()),
        names.RANK: str(rank),
        names.LOCAL_RANK: str(local_rank),
        names.WORLD_SIZE: world,
        names.LOCAL_WORLD_SIZE: local,
        names.GROUP_RANK: str(launch.node),
        names.GROUP_WORLD_SIZE: str(launch.spec.world.nodes),
        names.ROLE_RANK: str(rank),
        names.ROLE_WORLD_SIZE: world,
        names.ROLE_NAME: "default",
        names.MASTER_ADDR: rendezvous.host,
        names.MASTER_PORT: str(rendezvous.port),
        names.TORCHELASTIC_RUN_ID: f"{launch.job_id}-a{launch.epoch}",
        names.TORCHELASTIC_RESTART_COUNT: str(launch.epoch - 1),
        names.TORCHELASTIC_MAX_RESTARTS: str(max(launch.spec.policy.max_failures, launch.epoch - 1)),
        names.TORCHELASTIC_USE_AGENT_STORE: "True",  # rank 0 serves it: env:// connects every rank as a client
    }
