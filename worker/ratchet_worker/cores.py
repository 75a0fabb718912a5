"""How many threads of a rank have a core to themselves."""

from __future__ import annotations

import os
from typing import Final

from ratchet_contract import environment

_MOST: Final = 4  # more do not make a disk or a memory faster


def own_cores() -> int:
    """A rank's share of the cores that it may run on, from 1 to 4; 1 where this is no rank (an export, beside others' jobs)."""
    ranks = os.environ.get(environment.LOCAL_WORLD_SIZE)
    if ranks is None:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)) // int(ranks), _MOST))
