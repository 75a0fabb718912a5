"""What a ``ratchet run`` prints on standard error while it trains: events, progress, and a failed rank's last log lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from ratchet_client.cli.commands.wait import PlainView
from ratchet_client.cli.run.rank_output import last_lines
from ratchet_contract.phases import Event, EventType

if TYPE_CHECKING:
    from ratchet_client.cli.shared.job_figures import Snapshot
    from ratchet_contract.api.views import EventView
    from ratchet_contract.paths import JobPaths

_PROGRESS_EVERY: Final = 30.0
_LAST_LINES: Final = 20
_KNOWN: Final = frozenset(
    {
        EventType.SUBMITTED,
        Event.LAUNCH,
        Event.RESUME,
        EventType.RANK_STARTED,
        Event.TRAINING,
        EventType.CHECKPOINT,
    }
)
"""Events that the command itself or its progress lines report."""


def private_commands(text: str, job_id: str, home: str) -> str:
    """Return the service's message ``text`` with its commands in backticks adapted to a private service. ``home``: the run
    directory for ``--home``."""
    again = (
        rf"`ratchet resume (?:JOB|{job_id})`(?:, which runs the same code again, or with changed code `--code DIR`)?"
    )
    return re.sub("`ratchet (?!run|serve)", f"`ratchet --home {home} ", re.sub(again, "the same command", text))


class RunView(PlainView):
    """Prints events, progress, and the last log lines of a failed rank whose output is not shown. ``ranks``: the ranks whose
    output is shown; None: all. ``adapt_message``: returns an event's message as it is printed. ``revive``: called when the
    service does not respond; returns True if the service has ended. ``say``: prints a line."""

    def __init__(
        self,
        job: JobPaths,
        ranks: Collection[int] | None,
        adapt_message: Callable[[str], str],
        revive: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(say, _PROGRESS_EVERY, immediately=False)
        self._job, self._ranks, self._adapt_message, self._revive = job, ranks, adapt_message, revive
        self._reported = False

    def on_progress(self, snapshot: Snapshot) -> None:
        """Print a progress line from time to time; nothing once the job has ended, since the command reports the end."""
        self._reported = False  # the service responds
        if not snapshot.job.phase.terminal:  # the command reports the end
            super().on_progress(snapshot)

    def on_event(self, event: EventView) -> None:
        """Print the event, unless ``ratchet run`` or its progress lines report it in another way. If a rank has failed whose
        output is not shown, also print its last log lines."""
        if event.type in _KNOWN:
            return
        super().on_event(event.model_copy(update={"message": self._adapt_message(event.message)}))
        rank = event.data.get("rank")
        if (
            event.type == EventType.ATTEMPT_ENDED
            and event.attempt is not None
            and isinstance(rank, int)
            and not self._shown(rank)
        ):
            for line in last_lines(self._job, event.attempt, rank, _LAST_LINES):
                self._print_line(f"{event.attempt}.{rank} | {line}")

    def _shown(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def on_disconnect(self, detail: str) -> bool:
        """Start a private service again if it has ended. Otherwise print the error ``detail``, unless an error was printed since
        the service last responded. Return True, so that the next failure is passed too."""
        if not self._revive() and not self._reported:
            super().on_disconnect(detail)
            self._reported = True
        return True
