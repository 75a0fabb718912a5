"""Checks a spec for parts that Slurm cannot honour. Each problem has a JSON pointer. Pure."""

from __future__ import annotations

import re
from typing import Final

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.launcher import OWNED_OPTIONS, SlurmLauncherSpec, VolumeSpec
from ratchet_service.launchers.base import longest_stop
from ratchet_service.launchers.slurm.batch_script import MAX_NOTICE_SECONDS, gres

SIGNAL_RESOLUTION_SECONDS: Final = 60.0
"""Seconds by which Slurm may send the signal of ``--signal`` early (sbatch(1))."""
_MIN_TRAINING_SECONDS: Final = 60.0
_CANNOT: Final = "launcher-cannot"
_GRES_TYPE: Final = re.compile(r"[A-Za-z0-9_.-]+")
_OWN_KEYS: Final = {
    "partition": "/launcher/partition",
    "account": "/launcher/account",
    "qos": "/launcher/qos",
    "constraint": "/launcher/constraint",
    "reservation": "/launcher/reservation",
    "gres": "/launcher/gres",
    "time": "/launcher/time_limit",
    "exclusive": "/launcher/exclusive",
    "mem": "/resources/memory",
    "mem-per-cpu": "/resources/memory",
    "mem-per-gpu": "/resources/memory",
    "cpus-per-task": "/resources/cpus_per_rank",
    "gpus": "/resources/gpu",
    "gpus-per-node": "/resources/gpu",
    "gpus-per-task": "/resources/gpu",
}
_REFUSED: Final = {
    "clusters": "the service supervises jobs of its own cluster only",
    "test-only": "it would submit nothing",
    "uid": "jobs run as the user of the service",
    "gid": "jobs run as the user of the service",
    "get-user-env": "the environment is the service's, without its credentials",
    "chdir": "ranks run in the job's work directory",
    "het-group": "an attempt is one job",
    "quiet": "sbatch would not report the job's number",
    "help": "it would submit nothing",
    "usage": "it would submit nothing",
    "version": "it would submit nothing",
}


def check(spec: JobSpec, launcher: SlurmLauncherSpec) -> tuple[list[Warning_], list[FieldProblem]]:
    """Return warnings about ``spec``, and problems: parts that Slurm cannot honour. ``launcher``: with the site's defaults."""
    problems = [
        *_check_time_limit(spec, launcher),
        *_check_gpus(spec, launcher),
        *_check_options(launcher),
        *_check_volumes(spec, launcher),
    ]
    for name, secret in spec.secrets.items():
        if secret.from_secret is not None:
            text = "Slurm has no Secrets: name a variable of the service's environment (from_env)"
            problems.append(_problem(f"/secrets/{name}", text))
    warnings = []
    if spec.volumes and spec.image is None and not problems:
        text = "without an image nothing is mounted: the ranks use these paths of the nodes directly, and read_only has no effect"
        warnings.append(Warning_(code="volumes-as-they-are", pointer="/volumes", detail=text))
    return warnings, problems


def _check_time_limit(spec: JobSpec, launcher: SlurmLauncherSpec) -> list[FieldProblem]:
    """Return a problem if the time limit leaves too little time to train, or if a stop may take longer than Slurm's longest
    notice."""
    notice = longest_stop(spec)
    if notice > MAX_NOTICE_SECONDS:
        text = f"Slurm gives at most {MAX_NOTICE_SECONDS} s of notice before a time limit: make it shorter"
        return [_problem("/policy/stop_grace", text)]
    least = notice + SIGNAL_RESOLUTION_SECONDS + _MIN_TRAINING_SECONDS
    if launcher.time_limit is None or launcher.time_limit >= least:
        return []
    text = (
        f"agents receive a stop request up to {notice + SIGNAL_RESOLUTION_SECONDS:.0f} s before the limit "
        f"(policy.stop_grace, the time to end, and the minute that Slurm may be early), so nothing would be trained: set at "
        f"least {least:.0f} s, or a shorter policy.stop_grace"
    )
    return [_problem("/launcher/time_limit", text)]


def _check_gpus(spec: JobSpec, launcher: SlurmLauncherSpec) -> list[FieldProblem]:
    """Return a problem if ``resources.gpu`` is set, but does not have the form of a gres type. Return one, too, if a job with
    device cuda requests no GPU. With ``launcher.gres`` there is no problem."""
    kind = spec.resources.gpu
    if kind is not None and launcher.gres is None and _GRES_TYPE.fullmatch(kind) is None:
        text = f"{kind!r} is not a gres type: name one of `sinfo -o %G`, such as a100, or gpu for any"
        return [_problem("/resources/gpu", text)]
    if spec.world.device == "cuda" and gres(spec, launcher) is None:
        text = "no GPU is requested: set its type as in Slurm, or gpu for any (or launcher.gres)"
        return [_problem("/resources/gpu", text)]
    return []


def _check_options(launcher: SlurmLauncherSpec) -> list[FieldProblem]:
    """Return a problem for each option of ``launcher.options`` that may not be set there, or that abbreviates such an option."""
    found = []
    for name in launcher.options:
        if name in _OWN_KEYS:
            found.append(_problem(f"/launcher/options/{name}", f"it has a key of its own: {_OWN_KEYS[name]}"))
        elif name in _REFUSED:
            found.append(_problem(f"/launcher/options/{name}", f"Ratchet cannot work with it: {_REFUSED[name]}"))
        elif short := sorted(full for full in {*_OWN_KEYS, *_REFUSED, *OWNED_OPTIONS} if full.startswith(name)):
            text = (
                f"sbatch may read it as an abbreviation of {' or '.join(short)}, which cannot be set: write option names "
                "in full"
            )
            found.append(_problem(f"/launcher/options/{name}", text))
    return found


def _check_volumes(spec: JobSpec, launcher: SlurmLauncherSpec) -> list[FieldProblem]:
    """Return a problem for each fault of the job's volumes."""
    found = []
    for i, volume in enumerate(spec.volumes):
        for key, text in _check_volume(volume, spec.image is not None):
            found.append(_problem(f"/volumes/{i}/{key}", text))
    return found


def _check_volume(volume: VolumeSpec, in_container: bool) -> list[tuple[str, str]]:
    """Return (key, message) for each fault of the volume. ``in_container``: the job has an image."""
    if volume.host_path is None:
        return [
            (
                volume.source,
                "Slurm does not support this source: name a directory that exists on every node (host_path)",
            )
        ]
    found = []
    if volume.sub_path is not None:
        found.append(("sub_path", "give the whole path as host_path"))
    if not in_container and volume.mount_path != volume.host_path:
        found.append(("mount_path", "without an image nothing is mounted: it must be host_path"))
    if in_container and "," in volume.host_path + volume.mount_path:
        found.append(("host_path", "a path with a comma cannot be mounted"))
    return found


def _problem(pointer: str, detail: str) -> FieldProblem:
    """Return the problem ``detail`` of the spec's field ``pointer``: this launcher cannot honour the field."""
    return FieldProblem(pointer=pointer, code=_CANNOT, detail=detail)
