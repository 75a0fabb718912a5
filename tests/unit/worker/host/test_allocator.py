"""What a step frees is there for the next one: no page of it is faulted in again."""

from __future__ import annotations

import os
import subprocess
import sys

STEPS = """
import resource
from ratchet_worker.host.cpu import keep_freed_memory

def step():
    held = [b"x" * (4 << 20) for _ in range(8)]

print(keep_freed_memory())
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> tuple[str, int]:
    """Whether it took effect, and how often a page was faulted in during steps that take and free 8192 of them."""
    run = subprocess.run(
        [sys.executable, "-c", STEPS], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    effect, count = run.stdout.split()
    return effect, int(count)


def test_allocator_reuses_freed_step_memory_without_page_faults() -> None:
    effect, count = faults()
    assert effect == "True" and count < 100


def test_allocator_keeps_user_malloc_settings() -> None:
    effect, count = faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert effect == "False" and count > 5 * 8000
    assert faults(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072")[0] == "False"
