"""The modules of installed packages that a job's code imports, which a parked agent imports in advance for the next attempt."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from ratchet_contract.script.public_names import PACKAGE
from ratchet_worker.state.import_draws import installed_folders

_MAX_NAMES: Final = 200


class Record:
    """Appends to ``file`` the name of each module that code imports from an installed package, one a line. It ends once the code
    has changed what an import may depend on, such as an environment variable: a later import might then find something else."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._surroundings = _surroundings()
        self._names: set[str] = set()

    def is_open(self) -> bool:
        """True if the surroundings are those after the previous import; else end the record, and return False."""
        if self._fd >= 0 and _surroundings() != self._surroundings:
            self.close()
        return self._fd >= 0

    def add(self, name: str, new: Iterable[str]) -> None:
        """Add the module ``name``, whose import has brought the modules ``new``. If these are not all installed, end the
        record."""
        if any(map(_is_jobs, new)):
            self.close()  # a package has imported a module of the job, which a parked agent must not do
            return
        # Filters and the like that the package has added are part of its import. Variables and paths are not undone: a package
        # that changes them is left out by the parked agent, and what follows would find them changed.
        if _surroundings()[:3] != self._surroundings[:3]:
            self.close()
            return
        self._surroundings = _surroundings()
        self._names.add(name)
        with suppress(OSError):  # a full disk: the next attempt imports it for itself
            os.write(self._fd, f"{name}\n".encode())
        if len(self._names) >= _MAX_NAMES:
            self.close()

    def close(self) -> None:
        """End the record."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _surroundings() -> tuple[Any, ...]:
    """Return what an import may read of this process."""
    return (
        dict(os.environ),
        os.getcwd(),  # noqa: PTH109 - much faster than Path.cwd, for each import
        [*sys.path],
        [*warnings.filters],
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def _is_jobs(name: str) -> bool:
    """True if the imported module ``name`` has a file outside Python's directories that is not Ratchet's."""
    origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
    if origin in (None, "built-in", "frozen") or name.partition(".")[0].partition("_")[0] == PACKAGE:
        return False
    return not origin.startswith(_folders())


@cache
def _folders() -> tuple[str, ...]:
    """Return the directories of Python's modules and of installed packages, each with a slash behind it."""
    return tuple(f"{folder}/" for folder in installed_folders())
