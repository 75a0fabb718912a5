"""What a rank of a run without a service tells its user, in lines on stderr: of its messages those that a service would show.

All messages go to the spool as well, so that whoever takes the run over later has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ratchet_contract import messages as m
from ratchet_contract.paths import JobPaths
from ratchet_contract.plural import counted, short_digests
from ratchet_worker.replay_proof import INEXACT, inexact
from ratchet_worker.spool import Spool


class ConsoleReport(Spool):
    """``shown``: the run's directory as the user wrote it; ``all_ranks``: called when this rank has compared all redone steps and
    found them the same; True for the last rank to say so."""

    def __init__(self, path: Path, shown: str, all_ranks: Callable[[], bool]) -> None:
        super().__init__(path)
        self._shown, self._all_ranks = shown, all_ranks
        self._redone: m.RedoneSteps | None = None
        self._proved = False

    def append(self, message: m.RankMessage) -> None:
        super().append(message)
        for line in self._lines(message):
            say(line)

    def close(self) -> None:
        found, self._redone = self._redone, None
        if found is not None and found.rank == 0 and found.reason is not None and 0 < found.compared < found.steps:
            say(f"of {_redone(found)} {found.compared} were compared and are the same for rank 0: {found.reason}")
        super().close()

    def _lines(self, message: m.RankMessage) -> list[str]:
        match message:
            case m.Resumed():
                return self._resumed(message)
            case m.RedoneSteps():
                return self._compared(message)
            case m.CheckpointCommitted() if message.finished or message.reason == "stop":
                place = JobPaths(Path(self._shown)).checkpoint(message.step, message.epoch)
                tail = ", and the run has ended" if message.finished else ""
                return [f"step {message.step} is saved in {_relative(place)}{tail}"]
            case m.CheckpointFailed():
                return [f"step {message.step} was not saved: {message.error}"]
            case m.Quarantined():
                return [f"the checkpoint of step {message.step} is damaged and was set aside: {message.error}"]
            case m.Note():
                return [message.message]
        return []

    def _resumed(self, message: m.Resumed) -> list[str]:
        report = message.report
        if report.verdict == "fresh":
            return [f"begins at step 0: there is no checkpoint in {self._shown}"]
        place = f"step {report.base.step} of {self._shown}"
        notes, earlier = [*report.notes], report.not_exact_since
        head = f"resumed exactly from {place}"
        if report.verdict != "exact":
            head = f"resumed from {place}, and not exactly: {short_digests(inexact(report))}"
        elif earlier is not None:
            head = f"resumed from {place} as it was saved, which is {earlier}: the checkpoint itself has other bits"
            notes = [note for note in notes if not note.startswith(earlier)]
        return [head, *(f"note: {note}" for note in notes)]

    def _compared(self, message: m.RedoneSteps) -> list[str]:
        before, self._redone = self._redone, message
        if message.first_difference is not None:
            told = before is not None and before.first_difference is not None
            return [] if told else [f"not exact: {message.first_difference.sentence()}"]
        if message.compared == 0 and message.reason is not None and message.rank == 0 and before is None:
            reason = "the resume is not exact" if message.reason.startswith(INEXACT) else message.reason
            return [f"{_redone(message)} of an earlier start will not be compared: {reason}"]
        if message.compared == message.steps and not self._proved:
            self._proved = True
            if self._all_ranks():
                return [f"proved: {message.compared} of {_redone(message)}"]
        return []


def say(text: str) -> None:
    """One line for the user, above the progress bars that tqdm draws."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with suppress(OSError, ValueError):  # the terminal may be gone
        if isinstance(tqdm, type) and hasattr(tqdm, "write"):  # a script may have put something else there
            tqdm.write(f"ratchet: {text}", file=sys.stderr)
            sys.stderr.flush()
        else:
            print(f"ratchet: {text}", file=sys.stderr, flush=True)


def shown(directory: Path) -> str:
    """A directory as a user writes it: ``./ratchet-checkpoints``."""
    return _relative(directory) if not directory.is_absolute() else str(directory)


def _relative(path: Path) -> str:
    return str(path) if path.is_absolute() or path.parts[:1] == ("..",) else f"./{path}"


def _redone(message: m.RedoneSteps) -> str:
    return counted(message.steps, "redone step")
