"""The step counter: a 64-byte file per rank, which the rank maps and the agent reads. The values survive the rank's process."""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ratchet_contract.protocol.counter_layout import (
    COUNTER_MAGIC,
    COUNTER_SIZE,
    COUNTER_WORDS,
    FINISHED,
    SAVED_WITHIN,
    STAGE,
    STARTED,
    TICKS,
)


class Stage(IntEnum):
    """What a rank is doing; the agent's deadline depends on it."""

    STARTUP = 0
    TRAINING = 1
    EVALUATING = 2
    CHECKPOINTING = 3
    STOPPING = 4
    UNMANAGED = 5  # a script without a Session: its progress is unknown, and no deadline applies


class Reading(NamedTuple):
    """One reading of a rank's counter. ``ticks``: grows with any progress. ``started``, ``finished``: number of the step that was
    started or finished last; 0: none in this attempt."""

    ticks: int
    started: int
    finished: int
    stage: Stage


class StepCounter:
    """The rank's side, which writes the counter. Only one thread may use it, except that other threads may call ``tick``."""

    def __init__(self, path: Path) -> None:
        """Create the file ``path``, or overwrite it, with its space allocated. Raises ``OSError``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, bytes(COUNTER_SIZE))
            # A full disk must fail here, not as a SIGBUS in the middle of a step.
            os.posix_fallocate(fd, 0, COUNTER_SIZE)
            self._map = mmap.mmap(fd, COUNTER_SIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        self._words[0] = COUNTER_MAGIC

    @classmethod
    def create(cls, path: Path) -> StepCounter:
        """Return a counter in the file ``path``, which is created or overwritten. Raises ``OSError``."""
        return cls(path)

    def tick(self) -> None:
        """Record progress other than a step, such as an evaluation batch or a part of a checkpoint."""
        self._words[TICKS] += 1

    def start_step(self, step: int) -> None:
        """Record the start of the global step ``step`` (the job's first is 1). Counts as progress."""
        self._words[STARTED] = step
        self._words[TICKS] += 1

    def finish_step(self, step: int) -> None:
        """Record the end of the global step ``step``. Counts as progress."""
        self._words[FINISHED] = step
        self._words[TICKS] += 1

    def set_saved_within(self, step: int) -> None:
        """Record that ``checkpoint()``, called within the body of the training loop, saves ``step``; 0: the body has ended since.
        Call it before the save."""
        # Before the save: a kill from then on loses the rest of the body.
        self._words[SAVED_WITHIN] = step

    def enter_stage(self, stage: Stage) -> None:
        """Record that the rank is in ``stage`` from now on. Counts as progress."""
        self._words[STAGE] = stage
        self._words[TICKS] += 1

    def close(self) -> None:
        """Release the mapped memory; the file stays. The counter cannot be used afterwards."""
        self._words.release()
        self._map.close()


class CounterReader:
    """Reads a rank's counter (agent, tests, tools). Keeps no file open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Reading | None:
        """Return the current values; None if there are none that can be read."""
        try:
            # To the agent, None means no news: one read error on a shared file system does not end a healthy attempt.
            data = self.path.read_bytes()
        except OSError:
            return None
        if len(data) != COUNTER_SIZE:
            return None
        words = COUNTER_WORDS.unpack(data)
        if words[0] != COUNTER_MAGIC or words[STAGE] not in {*Stage}:
            return None
        return Reading(words[TICKS], words[STARTED], words[FINISHED], Stage(words[STAGE]))
