"""Finds attempts that the run directory has and the database lacks: those after the backup from which the database was restored.
An attempt's number is the fencing token of all that it writes, so a number that the disk has seen is never assigned again. This
module changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from ratchet_contract.paths import (
    AttemptPaths,
    HomePaths,
    JobPaths,
    is_job_id,
    parse_attempt_dir_name,
    parse_checkpoint_dir_name,
)
from ratchet_contract.plural import pluralize
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.isolation.file_access import as_owner

_BATCH_SIZE: Final = 500
"""Number of jobs per query."""
_MAX_NAMES: Final = 10
_MAX_AHEAD: Final = 10_000
"""A name with an attempt's number so far above the job's newest is none of the service: user code can make such names."""


@dataclass(frozen=True)
class Next:
    """The number of a job's next attempt. ``on_disk`` True: the attempt's directory exists already. ``skipped``: numbers that are
    left out, since a checkpoint on the disk was written by an attempt with the last of them."""

    number: int
    on_disk: bool = False
    skipped: range = range(0)


def next_attempt(paths: JobPaths, attempt: int) -> Next:
    """Return the number of the attempt after ``attempt``, the newest one in the database. If the disk has directories of later
    attempts, it is the first of them. Otherwise it is greater than the number of each attempt that wrote a checkpoint on the
    disk. Numbers far above ``attempt`` do not count. Raises ``OSError`` if a directory cannot be read."""
    later = range(attempt + 1, attempt + _MAX_AHEAD + 1)
    attempts = sorted(number for number in _attempt_numbers(paths) if number in later)
    if attempts:
        return Next(attempts[0], on_disk=True)
    seen = [number for folder in (paths.checkpoints, paths.quarantine) for number in _writer_attempts(folder)]
    highest = max([attempt, *(number for number in seen if number in later)])
    return Next(highest + 1, skipped=range(attempt + 1, highest + 1))


def launched_at(paths: AttemptPaths, now: datetime) -> datetime:
    """Return when the attempt's ``launch.json`` was written, at most ``now``; ``now`` if that is unknown."""
    try:
        return min(now, datetime.fromtimestamp(paths.launch_file.stat().st_mtime, UTC))
    except (OSError, ValueError, OverflowError):  # the job's code may set any time
        return now


@dataclass(frozen=True)
class Difference:
    """Differences between a run directory and a database, as job ids. ``without_row``: jobs that have attempts on the disk, but
    no row. ``with_unknown_attempts``: jobs of which the disk has later attempts than the database. ``without_directory``: jobs
    with attempts in the database, but without a directory; kept outputs alone do not count. ``unreadable``: jobs whose directory
    cannot be read."""

    without_row: tuple[str, ...] = ()
    with_unknown_attempts: tuple[str, ...] = ()
    without_directory: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each kind of difference that occurs; none if there is no difference."""
        if self.without_row:
            yield (
                f"{_count(self.without_row)} on the disk, but not in the database: {_names(self.without_row)}. Their files "
                "stay; their processes are ended when a service starts"
            )
        if self.with_unknown_attempts:
            yield (
                f"{_count(self.with_unknown_attempts)} with attempts that the database does not know: "
                f"{_names(self.with_unknown_attempts)}. They are recorded"
            )
        if self.without_directory:
            yield f"{_count(self.without_directory)} in the database, but not on the disk: {_names(self.without_directory)}"
        if self.unreadable:
            yield f"{_count(self.unreadable)} whose directory cannot be read: {_names(self.unreadable)}"


def compare(home: HomePaths, database: Database) -> Difference:
    """Compare the job directories of ``home`` with the rows of all jobs. Raises SQLAlchemy's errors and ``OSError``."""

    def newest_attempts(ids: Collection[str]) -> dict[str, int]:
        """Return id -> number of the newest attempt, for those of ``ids`` that have a row."""
        query = sa.select(Job.id, Job.attempt)
        with database.read() as session:
            return {job_id: attempt for job_id, attempt in session.execute(query.where(Job.id.in_(ids)))}  # noqa: C416

    def begun_jobs() -> Iterator[str]:
        """Yield the ids of all jobs with at least one attempt."""
        with database.read() as session:
            yield from session.scalars(sa.select(Job.id).where(Job.attempt > 0).execution_options(yield_per=10_000))

    return difference(home, newest_attempts, begun_jobs)


def difference(
    home: HomePaths,
    newest_attempts: Callable[[Collection[str]], dict[str, int]],
    begun_jobs: Callable[[], Iterator[str]],
) -> Difference:
    """Like ``compare``. ``newest_attempts``: returns id -> newest attempt, for ids that have a row; ``begun_jobs``: yields the
    ids of jobs with an attempt."""
    on_disk = sorted(name for name in _names_in(home.jobs) if is_job_id(name))
    lost, ahead, unread = list[str](), list[str](), list[str]()
    deleted = set[str]()
    for i in range(0, len(on_disk), _BATCH_SIZE):
        part = on_disk[i : i + _BATCH_SIZE]
        known = newest_attempts(part)
        for job_id in part:
            try:
                if job_id not in known:
                    if _attempts_folder(home.job(job_id)).is_dir():  # else only its checkpoints were kept
                        lost.append(job_id)
                    continue
                if home.job(job_id).kept_marker.exists():  # deleted, except its outputs
                    deleted.add(job_id)
                following = next_attempt(home.job(job_id), known[job_id])
                if following.on_disk or following.skipped:
                    ahead.append(job_id)
            except OSError:
                unread.append(job_id)
    there = set(on_disk) - deleted
    gone = sorted(job_id for job_id in begun_jobs() if job_id not in there)
    return Difference(tuple(lost), tuple(ahead), tuple(gone), tuple(unread))


def _attempts_folder(paths: JobPaths) -> Path:
    """Return the directory of all attempts of the job."""
    return paths.attempt(0).root.parent


def _attempt_numbers(paths: JobPaths) -> Iterator[int]:
    """Yield the numbers of the attempts that have a directory."""
    for name in _names_in(_attempts_folder(paths)):
        if (number := parse_attempt_dir_name(name)) is not None:
            yield number


def _writer_attempts(folder: Path) -> Iterator[int]:
    """Yield the attempts that wrote the checkpoints in ``folder``, complete or not, one for each checkpoint."""
    for name in _names_in(folder):
        # names in a quarantine may end with ``.1`` etc.
        parsed = parse_checkpoint_dir_name(".".join(name.split(".")[:2]))
        if parsed is not None:
            yield parsed[1]


def _names_in(folder: Path) -> list[str]:
    """Return the names in the directory; none if it does not exist. Raises other ``OSError``."""
    try:
        with as_owner(folder):
            return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []


def _count(names: Collection[str]) -> str:
    return pluralize(len(names), "job")


def _names(names: Collection[str]) -> str:
    """Return the names as text: at most ``_MAX_NAMES`` of them, and how many more there are."""
    shown = ", ".join(list(names)[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
