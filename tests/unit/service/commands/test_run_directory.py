"""A run directory in a project is no part of the project."""

from __future__ import annotations

from pathlib import Path

from ratchet_service.commands.serve import make_home


def test_run_directory_has_gitignore_and_keeps_existing_one(tmp_path: Path) -> None:
    home = tmp_path / "project" / ".ratchet"
    make_home(home)
    assert (home / ".gitignore").read_text() == "*\n" and home.stat().st_mode & 0o777 == 0o700
    (home / ".gitignore").write_text("jobs/\n")
    make_home(home)
    assert (home / ".gitignore").read_text() == "jobs/\n", "somebody's own"
