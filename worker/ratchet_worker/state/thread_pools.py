"""Recognises idle pool threads of a script, which may wait for work until Python ends."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import thread as executor_threads
from multiprocessing import pool as thread_pool
from typing import Final

_POOLS: Final = {executor_threads.__file__, thread_pool.__file__}
_RECHECK_SECONDS: Final = 0.05


def is_working(thread: threading.Thread) -> bool:
    """True if ``thread`` is alive and is not, as far as its frame shows, idle in one of Python's thread pools. May block for
    50 ms."""
    if not _waits_for_work(thread):
        return thread.is_alive()
    time.sleep(_RECHECK_SECONDS)  # a thread that has just taken work is at the same place, but not for long
    return thread.is_alive() and not _waits_for_work(thread)


def _waits_for_work(thread: threading.Thread) -> bool:
    """True if the innermost Python code of ``thread`` is a thread pool's: it waits for work, or runs a built-in function."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename in _POOLS
