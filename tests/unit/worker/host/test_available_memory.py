"""The memory that this process can still use."""

from __future__ import annotations

from pathlib import Path

from ratchet_worker.host.available_memory import available_bytes


def test_available_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / "jobs/one").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("1:cpu:/x\n0::/jobs/one\n")
    (groups / "jobs/one/memory.max").write_text("max\n")
    assert available_bytes(proc, groups) == 8000 * 1024
    (groups / "jobs/memory.max").write_text("5000000\n")
    (groups / "jobs/memory.current").write_text("4000000\n")
    (groups / "jobs/memory.stat").write_text("anon 100\nactive_file 20000\ninactive_file 30000\n")
    assert available_bytes(proc, groups) == 1_050_000
    (groups / "jobs/memory.current").write_text("6000000\n")
    assert available_bytes(proc, groups) == 0
    assert available_bytes() > 0
