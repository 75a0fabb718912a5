"""Source of a module, ``sitecustomize`` or one that a .pth file names, that changes another module as it is imported."""

from __future__ import annotations

from textwrap import indent

_SOURCE = """
import importlib.util, os, sys, time

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "{module}":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
{change}
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def after_import(module: str, change: str) -> str:
    """``change`` is run after the import of ``module``, and has it under that name; it also has ``os``, ``sys`` and ``time``."""
    return _SOURCE.format(module=module, change=indent(change.strip("\n"), " " * 12))
