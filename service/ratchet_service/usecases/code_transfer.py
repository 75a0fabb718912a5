"""Gives a node without access to the run directory a job's code and start file, by digest."""

from __future__ import annotations

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.code.tree import UNLIMITED, Entry, file_entry, list_entries
from ratchet_contract.errors import NotFound
from ratchet_contract.paths import HomePaths
from ratchet_service.agent_reports.fencing import raise_if_stale
from ratchet_service.agent_reports.ingest import read_authorised_rows
from ratchet_service.db import audit
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.db.principal import Principal


def parse_attempt_number(text: str) -> int:
    """Return the attempt number in a part of a URL path; 0, which no attempt has, if it is invalid."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def find_tree(
    session: Session, homes: HomePaths, job_id: str, number: str, digest: str, token: str | None
) -> list[Entry]:
    """Return the files of the snapshot ``digest``, if it is the job's code or start file. ``number``, ``token``: of the
    requesting attempt. Raise ``Refused``, ``NotFound``, or ``Stale`` for an ended or earlier attempt."""
    found = read_authorised_rows(session, job_id, parse_attempt_number(number), token)
    raise_if_stale(found.job, found.attempt)
    resolved = session.get_one(Job, job_id).resolved
    folder = homes.code / digest
    start = digest == resolved.get("start_digest")
    if not (start or digest == resolved.get("code_digest")) or not folder.is_dir():
        raise NotFound(f"job {job_id} has no code or file with the digest {digest[:64]!r}", code="code-not-found")
    return [file_entry(path) for path in folder.iterdir()] if start else list_entries(folder, UNLIMITED)


def record_upload(database: Database, digest: str, caller: Principal) -> None:
    """Record in the audit log that ``caller`` has sent the tree of code ``digest``, which was not there before."""
    with database.write(caller) as session:
        audit.record(session, AuditAction.UPLOAD, "code", digest, caller.owner, {})
