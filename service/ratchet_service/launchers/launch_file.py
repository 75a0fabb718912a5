"""Builds and reads ``launch.json``: what an attempt has to run, from the job's row, its spec and its placement."""

from __future__ import annotations

from typing import Any, Final

from pydantic import ValidationError

from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.isolation.file_access import open_read

_MAX_BYTES: Final = 16 << 20
"""The most bytes to read of a ``launch.json``, most of which is the spec, a request's body. User code may have replaced the
file."""


def build_launch_file(
    home: HomePaths,
    job_id: str,
    attempt: int,
    spec: JobSpec,
    resolved: Resolved,
    gpus: tuple[int, ...],
    token: str,
    desired: Any,
) -> LaunchFile:
    """Return the launch file for node 0; the caller adds what depends on the job's history. ``gpus``: GPU indices of node 0.
    ``token``: the agents' report token."""
    job = home.job(job_id)
    paths = job.attempt(attempt)
    digest = resolved.code_digest
    code = str(home.code / digest) if digest else None
    if spec.code is not None and spec.code.source == "nodes":
        code = spec.code.path
    start = None
    if spec.start_from is not None and resolved.start_digest is not None:
        start = home.code / resolved.start_digest / spec.start_from.path.rpartition("/")[2]
    return LaunchFile(
        job_id=job_id,
        attempt=attempt,
        world_size=spec.world.size,
        ranks=list(range(spec.world.ranks_per_node)),
        spec=spec,
        resolved=resolved,
        job_root=str(job.root),
        attempt_dir=str(paths.root),
        code_dir=code,
        start_file=str(start) if start is not None else None,
        environments_dir=str(home.environments) if spec.environment is not None else None,
        workdir=str(job.work_dir),
        gpus=list(gpus),
        report_token=token,
        service_file=str(home.service_file),
        service_ca=_read_service_ca(home),
        desired=desired,
    )


def _read_service_ca(home: HomePaths) -> str | None:
    """Return, as PEM text, the certificates by which agents verify the service. None: the service has written none."""
    try:
        return home.service_authorities.read_text(encoding="ascii")
    except FileNotFoundError:
        return None


def read_launch_file(paths: AttemptPaths) -> LaunchFile | None:
    """Return the attempt's launch file; None if it cannot be read, is too large or cannot be parsed."""
    try:
        with open_read(paths.launch_file) as file:
            data = file.read(_MAX_BYTES + 1)
        return LaunchFile.model_validate_json(data) if len(data) <= _MAX_BYTES else None
    except (OSError, ValidationError):
        return None
