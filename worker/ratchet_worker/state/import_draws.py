"""Undoes draws from ``random`` that packages make while they are imported.

``rich`` does so: it numbers its styles from a random start. A resumed attempt imports such a package again. If the script imports
it in the middle of training, ``random`` would be ahead of its state in the undisturbed job. The two states would also differ if
only one of two attempts has imported the package already. So after ``undo_import_draws``, the import of an installed package in
the main thread takes its draws back, if they are few and it does not seed ``random``.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_LOADERS: Final = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
_MAX_DRAWS: Final = 100
"""Words of 32 bits: a package that has moved ``random`` further has seeded it, which is not undone."""


@cache
def installed_folders() -> tuple[Path, ...]:
    """Return the directories of Python's own modules and of installed packages."""
    return tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def undo_import_draws() -> None:
    """From now on, undo what imports of installed packages and of Python's own modules in the main thread draw from ``random``.
    If an import seeds ``random`` or makes more than ``_MAX_DRAWS`` draws, nothing is undone. Further calls have no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds what the finders after it find. If that is an installed package, its import sets ``random`` back after drawing from
    it."""

    def __init__(self) -> None:
        self._importing = False  # an installed package is being imported, with the modules that it imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders after this one find, or None. In another thread than the main one, or while an
        installed package is being imported, return None at once, so that the other finders continue and nothing is undone."""
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
        """Run the module's code by ``run``, and then set ``random`` back if the code has made at most ``_MAX_DRAWS`` draws. If
        the code has seeded ``random``, the new state stays."""
        self._importing, before = True, random.getstate()
        try:
            run(module)
        finally:
            self._importing = False
            if is_only_drawn(before, random.getstate()):
                random.setstate(before)


def _is_installed(spec: ModuleSpec) -> bool:
    """True if the module of ``spec`` is Python's own or belongs to an installed package."""
    return spec.origin is not None and any(Path(spec.origin).is_relative_to(folder) for folder in installed_folders())


def is_only_drawn(before: Any, after: Any) -> bool:
    """True if at most ``_MAX_DRAWS`` draws lead from the state ``before`` to the state ``after`` of ``random``; also if both are
    equal."""
    if before == after:
        return True
    probe = random.Random()
    probe.setstate(before)
    for _ in range(_MAX_DRAWS):
        probe.getrandbits(32)
        if probe.getstate()[1] == after[1]:
            return True
    return False
