"""``launch.json``: what an attempt is to run, from the job's row, its spec and its place."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths, HomePaths
from ratchet_contract.resume import Base, Segment
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_service.ancestry import committed_of, within
from ratchet_service.file_owner import open_read
from ratchet_service.models import Checkpoint

SAVES_LOOK: Final = 20
"""Saves whose time tells how much notice the next stop needs."""
_MOST_BYTES: Final = 16 << 20
"""Of a ``launch.json``, most of which is the spec, a request's body. User code may have written another in its place."""


def launch_file(
    home: HomePaths,
    job_id: str,
    epoch: int,
    spec: JobSpec,
    resolved: Resolved,
    gpus: tuple[int, ...],
    token: str,
    desired: Any,
) -> LaunchFile:
    """What follows from spec and place alone; lineage and fork are the caller's."""
    job = home.job(job_id)
    paths = job.attempt(epoch)
    digest = resolved.code_digest
    code = str(home.code / digest) if digest else None
    if spec.code is not None and spec.code.source == "nodes":
        code = spec.code.path
    start = None
    if spec.start_from is not None and resolved.start_digest is not None:
        start = home.code / resolved.start_digest / spec.start_from.path.rpartition("/")[2]
    return LaunchFile(
        job_id=job_id,
        epoch=epoch,
        world_size=spec.world.size,
        ranks=list(range(spec.world.ranks_per_node)),
        spec=spec,
        resolved=resolved,
        job_root=str(job.root),
        attempt_dir=str(paths.root),
        code_dir=code,
        start_file=str(start) if start is not None else None,
        workdir=str(job.work),
        gpus=list(gpus),
        report_token=token,
        service_file=str(home.service_file),
        service_ca=_authorities(home),
        desired=desired,
    )


def _authorities(home: HomePaths) -> str | None:
    try:
        return home.service_authorities.read_text(encoding="ascii")
    except FileNotFoundError:
        return None


def save_seconds(session: Session, job_id: str) -> float | None:
    """The longest of the job's last saves that were reported."""
    query = sa.select(Checkpoint.seconds).where(Checkpoint.job_id == job_id, Checkpoint.seconds.is_not(None))
    last = session.scalars(query.order_by(Checkpoint.created_at.desc()).limit(SAVES_LOOK))
    return max((seconds for seconds in last if seconds is not None), default=None)


def newest_recorded(session: Session, job_id: str, segments: list[Segment]) -> Base | None:
    """The newest committed checkpoint of the lineage, as the rows have it."""
    newest = within(segments, committed_of(session, job_id))[:1]
    return Base(step=newest[0].step, epoch=newest[0].epoch, digest=newest[0].digest) if newest else None


def read_launch_file(paths: AttemptPaths) -> LaunchFile | None:
    try:
        with open_read(paths.launch_file) as file:
            data = file.read(_MOST_BYTES + 1)
        return LaunchFile.model_validate_json(data) if len(data) <= _MOST_BYTES else None
    except (OSError, ValidationError):
        return None
