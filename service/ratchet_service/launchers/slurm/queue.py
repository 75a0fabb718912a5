"""The user's jobs as squeue has them: asked once for all attempts, and again when the answer is too old for who asks."""

from __future__ import annotations

import time
from collections.abc import Callable

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.slurm.commands import Commands, Refused, own_user
from ratchet_service.launchers.slurm.listing import (
    JSON_SINCE,
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    sacct_text,
    squeue_json,
    squeue_text,
    version_of,
)
from ratchet_service.launchers.slurm.states import JobRecord

_AWAY_SECONDS = 10.0
_HISTORY = "now-30days"


class Queue:
    """``period``: seconds that an answer holds for those who look again and again."""

    def __init__(self, commands: Commands, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._commands = commands
        self._period = period
        self._clock = clock
        self._version: tuple[int, int] | None = None
        self._jobs: dict[str, list[JobRecord]] = {}
        self._asked: float | None = None
        self._away: tuple[float, EngineUnreachable] | None = None

    def jobs(self, *, since: float | None = None) -> dict[str, list[JobRecord]]:
        """All jobs of this user by name, the ended ones too until Slurm forgets them. ``since`` (of the clock): an answer that
        was asked for before is not enough. Raises ``EngineUnreachable``; after one that did, soon, without asking again."""
        now = self._clock()
        if self._asked is not None and now - self._asked < self._period and (since is None or self._asked > since):
            return self._jobs
        if self._away is not None and now < self._away[0]:
            raise self._away[1]
        try:
            self._jobs, self._asked, self._away = self._ask(), now, None
        except EngineUnreachable as error:
            self._away = (self._clock() + max(self._period, _AWAY_SECONDS), error)
            raise
        return self._jobs

    def known_over(self, name: str) -> bool:
        """Was it so in the last answer?"""
        return all(job.over for job in self._jobs.get(name, []))

    def past(self, name: str) -> list[JobRecord]:
        """What accounting knows of a job that squeue has forgotten, else what the completion log knows; empty where a cluster
        keeps neither."""
        arguments = [
            "--noheader",
            "--parsable2",
            f"--format={SACCT_FORMAT}",
            f"--name={name}",
            f"--starttime={_HISTORY}",
        ]
        for more in (["--allocations"], ["--completion"]):
            try:
                listed = sacct_text(self._commands.run("sacct", *arguments, *more))
            except (Refused, EngineUnreachable):  # no accounting, or none of it now: there is nothing to wait for
                continue
            found = [job for job in listed if job.name == name]  # the completion log is given whole
            if found:
                return found
        return []

    def _ask(self) -> dict[str, list[JobRecord]]:
        try:
            if self._version is None:
                self._version = version_of(self._commands.run("sinfo", "--version"))
            as_json = self._version >= JSON_SINCE
            form = ["--json"] if as_json else ["--noheader", f"--Format={SQUEUE_FORMAT}"]
            output = self._commands.run("squeue", f"--user={own_user()}", "--states=all", *form)
            found = squeue_json(output) if as_json else squeue_text(output)
        except (Refused, ValueError) as error:
            raise EngineUnreachable(f"Slurm: squeue: {error}") from None
        jobs: dict[str, list[JobRecord]] = {}
        for job in sorted(found, key=lambda job: job.id):
            jobs.setdefault(job.name, []).append(job)
        return jobs
