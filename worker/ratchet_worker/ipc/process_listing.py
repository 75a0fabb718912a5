"""Changes what ``/proc`` shows of this process: its first environment and its command line, which others recognise it by."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_ARGUMENTS: Final = (
    45  # index behind the name in /proc/self/stat (proc(5)): address of the first argument; its end follows
)
_ENVIRONMENT: Final = 47


def start_environment() -> dict[str, str]:
    """Return the environment that this process was started with: start-up files of the interpreter may have changed it since."""
    entries = map(os.fsdecode, Path("/proc/self/environ").read_bytes().split(b"\0"))
    return {name: value for name, is_set, value in (entry.partition("=") for entry in entries) if is_set}


def show_variables(reserved: str, variables: Mapping[str, str]) -> bool:
    """Write ``variables`` over the variable ``reserved`` in ``/proc/self/environ``. Return False, and change nothing, if they are
    longer. The process must have been started with ``reserved``, and must have removed it from ``os.environ``."""
    text = "\0".join(f"{name}={value}" for name, value in variables.items())
    start, block = _block(_ENVIRONMENT)
    at = block.find(os.fsencode(f"\0{reserved}="))
    return at >= 0 and _overwrite(start + at, block.index(b"\0", at + 1) - at - 1, text)


def show_arguments(first: str, arguments: str) -> bool:
    """Write ``arguments``, separated by NUL, over the argument ``first`` and all that follow in ``/proc/self/cmdline``. Return
    False, and change nothing, if they are longer."""
    start, block = _block(_ARGUMENTS)
    at = block.find(os.fsencode(f"\0{first}\0"))
    return at >= 0 and _overwrite(start + at, len(block) - at - 2, arguments)


def _block(field: int) -> tuple[int, bytes]:
    """Return address and content of the memory that the stat field ``field`` names; the content has one more NUL in front."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[field]), int(fields[field + 1])
    return start, b"\0" + ctypes.string_at(start, end - start)


def _overwrite(address: int, room: int, text: str) -> bool:
    """Write ``text`` and NULs to the ``room`` bytes at ``address``; False if it is longer."""
    data = os.fsencode(text)
    if len(data) > room:
        return False
    ctypes.memmove(address, data.ljust(room, b"\0"), room)
    return True
