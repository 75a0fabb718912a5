"""What a row is given: its device, directory and time; and where it says what it sees. Standard library only."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["green", "red", "not applicable"]
Size = Literal["full", "small", "cheap"]


@dataclass(frozen=True)
class Part:
    """One result within a row. ``seen``: numbers, or the reason of a verdict other than green."""

    name: str
    verdict: Verdict
    seen: str


class Work:
    """``folder``: the row's own directory, which is removed at its end. ``end``: ``time.monotonic()`` at which the row is killed.

    ``size``: of models and numbers of steps: ``full`` on a GPU, ``small`` on the CPU, ``cheap`` in the tests.
    """

    def __init__(self, device: str, size: Size, folder: Path, seconds: float) -> None:
        self.device, self.size, self.folder = device, size, folder
        self.end = time.monotonic() + seconds
        self._parts = folder / "parts.jsonl"

    @property
    def left(self) -> float:
        """Seconds until the row is killed."""
        return self.end - time.monotonic()

    def sized(self, full: int, small: int, cheap: int) -> int:
        return {"full": full, "small": small, "cheap": cheap}[self.size]

    def green(self, name: str, seen: str) -> None:
        self._add(Part(name, "green", seen))

    def red(self, name: str, why: str) -> None:
        self._add(Part(name, "red", why))

    def judge(self, name: str, problems: list[str], seen: str) -> None:
        """Green without ``problems``, else red with them."""
        if problems:
            self.red(name, "; ".join(problems))
        else:
            self.green(name, seen)

    def exclude(self, name: str, why: str) -> None:
        """Not applicable: the device itself cannot do it."""
        self._add(Part(name, "not applicable", why))

    def _add(self, part: Part) -> None:
        """On the disk at once: the row may be killed at any time. Threads may call it: one write appends one line."""
        with self._parts.open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(part)).encode() + b"\n")


def read_parts(folder: Path) -> list[Part]:
    """What the row of ``folder`` has said so far."""
    try:
        lines = (folder / "parts.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Part(**json.loads(line)) for line in lines]
