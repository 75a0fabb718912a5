"""Computes the command and environment of each rank's process from a launch file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ratchet_contract import env_vars as names
from ratchet_contract.errors import UserError
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import WorldSpec
from ratchet_worker.agent.rank_starter import RankPlan
from ratchet_worker.agent.rendezvous import Rendezvous

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def plan_ranks(
    launch: LaunchFile,
    paths: AttemptPaths,
    rendezvous: Rendezvous,
    *,
    inherited: Mapping[str, str],
    code_digest: str | None = None,
    built: tuple[str, str] | None = None,
    copies: Mapping[str, str] = {},
) -> list[RankPlan]:
    """Return one plan per rank of this node, in order. ``inherited``: the agent's environment; ``code_digest``: of code that lies
    on the nodes; ``built``: interpreter and digest of the environment for the job's requirements; ``copies``: variables for
    copies in memory. Raises ``UserError`` if a secret is missing."""
    common = common_environment(launch, inherited, rendezvous.interface) | dict(copies)
    if start := inherited.get(names.START):
        common[names.START] = start
    if code_digest is not None:
        common[names.CODE_DIGEST] = code_digest
    python = interpreter(launch)
    if built is not None:
        python, common[names.ENVIRONMENT_DIGEST] = built
    plans = []
    for local_rank, rank in enumerate(launch.ranks):
        env = common | _rank_environment(launch, paths, rank, local_rank, rendezvous)
        fds: tuple[int, ...] = ()
        if rank == 0 and rendezvous.listener is not None:
            fds = (rendezvous.listener.fileno(),)
            env[names.STORE_FD] = str(fds[0])
        plans.append(RankPlan(rank, rank_command(python), Path(launch.workdir), env, paths.log(rank), fds))
    return plans


def interpreter(launch: LaunchFile) -> str:
    """Return the spec's interpreter, or this process's if the spec names none."""
    # not the one that was resolved at submission: by now it may have another version, or be gone
    return sys.executable if launch.spec.python is None else launch.resolved.python


def rank_command(python: str) -> list[str]:
    """Return the command of a rank, and of the fork server, in this interpreter."""
    return [python, "-P", "-m", "ratchet_worker.rank"]  # -P: nothing is imported from the current directory


def common_environment(launch: LaunchFile, inherited: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return the variables that all ranks share, secrets included. Raises ``UserError`` if a secret's value is missing."""
    spec = launch.spec
    env = {k: v for k, v in inherited.items() if not k.startswith(names.RESERVED_PREFIXES)}
    env["PYTHONUNBUFFERED"] = "1"
    env.update(dict.fromkeys(_THREAD_VARIABLES, str(launch.resolved.threads_per_rank)))
    _choose_interface(env, spec.world, interface)
    if spec.determinism != "off":
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        env["PYTHONHASHSEED"] = str(spec.seed % 2**32)
        env.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # no choice of kernels by timing
    if spec.script is not None:  # torchrun's value; torch's default, kept for tasks, ends the process without an abort
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # one run of a tracker over all attempts; values of the agent's own environment would be those of another run
    env |= {names.WANDB_RUN_ID: launch.job_id, names.WANDB_RESUME: "allow"}
    env.pop(names.MLFLOW_RUN_ID, None)  # rank 0 finds it
    env.update(spec.env)
    env.update(secret_values(launch, inherited))
    if launch.resolved.backend == "nccl":
        env.update(spec.nccl)
    if launch.resolved.device != "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.setdefault("ACCELERATE_USE_CPU", "true")  # otherwise a Trainer on the CPU trains each rank separately
    elif launch.gpus:  # if empty, an engine has chosen the GPUs
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order; CUDA's default is fastest first
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
    return env


def _choose_interface(env: dict[str, str], world: WorldSpec, interface: str) -> None:
    """Set the network interface of gloo and NCCL in ``env``. With one node, gloo gets the loopback interface. With several nodes,
    both get ``interface``; if ``world.interface`` is not set, values that ``env`` has already are kept instead."""
    # By default gloo resolves the host name, which on many machines leads to the loopback interface, and NCCL takes the first
    # interface that suits it.
    if world.nodes == 1:
        env["GLOO_SOCKET_IFNAME"] = "lo"
        return
    for name, value in (
        ("GLOO_SOCKET_IFNAME", interface),
        ("NCCL_SOCKET_IFNAME", f"={interface}"),
    ):  # "=": an exact name, not a prefix
        env[name] = value if world.interface is not None else env.get(name, value)


def secret_values(launch: LaunchFile, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the spec's secrets from the agent's environment. Raises ``UserError`` if one is missing."""
    values = {}
    for name, secret in launch.spec.secrets.items():
        # launchers pass a value under the secret's own name; the source's variable may hold another secret by now
        value = inherited.get(name, inherited.get(secret.from_env or name))
        if value is None and secret.from_secret is not None:
            raise UserError(
                f"secret {name}: the engine set no variable of that name here from the key {secret.from_secret.key} of the "
                f"Secret {secret.from_secret.name}"
            )
        if value is None:
            raise UserError(
                f"secret {name}: variable {secret.from_env} is not set in the launcher's environment; "
                f"set it where the service is started, start it again, then `ratchet resume {launch.job_id}`"
            )
        values[name] = value
    return values


def _rank_environment(
    launch: LaunchFile, paths: AttemptPaths, rank: int, local_rank: int, rendezvous: Rendezvous
) -> dict[str, str]:
    """Return the variables for a rank's place in the job, the node and the attempt: Ratchet's and torchrun's."""
    local, world = str(len(launch.ranks)), str(launch.world_size)
    return {
        names.LAUNCH_FILE: str(paths.launch_file),
        names.JOB_ID: launch.job_id,
        names.ATTEMPT: str(launch.attempt),
        names.TENSORBOARD_DIR: str(Path(launch.workdir, "tensorboard")),
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
        names.TORCHELASTIC_RUN_ID: f"{launch.job_id}-a{launch.attempt}",
        names.TORCHELASTIC_RESTART_COUNT: str(launch.attempt - 1),
        names.TORCHELASTIC_MAX_RESTARTS: str(max(launch.spec.policy.max_failures, launch.attempt - 1)),
        names.TORCHELASTIC_USE_AGENT_STORE: "True",  # rank 0 serves the store already: env:// connects every rank as a client
    }
