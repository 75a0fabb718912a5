"""What a ``ratchet run`` tells on standard error while it trains: events, progress, and the last words of a failed rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from ratchet_client.cli.run.rank_output import last_lines
from ratchet_client.cli.watch import PlainView

if TYPE_CHECKING:
    from ratchet_client.cli.figures import Snapshot
    from ratchet_contract.api import EventView
    from ratchet_contract.paths import JobPaths

_PROGRESS_EVERY: Final = 30.0
_LAST_LINES: Final = 20
_KNOWN: Final = frozenset({"submitted", "launch", "resume", "rank-started", "training", "checkpoint"})
"""Events that the command itself has told of, or that its progress lines tell."""


def private_commands(text: str, job_id: str, home: str) -> str:
    """A message of the service as it holds for a private one, which ends with the command: what ``ratchet resume`` would do the
    same command does, with the code as it is then. Others need the service, in ``home``."""
    again = (
        rf"`ratchet resume (?:JOB|{job_id})`(?:, which runs the same code again, or with changed code `--code DIR`)?"
    )
    return re.sub("`ratchet (?!run|serve)", f"`ratchet --home {home} ", re.sub(again, "the same command", text))


class RunView(PlainView):
    """``told`` gives an event's message the form that holds for this command. ``revive`` is called when the service does not
    answer, and tells whether another was started. ``ranks``: whose output is shown anyway; None: all."""

    def __init__(
        self,
        job: JobPaths,
        ranks: Collection[int] | None,
        told: Callable[[str], str],
        revive: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(say, _PROGRESS_EVERY, at_once=False)
        self._job, self._ranks, self._told, self._revive = job, ranks, told, revive

    def progress(self, now: Snapshot) -> None:
        if not now.job.phase.terminal:  # the command tells of the end
            super().progress(now)

    def event(self, event: EventView) -> None:
        if event.type in _KNOWN:
            return
        super().event(event.model_copy(update={"message": self._told(event.message)}))
        rank = event.data.get("rank")
        if (
            event.type == "attempt-ended"
            and event.attempt is not None
            and isinstance(rank, int)
            and not self._shown(rank)
        ):
            for line in last_lines(self._job, event.attempt, rank, _LAST_LINES):
                self._say(f"{event.attempt}.{rank} | {line}")

    def _shown(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def gap(self, detail: str) -> None:
        if not self._revive():
            super().gap(detail)
