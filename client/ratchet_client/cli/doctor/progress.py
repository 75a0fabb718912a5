"""Shows the current step on standard error: as a transient line on a terminal, as permanent lines (if requested) elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from ratchet_client.cli.shared import output


class Progress:
    """A context manager that shows the current step on standard error. Call the object with the text of each step. If standard
    error is not a terminal, each step is printed as one line if ``lines`` is set, and otherwise not shown."""

    def __init__(self, *, lines: bool = False) -> None:
        self._lines = lines
        self._status = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("")

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text.replace("[", "\\["))
        elif self._lines:
            output.note(text)
