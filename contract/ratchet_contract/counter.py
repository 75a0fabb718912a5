"""Layout of the step counters: a 64-byte file per rank, mapped by the rank, readable by anyone, also after its death.

Native 64-bit words: magic, ticks, steps started, steps finished, stage, three unused. Steps are numbers of global steps,
0 until the first one of the attempt is started or finished.
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
TICKS, STARTED, FINISHED, STAGE = 1, 2, 3, 4


def finished_step(path: Path) -> int:
    """The last step that the rank finished in its attempt; 0 if it finished none, or there is no counter."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # whatever user code has put there
        with os.fdopen(fd, "rb") as file:
            data = file.read(COUNTER_SIZE + 1) or b""
    except OSError:
        return 0
    if len(data) != COUNTER_SIZE:
        return 0
    words = COUNTER_WORDS.unpack(data)
    return int(words[FINISHED]) if words[0] == COUNTER_MAGIC else 0
