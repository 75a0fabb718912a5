"""Packages that draw from ``random`` while they are imported.

``rich`` does: it numbers its styles from a random beginning. A resumed attempt imports such a package again. Where the script
imports it in the middle of training, ``random`` would be ahead of where it was in the undisturbed job, and so would it be where
only one of two attempts has the package imported already. The import of an installed package therefore takes its draws back.
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
_MOST: Final = 100
"""Words of 32 bits: who has moved ``random`` further has seeded it, which stays."""


@cache
def installed_folders() -> tuple[Path, ...]:
    """Where Python's own modules and installed packages lie."""
    return tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def take_back_draws() -> None:
    """From now on, for imports by the main thread."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds what the finders behind it find."""

    def __init__(self) -> None:
        self._importing = False  # an installed package, and what it imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._importing or threading.current_thread() is not threading.main_thread():
            return None  # what training draws while another thread imports must not be taken back
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec and spec.loader
        if spec is not None and type(loader) in _LOADERS and _is_installed(spec):
            loader.exec_module = partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        self._importing, before = True, random.getstate()
        try:
            run(module)
        finally:
            self._importing = False
            if only_drawn(before, random.getstate()):
                random.setstate(before)


def _is_installed(spec: ModuleSpec) -> bool:
    return spec.origin is not None and any(Path(spec.origin).is_relative_to(folder) for folder in installed_folders())


def only_drawn(before: Any, after: Any) -> bool:
    """Does ``random`` come from one state to the other by a few draws, or none?"""
    if before == after:
        return True
    probe = random.Random()
    probe.setstate(before)
    for _ in range(_MOST):
        probe.getrandbits(32)
        if probe.getstate()[1] == after[1]:
            return True
    return False
