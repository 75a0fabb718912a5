"""What is being done, on standard error: a line that goes away on a terminal, lines that stay (when asked for) elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from ratchet_client.cli import output


class Progress:
    """A context. ``lines``: where standard error is no terminal, every step is a line; otherwise nothing is said there."""

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
