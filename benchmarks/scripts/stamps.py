"""When this process came where: one line per event in the file that ``BENCH_STAMPS`` names, with the rank's number behind it."""

from __future__ import annotations

import os
import time


def stamp(event: str) -> None:
    """Append event, monotonic and Unix time (ns), and pid. Monotonic time is one clock for all processes of a machine."""
    line = f"{event} {time.monotonic_ns()} {time.time_ns()} {os.getpid()}\n"
    fd = os.open(f"{os.environ['BENCH_STAMPS']}.{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, line.encode())
    os.close(fd)


stamp("script")
