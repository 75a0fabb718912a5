"""Checks of ``ratchet doctor`` on jobs' directories, processes and user, and on the database's clock and log."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ratchet_contract import env_vars
from ratchet_contract.doctor.findings import Finding, not_checked, ok, warning
from ratchet_contract.paths import HomePaths
from ratchet_contract.plural import pluralize
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import ServiceFile
from ratchet_service.checkpoints.run_directory_scan import difference
from ratchet_service.isolation.run_as import recorded_user

MAX_SKEW_SECONDS: Final = 5.0
"""Tolerated seconds between this machine's clock and the database server's, by which leases expire."""
_RECHECK_SECONDS: Final = 1.0
_MAX_WAL_BYTES: Final = 256 << 20
_LATER: Final = (
    "docs/backup.md, Restore: submit lost jobs again, or move their directories away; the service handles the others"
)


def check_run_directory(
    home: HomePaths,
    newest_attempts: Callable[[Collection[str]], dict[str, int]],
    begun_jobs: Callable[[], Iterator[str]],
) -> Finding:
    """Return the finding of comparing run directory and database: a warning if they differ, ``not-checked`` if the directory
    cannot be read. The parameters are as in ``run_directory_scan.difference``."""
    try:
        found = difference(home, newest_attempts, begun_jobs)
    except OSError as error:
        why = f"{home.jobs}: {error.strerror or error}"
        return not_checked("jobs on disk", "unknown", detail=why, cure="check owner and mode of the run directory")
    sentences = "; ".join(found.sentences())
    if not sentences:
        return ok("jobs on disk", "as in the database")
    differing = (found.without_row, found.with_unknown_attempts, found.without_directory, found.unreadable)
    return warning("jobs on disk", f"{sum(map(len, differing))} differ", detail=sentences, cure=_LATER)


def check_job_user(home: HomePaths) -> Finding:
    """Return the finding that says as which user the code of local jobs runs: the recorded one, else the running
    service's, else this process's. A warning if that is root."""
    name, user = "jobs' user", recorded_user(home)
    if user is not None:
        return ok(name, user, "local agents, ranks and checks of users' code")
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
    """Return the user id of the process that ``service.json`` names; None if it is unknown."""
    try:
        pid = ServiceFile.model_validate_json(home.service_file.read_bytes()).pid
        return Path(f"/proc/{pid}").stat().st_uid
    except (OSError, ValidationError):
        return None


def check_orphans(home: HomePaths, live_attempts: Callable[[], set[str]]) -> Finding:
    """Return the finding about attempts with processes here that are not among ``live_attempts()``. May block for 1 s."""
    orphaned = _running_attempts(home) - live_attempts()
    if orphaned:
        time.sleep(_RECHECK_SECONDS)
        orphaned &= _running_attempts(home) - live_attempts()
    if not orphaned:
        return ok("orphans", "none", "every process of a job belongs to an attempt that the database knows")
    names = ", ".join(sorted(orphaned)[:5])
    return warning(
        "orphans",
        pluralize(len(orphaned), "attempt"),
        detail=f"processes run of {names}, which are not alive according to the database",
        cure="start the service (`ratchet serve`): its reconciler ends them at once",
    )


def check_clock(server_time: datetime) -> Finding:
    """Return the finding of comparing this machine's clock with ``server_time``, the current time of the database server."""
    seconds = (server_time.astimezone(UTC) - datetime.now(UTC)).total_seconds()
    if abs(seconds) > MAX_SKEW_SECONDS:
        return warning(
            "database clock",
            f"{seconds:+.1f} s",
            detail="against this machine: times in events and back-offs are wrong by the same amount",
            cure="timedatectl set-ntp true, on both machines (of a container: on its host)",
        )
    return ok("database clock", "agrees", f"{seconds:+.1f} s against this machine")


def check_wal(path: Path, mode: str) -> list[Finding]:
    """Return the finding about the size of the SQLite database's write-ahead log, or about another journal mode.
    ``path``: the database file; ``mode``: its journal mode."""
    if mode != "wal":
        return [ok("database log", mode, "the next `ratchet serve` puts it into WAL mode")]
    try:
        size = path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        size = 0
    if size > _MAX_WAL_BYTES:
        return [
            warning(
                "database log",
                f"{size / 2**20:.0f} MiB",
                detail=f"{path.name}-wal grows while another connection keeps a read transaction open",
                cure="end programs that hold the database open, other than the service; then restart the service",
            )
        ]
    return [ok("database log", "WAL", f"{size / 2**20:.1f} MiB")]


def _running_attempts(home: HomePaths) -> set[str]:
    """Return ``JOB/NNNN`` of the run directory's attempts with processes on this machine whose environment this process may
    read."""
    found = set()
    for _, folder in procfs.processes_with_variable(env_vars.ATTEMPT_DIR):
        try:
            job_id, word, number = Path(folder).relative_to(home.jobs).parts
        except ValueError:
            continue
        if word == "attempts":
            found.add(f"{job_id}/{number}")
    return found
