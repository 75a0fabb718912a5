"""What ``ratchet doctor`` says of the jobs: do run directory and database belong together, does anything run that neither knows,
do the clocks agree? Reads alone; ``rows`` are those of a database that perhaps nobody has open.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ratchet_contract import environment
from ratchet_contract.findings import Finding, not_checked, ok, warning
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths
from ratchet_contract.plural import counted
from ratchet_service.launchers import processes
from ratchet_service.unrecorded import difference
from ratchet_service.worker_user import recorded

MAX_SKEW: Final = 5.0
"""Seconds between this machine's clock and the database's, by which leases end."""
_LOOK_TWICE: Final = 1.0
_LOG_BYTES: Final = 256 << 20
_LATER: Final = (
    "docs/operations.md, Restore: submit lost ones again, or move their directories away; the service sees to others"
)


def run_directory(
    home: HomePaths, rows: Callable[[Collection[str]], dict[str, int]], begun: Callable[[], Iterator[str]]
) -> Finding:
    """See ``unrecorded``."""
    try:
        found = difference(home, rows, begun)
    except OSError as error:
        why = f"{home.jobs}: {error.strerror or error}"
        return not_checked("jobs on disk", "unknown", detail=why, cure="check owner and mode of the run directory")
    sentences = "; ".join(found.sentences())
    if not sentences:
        return ok("jobs on disk", "as in the database")
    value = f"{len(found.lost) + len(found.ahead) + len(found.gone) + len(found.unread)} differ"
    return warning("jobs on disk", value, detail=sentences, cure=_LATER)


def user(home: HomePaths) -> Finding:
    """Has users' code a user of its own here?"""
    name, user = "jobs' user", recorded(home)
    if user is not None:
        return ok(name, user, "local agents and ranks, and what is asked of users' code")
    uid = _service_uid(home)
    if uid is None:
        uid = os.geteuid()
    if uid != 0:
        return ok(name, f"the service's own (user {uid})", "code of local jobs can read the database: see --run-as")
    return warning(
        name,
        "root",
        detail="the code of every local job runs as root",
        cure="start the service with --run-as USER --auth token (docs/security.md), or as another user than root",
    )


def _service_uid(home: HomePaths) -> int | None:
    """Of the service that runs; None where none does, or it cannot be told."""
    try:
        pid = ServiceFile.model_validate_json(home.service_file.read_bytes()).pid
        return Path(f"/proc/{pid}").stat().st_uid
    except (OSError, ValidationError):
        return None


def orphans(home: HomePaths, alive: Callable[[], set[str]]) -> Finding:
    """Processes of attempts (``JOB/NNNN``) that no row of the database calls alive; those of one that ends right now are
    looked at twice."""
    left = _running(home) - alive()
    if left:
        time.sleep(_LOOK_TWICE)
        left &= _running(home) - alive()
    if not left:
        return ok("orphans", "none", "every process of a job belongs to an attempt that the database knows")
    names = ", ".join(sorted(left)[:5])
    return warning(
        "orphans",
        counted(len(left), "attempt"),
        detail=f"processes run of {names}, which the database does not call alive",
        cure="start the service (`ratchet serve`): its reconciler ends them at once",
    )


def clock(there: datetime) -> Finding:
    """``there``: what the database's server just said."""
    seconds = (there.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    if abs(seconds) > MAX_SKEW:
        return warning(
            "database clock",
            f"{seconds:+.1f} s",
            detail="against this machine: times in events and back-offs are off by as much",
            cure="timedatectl set-ntp true, on both machines (of a container: on its host)",
        )
    return ok("database clock", "agrees", f"{seconds:+.1f} s against this machine")


def sqlite_files(path: Path, mode: str) -> list[Finding]:
    """The log beside the database; ``mode``: its journal's."""
    if mode != "wal":
        return [ok("database log", mode, "the next `ratchet serve` puts it into WAL mode")]
    try:
        size = path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        size = 0
    if size > _LOG_BYTES:
        return [
            warning(
                "database log",
                f"{size / 2**20:.0f} MiB",
                detail=f"{path.name}-wal grows as long as somebody reads without an end",
                cure="end programs that hold the database open, other than the service; then restart the service",
            )
        ]
    return [ok("database log", "WAL", f"{size / 2**20:.1f} MiB")]


def _running(home: HomePaths) -> set[str]:
    found = set()
    for _, folder in processes.values_of(environment.ATTEMPT_DIR):
        try:
            job_id, word, number = Path(folder).relative_to(home.jobs).parts
        except ValueError:
            continue
        if word == "attempts":
            found.add(f"{job_id}/{number}")
    return found
