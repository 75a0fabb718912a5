"""What the run directory has and the database has not: what happened behind a backup that was restored.

The number of an attempt is the token by which everything is fenced, and it names checkpoints. So one that the disk has seen is
never given away again. An attempt whose directory is there is taken in under its own number, as one that ended: nothing of it is
left alive, its spools are read, its checkpoints adopted, its end is counted, as if the service had only been away. Where just
checkpoints are left of it, its number is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from ratchet_contract.paths import AttemptPaths, HomePaths, JobPaths, is_job_id, parse_checkpoint_dir_name
from ratchet_contract.plural import counted
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Job

EVENT: Final = "attempt-found"
_AT_ONCE: Final = 500
"""Jobs that are asked for in one query."""
_SHOWN: Final = 10


@dataclass(frozen=True)
class Next:
    """The number of a job's next attempt. ``found``: its directory is there, and is to be taken in. ``skipped``: numbers before
    it that the disk has seen and of which no directory is left."""

    number: int
    found: bool = False
    skipped: range = range(0)


def next_attempt(paths: JobPaths, epoch: int) -> Next:
    """What comes after attempt ``epoch``, the newest that the row knows. Raises ``OSError`` where the disk does not answer."""
    attempts = sorted(number for number in _attempts(paths) if number > epoch)
    if attempts:
        return Next(attempts[0], found=True)
    highest = max([epoch, *_epochs(paths.checkpoints), *_epochs(paths.quarantine)])
    return Next(highest + 1, skipped=range(epoch + 1, highest + 1))


def launched_at(paths: AttemptPaths, now: datetime) -> datetime:
    """When the attempt's directory was given its ``launch.json``; ``now`` where that cannot be told."""
    try:
        return min(now, datetime.fromtimestamp(paths.launch_file.stat().st_mtime, UTC))
    except OSError:
        return now


@dataclass(frozen=True)
class Difference:
    """Between a run directory and a database. ``lost``: jobs with a directory and no row; ``ahead``: jobs with attempts that
    their row does not know; ``gone``: jobs that have begun, by their row, and have no directory, or only what a deletion left."""

    lost: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def sentences(self) -> Iterator[str]:
        """For people; nothing where nothing differs."""
        if self.lost:
            yield (
                f"{_count(self.lost)} on the disk, and not in the database: {_names(self.lost)}. Their files stay; what runs of "
                "them is ended when a service starts"
            )
        if self.ahead:
            yield f"{_count(self.ahead)} with attempts that the database does not know: {_names(self.ahead)}. They are taken in"
        if self.gone:
            yield f"{_count(self.gone)} in the database, and not on the disk: {_names(self.gone)}"
        if self.unread:
            yield f"{_count(self.unread)} whose directory cannot be read: {_names(self.unread)}"


def compare(home: HomePaths, database: Database) -> Difference:
    """Reads all job directories' names and all jobs' numbers. Raises SQLAlchemy's errors, and ``OSError``."""

    def rows(ids: Collection[str]) -> dict[str, int]:
        query = sa.select(Job.id, Job.epoch)
        with database.read() as session:
            return {job_id: epoch for job_id, epoch in session.execute(query.where(Job.id.in_(ids)))}  # noqa: C416

    def begun() -> Iterator[str]:
        with database.read() as session:
            yield from session.scalars(sa.select(Job.id).where(Job.epoch > 0).execution_options(yield_per=10_000))

    return difference(home, rows, begun)


def difference(
    home: HomePaths, rows: Callable[[Collection[str]], dict[str, int]], begun: Callable[[], Iterator[str]]
) -> Difference:
    """``rows``: newest attempt by id, of those ids that are jobs; ``begun``: ids of all jobs with an attempt."""
    on_disk = sorted(name for name in _names_in(home.jobs) if is_job_id(name))
    lost, ahead, unread = list[str](), list[str](), list[str]()
    deleted = set[str]()
    for i in range(0, len(on_disk), _AT_ONCE):
        part = on_disk[i : i + _AT_ONCE]
        known = rows(part)
        for job_id in part:
            try:
                if job_id not in known:
                    if _attempts_folder(home.job(job_id)).is_dir():  # else its checkpoints alone were kept
                        lost.append(job_id)
                    continue
                if home.job(job_id).kept_file.exists():  # all but its outputs
                    deleted.add(job_id)
                following = next_attempt(home.job(job_id), known[job_id])
                if following.found or following.skipped:
                    ahead.append(job_id)
            except OSError:
                unread.append(job_id)
    there = set(on_disk) - deleted
    gone = sorted(job_id for job_id in begun() if job_id not in there)
    return Difference(tuple(lost), tuple(ahead), tuple(gone), tuple(unread))


def _attempts_folder(paths: JobPaths) -> Path:
    return paths.attempt(0).root.parent


def _attempts(paths: JobPaths) -> Iterator[int]:
    for name in _names_in(_attempts_folder(paths)):
        if name.isascii() and name.isdigit() and paths.attempt(int(name)).root.name == name:
            yield int(name)


def _epochs(folder: Path) -> Iterator[int]:
    """Of the checkpoints in it, whole or not; a quarantine adds ``.1`` and the like to their names."""
    for name in _names_in(folder):
        parsed = parse_checkpoint_dir_name(".".join(name.split(".")[:2]))
        if parsed is not None:
            yield parsed[1]


def _names_in(folder: Path) -> list[str]:
    try:
        with as_owner(folder):
            return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []


def _count(names: Collection[str]) -> str:
    return counted(len(names), "job")


def _names(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
