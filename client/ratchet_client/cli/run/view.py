"""What a ``ratchet run`` tells on standard error while it trains: events, progress, and the last words of a failed rank."""

from __future__ import annotations

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


class RunView(PlainView):
    """``revive`` is called when the service does not answer, and tells whether another was started. ``ranks``: whose output is
    shown anyway; None: all."""

    def __init__(
        self, job: JobPaths, ranks: Collection[int] | None, revive: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        super().__init__(say, _PROGRESS_EVERY, at_once=False)
        self._job, self._ranks, self._revive = job, ranks, revive

    def progress(self, now: Snapshot) -> None:
        if not now.job.phase.terminal:  # the command tells of the end
            super().progress(now)

    def event(self, event: EventView) -> None:
        if event.type in _KNOWN:
            return
        super().event(event)
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
