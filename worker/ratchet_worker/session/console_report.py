"""Lines on stderr for the user of a run without a service: each rank prints some of its messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ratchet_contract.paths import JobPaths
from ratchet_contract.plural import pluralize, short_digests
from ratchet_contract.protocol import messages as m
from ratchet_worker.ipc.report_spool import Spool
from ratchet_worker.training.replay_proof import INEXACT, describe_inexact


class ConsoleReport(Spool):
    """A rank's spool that also prints the messages meant for the user on stderr. ``all_ranks_proved``: called once, when all
    redone steps of this rank have proved equal. It returns True on the last rank that calls it."""

    def __init__(self, path: Path, displayed_path: str, all_ranks_proved: Callable[[], bool]) -> None:
        super().__init__(path)
        self._displayed_path, self._all_ranks_proved = displayed_path, all_ranks_proved
        self._last_redone: m.RedoneSteps | None = None
        self._proved = False

    def append(self, message: m.RankMessage) -> None:
        """Write the message to the spool, and print its lines, if it has any."""
        super().append(message)
        for line in self._lines(message):
            print_line(line)

    def close(self) -> None:
        """Close the spool. Rank 0 may first print how many of the redone steps were compared."""
        found, self._last_redone = self._last_redone, None
        if (
            found is not None
            and found.rank == 0
            and found.first_difference is None
            and found.reason is not None
            and 0 < found.compared < found.steps
        ):
            compared = f"of {_count_redone(found)} {found.compared} were compared and are the same for rank 0"
            print_line(f"{compared}: {found.reason}")
        super().close()

    def _lines(self, message: m.RankMessage) -> list[str]:
        """Return the lines to print for a message; empty for one that is not printed, such as metrics."""
        match message:
            case m.Resumed():
                return self._resumed_lines(message)
            case m.RedoneSteps():
                return self._compared_lines(message)
            case m.CheckpointCommitted() if message.finished or message.reason == "stop":
                place = JobPaths(Path(self._displayed_path)).checkpoint(message.step, message.attempt)
                tail = ", and the run has ended" if message.finished else ""
                return [f"step {message.step} is saved in {_relative(place)}{tail}"]
            case m.CheckpointFailed():
                return [f"step {message.step} was not saved: {message.error}"]
            case m.Quarantined():
                return [f"the checkpoint of step {message.step} is damaged and was set aside: {message.error}"]
            case m.Alert():
                return [f"{message.level}: {' '.join(message.line.split())}"]
            case m.Note():
                return [message.message]
        return []

    def _resumed_lines(self, message: m.Resumed) -> list[str]:
        """Return the lines for the start of a run: from where and, at a resume, whether it is exact."""
        report = message.report
        if report.verdict == "fresh":
            return [f"begins at step 0: there is no checkpoint in {self._displayed_path}"]
        place = f"step {report.base.step} of {self._displayed_path}"
        notes, earlier = [*report.notes], report.not_exact_since
        head = f"resumed exactly from {place}"
        if report.verdict != "exact":
            head = f"resumed from {place}, and not exactly: {short_digests(describe_inexact(report))}"
        elif earlier is not None:
            head = f"resumed from {place} as it was saved, which is {earlier}: the checkpoint itself has other bits"
            notes = [note for note in notes if not note.startswith(earlier)]
        return [head, *(f"note: {note}" for note in notes)]

    def _compared_lines(self, message: m.RedoneSteps) -> list[str]:
        """Record the comparison of redone steps, and call ``all_ranks_proved``, once, if all are equal. Return the line to print,
        or none if there is nothing new to report."""
        before, self._last_redone = self._last_redone, message
        if message.first_difference is not None:
            told = before is not None and before.first_difference is not None
            return [] if told else [f"not exact: {message.first_difference.sentence()}"]
        if message.compared == 0 and message.reason is not None and message.rank == 0 and before is None:
            reason = "the resume is not exact" if message.reason.startswith(INEXACT) else message.reason
            return [f"{_count_redone(message)} of an earlier start will not be compared: {reason}"]
        if message.compared == message.steps and not self._proved:
            self._proved = True
            if self._all_ranks_proved():
                return [f"proved: {message.compared} of {_count_redone(message)}"]
        return []


def print_line(text: str) -> None:
    """Print one line for the user on stderr, above progress bars of tqdm. Ignores a closed terminal."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with suppress(OSError, ValueError):  # the terminal may be gone
        if isinstance(tqdm, type) and hasattr(tqdm, "write"):  # a script may have put something else there
            tqdm.write(f"ratchet: {text}", file=sys.stderr)
            sys.stderr.flush()
        else:
            print(f"ratchet: {text}", file=sys.stderr, flush=True)


def display_path(directory: Path) -> str:
    """Return ``directory`` as text for the user. A relative path gets ``./`` before it, unless it begins with ``..``."""
    return _relative(directory) if not directory.is_absolute() else str(directory)


def _relative(path: Path) -> str:
    """Return ``path`` as text, with ``./`` before a relative path that does not begin with ``..``."""
    return str(path) if path.is_absolute() or path.parts[:1] == ("..",) else f"./{path}"


def _count_redone(message: m.RedoneSteps) -> str:
    return pluralize(message.steps, "redone step")
