"""Which of a job's faults are read from the database at all."""

from __future__ import annotations

from sqlalchemy.orm import Session

from ratchet_service.db.models import Job
from ratchet_service.scheduling.node_faults import exclusions


def test_job_that_names_its_nodes_for_slurm_excludes_none() -> None:
    """Slurm refuses a job that names a node and excludes it."""
    with Session() as session:  # the database is not read
        for option in ("nodelist", "nodefile"):
            assert exclusions(session, Job(spec={"launcher": {"kind": "slurm", "options": {option: "n1"}}}), 2) == []
