"""A process's memory in huge pages has the same content, and the kernel lists it as such."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from pathlib import Path
from ratchet_worker.host import huge_pages

data = bytearray(os.urandom(1 << 10) * (1 << 14))  # 16 MiB
before = hash(bytes(data))
count = huge_pages.collapse()
rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
assert hash(bytes(data)) == before
print(count, int(rollup["AnonHugePages"].split()[0]) // 2048)
"""


def test_memory_is_moved_into_huge_pages_with_its_content() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    count, listed = map(int, done.stdout.split())
    assert count >= 6 and listed >= 6
