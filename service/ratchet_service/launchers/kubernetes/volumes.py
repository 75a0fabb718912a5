"""Volumes and mounts of a pod: parts of the run directory, scratch space, and the job's own volumes. Of the other
jobs in the run directory, Ratchet mounts only the checkpoints that the job was forked from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_contract.paths import JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.launcher import KubernetesLauncherSpec, VolumeSpec
from ratchet_contract.spec.types import size_in_bytes
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.launchers.kubernetes.settings import Site

CODE: Final = "/ratchet/code"
"""The pod's own directory, into which the agent fetches the snapshot."""
SHM: Final = "/dev/shm"
TMP: Final = "/tmp"
_SHM_SIZE: Final = "8Gi"
_CODE_SIZE: Final = "2Gi"
"""A snapshot has at most 512 MiB in 20,000 files, each of which takes whole blocks."""


@dataclass(frozen=True)
class Mounted:
    """Volumes of the pod, and the mounts of these volumes in the agent's container, as in a pod's spec."""

    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]


def code_dir(launch: LaunchFile) -> str | None:
    """Return the path in the pod at which the ranks find the code; None: there is none."""
    return f"{CODE}/{launch.resolved.code_digest}" if _fetches_snapshot(launch) else launch.code_dir


def _fetches_snapshot(launch: LaunchFile) -> bool:
    """True if the agent fetches a snapshot of the code into the pod."""
    code = launch.spec.code
    return launch.resolved.code_digest is not None and code is not None and code.source == "snapshot"


def pod_volumes(site: Site, launch: LaunchFile, launcher: KubernetesLauncherSpec) -> Mounted:
    """Return the volumes of the pod and the mounts of the agent's container, without those of the job's patch."""
    memory = launcher.shm_size or launch.spec.resources.memory or _SHM_SIZE
    volumes: list[dict[str, Any]] = [
        {"name": "home", "persistentVolumeClaim": {"claimName": site.settings.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": memory}},
        {"name": "tmp", "emptyDir": {"sizeLimit": launcher.tmp_size}},
    ]
    mounts = [*_home_mounts(site, launch), {"name": "shm", "mountPath": SHM}, {"name": "tmp", "mountPath": TMP}]
    if _fetches_snapshot(launch):
        volumes.append({"name": "code", "emptyDir": {"sizeLimit": _CODE_SIZE}})
        mounts.append({"name": "code", "mountPath": CODE})
    for i, volume in enumerate(launch.spec.volumes):
        name = f"volume-{i}"
        volumes.append({"name": name, **_source(volume)})
        mounts.append(_mount(name, volume))
    return Mounted(volumes, mounts)


def max_disk_bytes(volumes: list[dict[str, Any]]) -> int | None:
    """Return the most bytes of disk that the pod's directories (``emptyDir``) may use; None: there is no limit."""
    found = [volume["emptyDir"] for volume in volumes if "emptyDir" in volume]
    sizes = [directory.get("sizeLimit") for directory in found if directory.get("medium") != "Memory"]
    return None if None in sizes else sum(size_in_bytes(str(size)) for size in sizes)


def _home_mounts(site: Site, launch: LaunchFile) -> list[dict[str, Any]]:
    """Return the mounts of the run directory: the job's directory and, read-only, the checkpoints of the job it was forked
    from and the directory with the stored copy of ``start_from``'s file. Deleted checkpoints of the fork's source are not mounted
    once the job has a checkpoint of its own."""
    wanted = [(launch.job_root, False)]
    if launch.fork is not None:
        source = JobPaths(Path(launch.fork.job_root)).checkpoints
        with as_owner(source):
            # Once this job has a checkpoint of its own, its source may be deleted: the kubelet would create the missing
            # directory, or not start the pod.
            if launch.recorded is None or source.is_dir():
                wanted.append((str(source), True))
    if launch.start_file is not None:
        wanted.append((str(Path(launch.start_file).parent), True))
    out = []
    for path, read_only in wanted:
        within = Path(path).relative_to(site.home.home)
        mount = {"name": "home", "mountPath": path, "subPath": str(Path(site.settings.sub_path_prefix) / within)}
        out.append(mount | {"readOnly": True} if read_only else mount)
    return out


def _source(volume: VolumeSpec) -> dict[str, Any]:
    """Return the source of a volume, as in a pod's spec."""
    match volume.source:
        case "host_path":
            return {"hostPath": {"path": volume.host_path, "type": "Directory"}}
        case "claim":
            return {"persistentVolumeClaim": {"claimName": volume.claim}}
        case "config_map":
            return {"configMap": {"name": volume.config_map}}
        case "secret":
            return {"secret": {"secretName": volume.secret}}
        case _:
            return {"emptyDir": {"sizeLimit": volume.empty_dir}}


def _mount(name: str, volume: VolumeSpec) -> dict[str, Any]:
    """Return the mount of the volume ``name`` as in a container's spec."""
    mount: dict[str, Any] = {"name": name, "mountPath": volume.mount_path}
    if volume.sub_path is not None:
        mount["subPath"] = volume.sub_path
    if volume.read_only:
        mount["readOnly"] = True
    return mount
