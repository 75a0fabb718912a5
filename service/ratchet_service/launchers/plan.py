"""Parts of launchers' plans: the ranks' commands for display, the secrets by name, the agents' environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet_contract import env_vars as names
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.masking import masked
from ratchet_service.isolation.sandbox import inherited_environ, withheld_names
from ratchet_service.launchers.base import LaunchError, LaunchPlan


def rank_commands(launch: LaunchFile, agent: str) -> tuple[dict[str, Any], ...]:
    """Return the ranks' commands for display, in rank order over all nodes, without secret values. ``agent``: the agents'
    interpreter."""
    python = agent if launch.spec.python is None else launch.resolved.python
    world = launch.spec.world
    return tuple(
        _rank_command(launch.for_node(node), local, python)
        for node in range(world.nodes)
        for local in range(world.ranks_per_node)
    )


def _rank_command(launch: LaunchFile, local_rank: int, python: str) -> dict[str, Any]:
    """Return command, main variables and directory of one rank, for display. ``local_rank``: its index on its node."""
    env = {
        names.RANK: str(launch.ranks[local_rank]),
        names.LOCAL_RANK: str(local_rank),
        names.WORLD_SIZE: str(launch.world_size),
    }
    env |= {"OMP_NUM_THREADS": str(launch.resolved.threads_per_rank)} | masked(launch.spec.env, launch.spec.secret_env)
    if launch.resolved.backend == "nccl":
        env |= launch.spec.nccl
    if launch.gpus:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in launch.gpus)
    return {"command": [python, "-P", "-m", "ratchet_worker.rank"], "env": env, "cwd": launch.workdir}


def secret_sources(spec: JobSpec) -> dict[str, str]:
    """Return secret's name -> variable, for the secrets that are read from the environment of the service or its agent host."""
    return {name: secret.from_env for name, secret in spec.secrets.items() if secret.from_env is not None}


def secret_values(environ: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    """Return secret's name -> value. ``sources``: secret's name -> variable. Raises ``LaunchError`` for one that is not
    set, or is reserved for the service."""
    kept, out = withheld_names(environ), {}
    for name, source in sources.items():
        value = environ.get(source)
        if source in kept:
            raise LaunchError(
                f"secret {name} is read from {source}, which is reserved for the service and passed to no job"
            )
        if value is None:
            raise LaunchError(
                f"secret {name} is read from {source}, which is not set in the launcher's environment: set it where the "
                "service is started, or its agent host if it has one"
            )
        out[name] = value
    return out


def agent_environment(environ: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """Return the environment of an agent: the variables of ``environ`` that are not reserved for the service, the secrets'
    values, and the variables in ``plan.env``. Raises ``LaunchError`` as ``secret_values``."""
    return inherited_environ(environ) | secret_values(environ, plan.secrets) | plan.env
