"""Undoes what packages such as ``rich`` draw from ``random`` during their import, which attempts may do at different moments."""

from __future__ import annotations

import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

_LOADERS: Final = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
_MAX_DRAWS: Final = 100
"""Words of 32 bits: a package that has moved ``random`` further counts as having seeded it, which is not undone."""


@cache
def installed_folders() -> tuple[Path, ...]:
    """Return the directories of Python's own modules and of installed packages."""
    return tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Record(Protocol):
    """A record of the installed modules that are imported."""

    def is_open(self) -> bool:
        """True if the next import is to be added."""

    def add(self, name: str, new: Iterable[str]) -> None:
        """Add the module ``name``, whose import has brought the modules ``new``."""


def undo_import_draws() -> None:
    """From now on, undo what installed packages draw from ``random`` while the main thread imports them. Nothing is undone for a
    package that seeds ``random`` or draws more than ``_MAX_DRAWS`` words."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def record_imports(record: Record) -> None:
    """After ``undo_import_draws``: add to ``record`` what the main thread imports from installed packages from now on."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.record = record


class _Finder(MetaPathFinder):
    """Finds modules by the finders after it, and makes imports of installed packages undo their draws."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._importing = False  # an installed package is being imported, with the modules that it imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders after this one find; None to leave the import to them."""
        if self._importing or threading.current_thread() is not threading.main_thread():
            return None  # draws of training while another thread imports must not be undone
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec and spec.loader
        if spec is not None and type(loader) in _LOADERS and _is_installed(spec):
            loader.exec_module = partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Run the module's code by ``run``, and undo its draws from ``random``, unless the code has seeded it or has
        drawn more than ``_MAX_DRAWS`` words."""
        record = self.record if self.record is not None and self.record.is_open() else None
        known = {*sys.modules} if record is not None else set()
        self._importing, before = True, random.getstate()
        try:
            run(module)
            if record is not None:
                record.add(module.__name__, sys.modules.keys() - known)
        finally:
            self._importing = False
            if is_only_drawn(before, random.getstate()):
                random.setstate(before)


def _is_installed(spec: ModuleSpec) -> bool:
    """True if the module of ``spec`` is Python's own or belongs to an installed package."""
    return spec.origin is not None and any(Path(spec.origin).is_relative_to(folder) for folder in installed_folders())


def is_only_drawn(before: Any, after: Any) -> bool:
    """True if at most ``_MAX_DRAWS`` draws of 32 bits, perhaps none, lead from the state ``before`` of ``random`` to
    ``after``."""
    if before == after:
        return True
    probe = random.Random()
    probe.setstate(before)
    for _ in range(_MAX_DRAWS):
        probe.getrandbits(32)
        if probe.getstate()[1] == after[1]:
            return True
    return False
