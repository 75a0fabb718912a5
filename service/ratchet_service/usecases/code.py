"""The code of a job, and the file that it starts from, for a node that does not see the run directory, by digest."""

from __future__ import annotations

from sqlalchemy.orm import Session

from ratchet_contract.code_tree import UNLIMITED, Entry, entries, file_entry
from ratchet_contract.errors import NotFound
from ratchet_contract.paths import HomePaths
from ratchet_service.fencing import fence
from ratchet_service.ingest import authorised
from ratchet_service.models import Job


def number_of(text: str) -> int:
    """The attempt's number as it stands in a path; 0 for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def find(session: Session, homes: HomePaths, job_id: str, number: str, digest: str, token: str | None) -> list[Entry]:
    """What the tree with ``digest`` holds, if it is one of the job's.

    Raises ``Refused`` (``token-missing``, ``token-wrong``), ``NotFound`` (``attempt-not-found``, ``code-not-found``),
    ``Stale`` (``stale-epoch``).
    """
    found = authorised(session, job_id, number_of(number), token)
    fence(found.job, found.attempt)
    resolved = session.get_one(Job, job_id).resolved
    folder = homes.code / digest
    start = digest == resolved.get("start_digest")
    if not (start or digest == resolved.get("code_digest")) or not folder.is_dir():
        raise NotFound(f"job {job_id} has no code or file with the digest {digest[:64]!r}", code="code-not-found")
    return [file_entry(path) for path in folder.iterdir()] if start else entries(folder, UNLIMITED)
