"""The modules that a Python file imports, and their files in a directory, by its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import in a file. ``name``: the dotted name. ``is_required``: False if the program may run without this import, or if
    ``name`` may not be a module. ``is_top_level``: True if the import is not within another statement."""

    name: str
    line: int
    is_required: bool
    is_top_level: bool

    @property
    def top_package(self) -> str:
        return self.name.partition(".")[0]


def find_imports(tree: ast.Module) -> Iterator[Import]:
    """Yield the imports in ``tree``, without relative ones. ``from a import b`` gives both ``a`` and ``a.b``."""
    spared = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try | ast.TryStar)
        or (isinstance(node, ast.With) and any("suppress" in ast.unparse(item) for item in node.items))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    always = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        needed = id(node) not in spared
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, needed, id(node) in always) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield Import(node.module, node.lineno, needed, id(node) in always)
            yield from (Import(f"{node.module}.{a.name}", node.lineno, False, id(node) in always) for a in node.names)


def relative_import_files(tree: ast.Module, file: Path) -> list[Path]:
    """Return the existing files that run for the relative imports in ``tree``, the syntax tree of ``file``."""
    found: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(file.parents):
            module = f"{node.module}." if node.module else ""
            found += [f for a in node.names for f in module_files(module + a.name, file.parents[node.level - 1])]
    return found


def module_files(module: str, root: Path) -> list[Path]:
    """Return the existing files that run when ``module`` is imported from ``root``, its packages' ``__init__.py`` included."""
    found: list[Path] = []
    folder = root
    for part in module.split("."):
        file, folder = folder / f"{part}.py", folder / part
        if (folder / "__init__.py").is_file():
            found.append(folder / "__init__.py")
        elif file.is_file():
            return [*found, file]
        elif not folder.is_dir():
            return found
    return found
