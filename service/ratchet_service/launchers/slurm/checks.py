"""What Slurm cannot honour of a spec, by JSON pointer. Pure."""

from __future__ import annotations

import re
from typing import Final

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_engines import OWNED_OPTIONS, SlurmLauncherSpec, VolumeSpec
from ratchet_service.launchers.base import longest_stop
from ratchet_service.launchers.slurm.script import MOST_NOTICE, gres

RESOLUTION: Final = 60.0
"""Seconds by which Slurm may send the signal of ``--signal`` early (sbatch(1))."""
_LEAST_TRAINING: Final = 60.0
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
    "clusters": "the service looks after jobs of its own cluster",
    "test-only": "it would submit nothing",
    "uid": "jobs run as the user of the service",
    "gid": "jobs run as the user of the service",
    "get-user-env": "the environment is the service's, without its credentials",
    "chdir": "ranks run in the job's work directory",
    "het-group": "an attempt is one job",
    "quiet": "the job's number would not be told",
    "help": "it would submit nothing",
    "usage": "it would submit nothing",
    "version": "it would submit nothing",
}


def check(spec: JobSpec, own: SlurmLauncherSpec) -> tuple[list[Warning_], list[FieldProblem]]:
    """Warnings and problems of ``spec``, for which ``own`` holds once the site's defaults lie under it."""
    problems = [*_time_limit(spec, own), *_gpus(spec, own), *_options(own), *_volumes(spec, own)]
    for name, secret in spec.secrets.items():
        if secret.from_secret is not None:
            text = "Slurm has no Secrets: name a variable of the service's environment (from_env)"
            problems.append(_problem(f"/secrets/{name}", text))
    warnings = []
    if spec.volumes and spec.image is None and not problems:
        text = (
            "without an image nothing is mounted: the ranks find these paths as the nodes have them, read_only or not"
        )
        warnings.append(Warning_(code="volumes-as-they-are", pointer="/volumes", detail=text))
    return warnings, problems


def _time_limit(spec: JobSpec, own: SlurmLauncherSpec) -> list[FieldProblem]:
    """The agents are told to stop so long before the limit that the longest stop fits in."""
    notice = longest_stop(spec)
    if notice > MOST_NOTICE:
        text = f"Slurm gives at most {MOST_NOTICE} s of notice before a time limit: make it shorter"
        return [_problem("/policy/stop_grace", text)]
    least = notice + RESOLUTION + _LEAST_TRAINING
    if own.time_limit is None or own.time_limit >= least:
        return []
    text = (
        f"agents are told to stop up to {notice + RESOLUTION:.0f} s before the limit (policy.stop_grace, its end, and the minute "
        f"that Slurm may be early), so nothing would be trained: at least {least:.0f} s, or a shorter policy.stop_grace"
    )
    return [_problem("/launcher/time_limit", text)]


def _gpus(spec: JobSpec, own: SlurmLauncherSpec) -> list[FieldProblem]:
    kind = spec.resources.gpu
    if kind is not None and own.gres is None and _GRES_TYPE.fullmatch(kind) is None:
        text = f"{kind!r} is no type of a gres: name one of `sinfo -o %G`, such as a100, or gpu for any"
        return [_problem("/resources/gpu", text)]
    if spec.world.device == "cuda" and gres(spec, own) is None:
        text = "no GPU is asked for: give its type as Slurm has it, or gpu for any (or launcher.gres)"
        return [_problem("/resources/gpu", text)]
    return []


def _options(own: SlurmLauncherSpec) -> list[FieldProblem]:
    found = []
    for name in own.options:
        if name in _OWN_KEYS:
            found.append(_problem(f"/launcher/options/{name}", f"it has a key of its own: {_OWN_KEYS[name]}"))
        elif name in _REFUSED:
            found.append(_problem(f"/launcher/options/{name}", f"Ratchet cannot work with it: {_REFUSED[name]}"))
        elif short := sorted(full for full in {*_OWN_KEYS, *_REFUSED, *OWNED_OPTIONS} if full.startswith(name)):
            text = f"sbatch may take it for short for {' or '.join(short)}, which cannot be given: write options out"
            found.append(_problem(f"/launcher/options/{name}", text))
    return found


def _volumes(spec: JobSpec, own: SlurmLauncherSpec) -> list[FieldProblem]:
    found = []
    for i, volume in enumerate(spec.volumes):
        for key, text in _volume(volume, spec.image is not None):
            found.append(_problem(f"/volumes/{i}/{key}", text))
    return found


def _volume(volume: VolumeSpec, contained: bool) -> list[tuple[str, str]]:
    if volume.host_path is None:
        return [(volume.source, "Slurm knows no such source: name a directory of every node (host_path)")]
    found = []
    if volume.sub_path is not None:
        found.append(("sub_path", "give the whole path as host_path"))
    if not contained and volume.mount_path != volume.host_path:
        found.append(("mount_path", "without an image nothing is mounted: it must be host_path"))
    if contained and "," in volume.host_path + volume.mount_path:
        found.append(("host_path", "a path with a comma cannot be mounted"))
    return found


def _problem(pointer: str, detail: str) -> FieldProblem:
    return FieldProblem(pointer=pointer, code=_CANNOT, detail=detail)
