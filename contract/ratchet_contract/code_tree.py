"""What a snapshot of a user's directory leaves out, besides virtual environments (directories with a ``pyvenv.cfg``)."""

from __future__ import annotations

from typing import Final

IGNORED_NAMES: Final = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", ".ratchet", ".mypy_cache", ".pytest_cache"}
)
IGNORED_SUFFIXES: Final = (".pyc", ".pyo")
