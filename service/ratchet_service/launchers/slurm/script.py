"""The batch script of an attempt: a pure function of the launch file and the service's settings.

Slurm starts the script on the job's first node; it starts an agent on each node by one ``srun``. Nothing that a user gives ends
the line that it is written in: options are quoted as sbatch reads them, words of commands as the shell does. ``setup`` are
shell lines, and lie behind the first command, where sbatch reads no more options.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Final

from ratchet_contract import environment as names
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_base import size_in_bytes
from ratchet_contract.spec_engines import SlurmLauncherSpec, VolumeSpec
from ratchet_service.launchers.base import AttemptRef, stop_seconds
from ratchet_service.launchers.slurm.settings import Settings

MOST_NOTICE: Final = 65535
"""Seconds; sbatch takes no more for ``--signal``."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:,@%+=\[\]-]+")
_TASK: Final = "SLURM_PROCID"
"""With one task per node, the number of the node within the job."""

_AGENT_SHELL: Final = (
    f'd=$1; shift; [ "${_TASK}" -eq 0 ] || d=$d/$(printf node-%05d "${_TASK}"); mkdir -p "$d" && '
    'exec "$@" >>"$d/agent.log" 2>&1'
)
"""The shell becomes the agent (exec), so that Slurm's signals reach it whatever tracks its processes."""


def mark(home: HomePaths) -> str:
    """The comment of all jobs of one run directory, by which they are found among those of others."""
    return f"ratchet-{home.instance}"


def script(launch: LaunchFile, settings: Settings, home: HomePaths) -> str:
    """The text for sbatch's standard input."""
    spec = launch.spec
    own = settings.launcher_of(spec)
    paths = AttemptPaths(Path(launch.attempt_dir))
    lines = ["#!/bin/bash", *_options(launch, own, paths, home), *(option(*item) for item in own.options.items()), ""]
    lines += ["# sbatch reads no option behind the first command.", _export(names.ATTEMPT_DIR, launch.attempt_dir)]
    lines += ["# Who ends the job ends the agents first; the script waits for their last word.", "trap : TERM", ""]
    if own.setup:
        lines += ["set -e", *own.setup, "set +e", ""]
    lines += ["# One agent per node. When one ends, the others do by themselves.", _srun(launch, own, settings, home)]
    return "\n".join([*lines, "exit $?", ""])


def agent_command(launch: LaunchFile, settings: Settings) -> tuple[str, ...]:
    """What becomes the agent on each node."""
    python = settings.image_python if launch.spec.image else settings.python
    paths = AttemptPaths(Path(launch.attempt_dir))
    return (python, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file), "--node-from", _TASK)


def option(name: str, value: str | None = None) -> str:
    """One ``#SBATCH`` line. Raises ``ValueError`` for a value that would not stay in it."""
    if value is None:
        return f"#SBATCH --{name}"
    if "\n" in value or "\0" in value:
        raise ValueError(f"the value of {name} has a line break")
    quoted = value if _PLAIN.fullmatch(value) else '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'
    return f"#SBATCH --{name}={quoted}"


def cpus_per_node(launch: LaunchFile) -> int:
    return launch.spec.world.ranks_per_node * launch.resolved.threads_per_rank


def gres(spec: JobSpec, own: SlurmLauncherSpec) -> str | None:
    """The generic resources of each node: what is given, else a GPU per rank where the spec wants GPUs."""
    kind, count = spec.resources.gpu, spec.world.ranks_per_node
    if own.gres is not None or kind is None:
        return own.gres
    return f"gpu:{count}" if kind == "gpu" else f"gpu:{kind}:{count}"


def minutes(seconds: float) -> int:
    """A time limit as Slurm counts it."""
    return math.ceil(seconds / 60)


def _options(launch: LaunchFile, own: SlurmLauncherSpec, paths: AttemptPaths, home: HomePaths) -> list[str]:
    spec = launch.spec
    memory = spec.resources.memory
    values = {
        "job-name": AttemptRef(launch.job_id, launch.epoch, paths).name,
        "comment": mark(home),
        "nodes": str(spec.world.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus_per_node(launch)),
        "mem": None if memory is None else f"{size_in_bytes(memory) // 2**20}M",
        "gres": gres(spec, own),
        "partition": own.partition,
        "account": own.account,
        "qos": own.qos,
        "constraint": own.constraint,
        "reservation": own.reservation,
        "time": None if own.time_limit is None else str(minutes(own.time_limit)),
        # Without B: it goes to the agents. Slurm sends it up to a minute earlier, never later.
        "signal": f"USR1@{min(MOST_NOTICE, math.ceil(stop_seconds(launch)))}",
        "output": str(paths.engine_log).replace("%", "%%"),
        "open-mode": "append",
        "export": "ALL",
    }
    lines = [option(name, value) for name, value in values.items() if value is not None]
    return [*lines, *([option("exclusive")] if own.exclusive else []), option("no-requeue")]


def _srun(launch: LaunchFile, own: SlurmLauncherSpec, settings: Settings, home: HomePaths) -> str:
    nodes = launch.spec.world.nodes
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += [f"--cpus-per-task={cpus_per_node(launch)}", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--label"]
    words += ["--kill-on-bad-exit=0", "--wait=0"]
    agent = list(agent_command(launch, settings))
    image = launch.spec.image
    if image is not None and own.container == "pyxis":
        words += [f"--container-image={image}", f"--container-mounts={','.join(_mounts(launch.spec, home))}"]
    elif image is not None:
        mounts = [word for mount in _mounts(launch.spec, home) for word in ("--bind", mount)]
        nvidia = ["--nv"] if launch.resolved.device == "cuda" else []
        agent = ["apptainer", "exec", *nvidia, *mounts, image, *agent]
    shell = ["/bin/sh", "-c", _AGENT_SHELL, "agent", launch.attempt_dir]
    return " \\\n  ".join(shlex.join(part) for part in (words, shell, agent))


def _mounts(spec: JobSpec, home: HomePaths) -> list[str]:
    """``source:target[:ro]``: the run directory where it lies, then what the spec names."""
    return [f"{home.home}:{home.home}", *(_mount(volume) for volume in spec.volumes)]


def _mount(volume: VolumeSpec) -> str:
    return f"{volume.host_path}:{volume.mount_path}" + (":ro" if volume.read_only else "")


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"
