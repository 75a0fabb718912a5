"""What happens, drawn from a seed: which fault or action, after how long, whom it meets, for how long.

A draw names its victim as a place among those that are there when its time has come ("the third of the jobs alive, by order of
submission"), never by a pid. So the sequence is a function of the seed alone; how far the jobs have come by then is not:
wall-clock time cannot be replayed exactly. The log has the instant and the victim of each, and a replay keeps to those.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

ACTIONS: Final = {"preempt": 3, "suspend": 3, "checkpoint": 3, "cancel": 1}
"""Calls of the API, by how often."""
ACTION_SHARE: Final = 0.35


@dataclass(frozen=True)
class Draw:
    """``after``: seconds since the last; ``pick``: a place among the victims, and ``pick_part`` among the processes of one, both
    of [0, 1); ``size``: how strong or long, of [0, 1): what that means is the fault's."""

    number: int
    kind: str
    after: float
    pick: float
    pick_part: float
    size: float
    action: str | None


def draw_faults(seed: int, weights: Mapping[str, int], pace: float) -> Iterator[Draw]:
    """Without end. ``weights``: kinds of faults by how often; ``pace``: seconds from one to the next, on the average."""
    source = random.Random(seed)
    kinds, shares = list(weights), list(weights.values())
    number = 0
    while True:
        number += 1
        yield Draw(
            number=number,
            kind=source.choices(kinds, shares)[0],
            after=source.uniform(0, 2 * pace),
            pick=source.random(),
            pick_part=source.random(),
            size=source.random(),
            action=source.choices(list(ACTIONS), list(ACTIONS.values()))[0] if source.random() < ACTION_SHARE else None,
        )


@dataclass(frozen=True)
class Struck:
    """One line of the log. ``at``: seconds since the run began; ``number``: the draw's, 0 of what was no fault."""

    at: float
    number: int
    kind: str
    victim: str
    detail: str = ""


class Log:
    """Every fault and action as it happens: kept, and written as JSON lines where a file is given."""

    def __init__(self, header: Mapping[str, Any], file: Path | None) -> None:
        self.struck: list[Struck] = []
        self._file: TextIO | None = None if file is None else file.open("w", buffering=1)
        if self._file is not None:
            self._file.write(json.dumps({"run": dict(header)}) + "\n")

    def add(self, struck: Struck) -> None:
        self.struck.append(struck)
        if self._file is not None:
            self._file.write(json.dumps(asdict(struck)) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_log(file: Path) -> tuple[dict[str, Any], dict[int, Struck]]:
    """Its header, and what was struck by the number of the draw. Raises ``OSError``, ``ValueError``."""
    first, *rest = [json.loads(line) for line in file.read_text().splitlines()]
    found = [Struck(**line) for line in rest]
    return first["run"], {struck.number: struck for struck in found if struck.number}


def stop_seconds(size: float, longest: float) -> float:
    """How long a process stands still: of stops up to 20 s, three of ten are longer than a lease and a step's deadline."""
    return 0.2 + (longest - 0.2) * size**4


def short_seconds(size: float, most: float) -> float:
    return 0.3 + (most - 0.3) * size**2
