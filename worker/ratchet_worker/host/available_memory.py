"""The memory that this process can still use."""

from __future__ import annotations

from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the machine, and this process's control group (version 2) with its parents, have available without
    swapping; the page cache counts as available. Raises ``OSError``."""
    fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    found = [int(fields["MemAvailable"].split()[0]) * 1024]
    lines = (proc / "self/cgroup").read_text().splitlines()
    own = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    for folder in (groups / own, *(groups / own).parents):
        limit = folder / "memory.max"
        if not folder.is_relative_to(groups) or not limit.exists() or (text := limit.read_text().strip()) == "max":
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = int(stat["active_file"]) + int(stat["inactive_file"])
        found.append(int(text) - int((folder / "memory.current").read_text()) + cache)
    return max(0, min(found))
