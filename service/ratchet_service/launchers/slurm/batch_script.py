"""Makes the batch script of an attempt, which starts an agent on each node by one ``srun``. Values from users are quoted; only
``setup`` is shell lines."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Final

from ratchet_contract import env_vars as names
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.launcher import SlurmLauncherSpec, VolumeSpec
from ratchet_contract.spec.types import size_in_bytes
from ratchet_service.launchers.base import AttemptRef, stop_seconds
from ratchet_service.launchers.slurm.settings import Settings

MAX_NOTICE_SECONDS: Final = 65535
"""Seconds: the most that sbatch accepts for ``--signal``."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:,@%+=\[\]-]+")
_TASK: Final = "SLURM_PROCID"
"""With one task per node this is the node's index within the job."""

_AGENT_SHELL: Final = (
    f'd=$1; shift; [ "${_TASK}" -eq 0 ] || d=$d/$(printf node-%05d "${_TASK}"); mkdir -p "$d" && '
    'exec "$@" >>"$d/agent.log" 2>&1'
)
"""The agent replaces the shell (exec), so that Slurm's signals reach it however Slurm tracks the job's processes."""


def job_comment(home: HomePaths) -> str:
    """Return the comment of all jobs of one run directory, which distinguishes them from other jobs of the same user."""
    return f"ratchet-{home.instance_id}"


def render_script(launch: LaunchFile, settings: Settings, home: HomePaths) -> str:
    """Return the text of the batch script. Raises ``ValueError`` if an option's value has a line break or a NUL character."""
    spec = launch.spec
    launcher = settings.effective_launcher(spec)
    paths = AttemptPaths(Path(launch.attempt_dir))
    lines = [
        "#!/bin/bash",
        *_options(launch, launcher, paths, home),
        *(option(*item) for item in launcher.options.items() if item[0] != "exclude"),  # it is among those above
        "",
    ]
    lines += ["# sbatch reads no option after the first command.", _export(names.ATTEMPT_DIR, launch.attempt_dir)]
    lines += ["# A signal to the job ends the agents first; the script waits for their results.", "trap : TERM", ""]
    if launcher.setup:
        lines += ["set -e", *launcher.setup, "set +e", ""]
    lines += [
        "# One agent per node. When one ends, the others end too.",
        _srun(launch, launcher, settings, home),
    ]
    return "\n".join([*lines, "exit $?", ""])


def agent_command(launch: LaunchFile, settings: Settings) -> tuple[str, ...]:
    """Return the command of the agent, the same on each node."""
    python = settings.image_python if launch.spec.image else settings.python
    paths = AttemptPaths(Path(launch.attempt_dir))
    return (python, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file), "--node-from", _TASK)


def option(name: str, value: str | None = None) -> str:
    """Return one ``#SBATCH`` line; a flag if ``value`` is None. Raises ``ValueError`` for a line break or NUL character."""
    if value is None:
        return f"#SBATCH --{name}"
    if "\n" in value or "\0" in value:
        raise ValueError(f"the value of {name} has a line break")
    quoted = value if _PLAIN.fullmatch(value) else '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"'
    return f"#SBATCH --{name}={quoted}"


def cpus_per_node(launch: LaunchFile) -> int:
    """Return the number of CPUs that the job requests on each node."""
    return launch.spec.world.ranks_per_node * launch.resolved.threads_per_rank


def gres(spec: JobSpec, launcher: SlurmLauncherSpec) -> str | None:
    """Return the generic resources of each node for ``--gres``: ``launcher.gres``, else one GPU per rank if
    requested, else None."""
    kind, count = spec.resources.gpu, spec.world.ranks_per_node
    if launcher.gres is not None or kind is None:
        return launcher.gres
    return f"gpu:{count}" if kind == "gpu" else f"gpu:{kind}:{count}"


def minutes(seconds: float) -> int:
    """Return ``seconds`` in whole minutes, rounded up. Slurm's time limits are in minutes."""
    return math.ceil(seconds / 60)


def _options(launch: LaunchFile, launcher: SlurmLauncherSpec, paths: AttemptPaths, home: HomePaths) -> list[str]:
    """Return the ``#SBATCH`` lines that Ratchet sets; without those of ``launcher.options``."""
    spec = launch.spec
    memory = spec.resources.memory
    values = {
        "job-name": AttemptRef(launch.job_id, launch.attempt, paths).name,
        "comment": job_comment(home),
        "nodes": str(spec.world.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus_per_node(launch)),
        "mem": None if memory is None else f"{size_in_bytes(memory) // 2**20}M",
        "gres": gres(spec, launcher),
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "reservation": launcher.reservation,
        "exclude": ",".join(filter(None, (launcher.options.get("exclude"), *launch.exclude_nodes))) or None,
        "time": None if launcher.time_limit is None else str(minutes(launcher.time_limit)),
        # Without "B:" the signal goes to the agents. Slurm sends it up to a minute early, never late.
        "signal": f"USR1@{min(MAX_NOTICE_SECONDS, math.ceil(stop_seconds(launch)))}",
        "output": str(paths.engine_log).replace("%", "%%"),
        "open-mode": "append",
        "export": "ALL",
    }
    lines = [option(name, value) for name, value in values.items() if value is not None]
    return [*lines, *([option("exclusive")] if launcher.exclusive else []), option("no-requeue")]


def _srun(launch: LaunchFile, launcher: SlurmLauncherSpec, settings: Settings, home: HomePaths) -> str:
    """Return the srun command that starts the agents, with a container if the job has an image."""
    nodes = launch.spec.world.nodes
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += [f"--cpus-per-task={cpus_per_node(launch)}", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--label"]
    words += ["--kill-on-bad-exit=0", "--wait=0"]
    agent = list(agent_command(launch, settings))
    image = launch.spec.image
    if image is not None and launcher.container == "pyxis":
        words += [f"--container-image={image}", f"--container-mounts={','.join(_mounts(launch.spec, home))}"]
    elif image is not None:
        mounts = [word for mount in _mounts(launch.spec, home) for word in ("--bind", mount)]
        nvidia = ["--nv"] if launch.resolved.device == "cuda" else []
        agent = ["apptainer", "exec", *nvidia, *mounts, image, *agent]
    shell = ["/bin/sh", "-c", _AGENT_SHELL, "agent", launch.attempt_dir]
    return " \\\n  ".join(shlex.join(part) for part in (words, shell, agent))


def _mounts(spec: JobSpec, home: HomePaths) -> list[str]:
    """Return the mounts of a container as ``source:target[:ro]``: the run directory at its own path, then the spec's volumes."""
    return [f"{home.home}:{home.home}", *(_mount(volume) for volume in spec.volumes)]


def _mount(volume: VolumeSpec) -> str:
    return f"{volume.host_path}:{volume.mount_path}" + (":ro" if volume.read_only else "")


def _export(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"
