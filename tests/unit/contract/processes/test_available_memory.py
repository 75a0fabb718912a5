"""Available memory: of the machine, or less if a control group allows less."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet_contract.processes.available_memory import available


@pytest.mark.parametrize(("limit", "expected"), [("max", 2048000), ("1000000", 700000), ("9000000", 2048000)])
def test_smallest_limit_counts_without_files_that_can_be_dropped(tmp_path: Path, limit: str, expected: int) -> None:
    meminfo, cgroup, group = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups" / "outer" / "inner"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 2000 kB\n")
    cgroup.write_text("0::/outer/inner\n")
    group.mkdir(parents=True)
    (group.parent / "memory.max").write_text(limit)
    (group.parent / "memory.current").write_text("500000")
    (group.parent / "memory.stat").write_text("anon 300000\ninactive_file 200000\n")
    assert available(meminfo, cgroup, tmp_path / "groups") == expected


def test_unknown_memory_is_none(tmp_path: Path) -> None:
    assert available(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None
