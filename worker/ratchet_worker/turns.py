"""What a thread that saves leaves of the processors to those that train, as far as Linux can be told; elsewhere nothing happens.

Both functions are about the thread that calls, and what it starts, for good.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from contextlib import suppress
from typing import Final, NamedTuple

_NICE: Final = 5
"""Where both want a processor, such a thread has a quarter of it. Not less: it holds Python's lock now and then, and who trains
waits for that. Beside two other busy processes on two cores a loop of small steps did 84 of them in four seconds with a saving
thread of nice 0, 132 with 5 (130 without any), 93 with 10 and 47 with 19."""
_SLICE: Final = 20_000_000
"""Nanoseconds. A thread that awakes interrupts one whose slice is longer, unless it has had more than its share (PREEMPT_SHORT of
Linux's scheduler); else it waits until that one's slice ends, up to 2.8 ms by default. A step awakes many times: behind each of
gloo's threads, and for Python's lock. Of small steps 4 to 6 ms were lost in the 20 ms in which 401 MB are copied, 1 to 2 so."""


class _Calls(NamedTuple):
    """Numbers of system calls, for which the C library has no function."""

    get: int
    set: int


_CALLS: Final = {"x86_64": _Calls(315, 314), "aarch64": _Calls(275, 274)}  # the kernel's syscall tables
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""``struct sched_attr`` (sched_setattr(2)) as it was at first: size, policy, flags, nice, priority; runtime, deadline and period
in nanoseconds. The runtime of an ordinary thread is its slice."""
_ORDINARY: Final = (0, 3)  # SCHED_OTHER and SCHED_BATCH


def give_way() -> None:
    """Leave most of the processor to whoever else wants it. Only the privileged may take that back. Linux's setpriority(2) is
    about a thread (POSIX means a process)."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + _NICE, 19))


def take_turns_late() -> None:
    """Be interrupted by whoever awakes, and have no less of the processor for that. Linux knows it since 6.12; one that is older,
    or refuses, leaves the slice as it is, and so does a policy that has none."""
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 2**32 else None
    if calls is None:
        return
    with suppress(AttributeError, OSError, RuntimeError):  # a save must not fail for it: a hook may forbid the call
        system = ctypes.CDLL(None).syscall
        found = ctypes.create_string_buffer(_ATTRIBUTES.size)
        if system(calls.get, 0, found, _ATTRIBUTES.size, 0) != 0:
            return
        size, policy, flags, nice, priority, _, deadline, period = _ATTRIBUTES.unpack(found.raw)
        if policy in _ORDINARY:
            told = _ATTRIBUTES.pack(size, policy, flags, nice, priority, _SLICE, deadline, period)
            system(calls.set, 0, told, 0)
