"""When this process came where: one line per event in the file that ``BENCH_STAMPS`` or the first argument names, with the rank's
number behind it."""

from __future__ import annotations

import os
import sys
import time


def stamp(event: str) -> None:
    """Append event, monotonic and Unix time (ns), and pid. Monotonic time is one clock for all processes of a machine."""
    place = os.environ.get("BENCH_STAMPS") or sys.argv[1]
    line = f"{event} {time.monotonic_ns()} {time.time_ns()} {os.getpid()}\n"
    fd = os.open(f"{place}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, line.encode())
    os.close(fd)


if "BENCH_STAMPS" in os.environ or len(sys.argv) > 1:  # a task gets the file's name later
    stamp("script")
