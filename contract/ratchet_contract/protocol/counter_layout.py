"""Layout of the step counters: a 64-byte file for each rank. The rank maps the file into memory; it can still be read after the
rank's death.

Native 64-bit words: magic, ticks, steps started, steps finished, stage, saved within, two unused. "Saved within" is the step that
a ``checkpoint()`` call saves in the loop body that is running; 0 if there is none.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Final

COUNTER_MAGIC: Final = int.from_bytes(b"RATCHET1", sys.byteorder)
COUNTER_WORDS: Final = struct.Struct("=8Q")
COUNTER_SIZE: Final = COUNTER_WORDS.size
TICKS, STARTED, FINISHED, STAGE, SAVED_WITHIN = 1, 2, 3, 4, 5


def finished_step(path: Path) -> int:
    """Return the last step that the rank finished in its attempt; 0 if none is known."""
    return _read_word(path, FINISHED)


def mid_step_save(path: Path) -> int:
    """Return the step that ``checkpoint()`` saves within a loop body that has not ended; 0 if there is none."""
    return _read_word(path, SAVED_WITHIN)


def _read_word(path: Path, index: int) -> int:
    """Return one word of a counter file; 0 if the file cannot be read or is not a counter."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # user code may have put anything there
        with os.fdopen(fd, "rb") as file:
            data = file.read(COUNTER_SIZE + 1) or b""
    except OSError:
        return 0
    if len(data) != COUNTER_SIZE:
        return 0
    words = COUNTER_WORDS.unpack(data)
    return int(words[index]) if words[0] == COUNTER_MAGIC else 0
