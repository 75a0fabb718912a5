"""What the kernel's files say about processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet_worker.ipc import child_processes


def test_oom_kill_before_the_first_successful_read_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mocked: a test cannot let the kernel's out-of-memory killer loose, nor make a file of /proc unreadable."""
    events = tmp_path / "memory.events"
    monkeypatch.setattr(child_processes, "_oom_source", lambda: events)
    watch = child_processes.OomWatch()
    events.write_text("low 0\noom_kill 3\n")
    assert not watch.killed_recently()
    events.unlink()
    assert not watch.killed_recently()
    events.write_text("low 0\noom_kill 3\n")
    assert not watch.killed_recently()
    events.write_text("low 0\noom_kill 4\n")
    assert watch.killed_recently()
