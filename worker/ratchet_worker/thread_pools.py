"""Threads of a script that will do nothing more: a pool's wait for work until Python ends."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import thread as executor_threads
from multiprocessing import pool as thread_pool
from typing import Final

_POOLS: Final = {executor_threads.__file__, thread_pool.__file__}
_BETWEEN: Final = 0.05


def at_work(thread: threading.Thread) -> bool:
    """Is it alive, and no pool's that waits for work?"""
    if not _waits_for_work(thread):
        return thread.is_alive()
    time.sleep(_BETWEEN)  # one that has just taken work is there, too, but not for long
    return thread.is_alive() and not _waits_for_work(thread)


def _waits_for_work(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename in _POOLS
