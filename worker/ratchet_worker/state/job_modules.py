"""The modules of a job's own code, and facts about their variables that follow from the source."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from ratchet_worker.state.object_walk import is_user_module

_WRITES: Final = frozenset({"append", "appendleft", "extend", "add", "update", "insert", "setdefault", "clear"})
_INNER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.For, ast.AsyncFor, ast.While, ast.ClassDef)


def modules_below(code: Path | None) -> dict[str, ModuleType]:
    """Return, by name, the user's imported modules whose files are below ``code``, without installed packages. Empty if ``code``
    is None."""
    if code is None:
        return {}
    starts = f"{code}/", f"{code.resolve()}/"
    files = ((name, module, getattr(module, "__file__", None)) for name, module in [*sys.modules.items()])
    mine = ((name, module) for name, module, file in files if isinstance(file, str) and file.startswith(starts))
    return {
        name: module for name, module in mine if is_user_module(name) and "site-packages" not in str(module.__file__)
    }


def assigns(code: CodeType, name: str) -> bool:
    """True if this function's code, or a function inside it, assigns or deletes the closure variable ``name``."""
    return name in _assigned(code)


@lru_cache(maxsize=4096)
def _assigned(code: CodeType) -> frozenset[str]:
    """Return the closure variables that this function's code, or a function inside it, assigns or deletes."""
    free = {*code.co_freevars}
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = (_assigned(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(free & own.union(*inner))


def is_set_by_functions(module: ModuleType, name: str) -> bool:
    """True if a change of the module's variable counts. In the main script, a change counts only if a ``global`` statement names
    the variable; in other modules, every change counts."""
    # Other names of the main script are like a loop's local variables. Top-level code of other modules has ended before training.
    if module.__name__ != "__main__":
        return True
    return any(isinstance(node, ast.Global) and name in node.names for node, _ in _nodes(module))


def is_log(path: str) -> bool:
    """True if, as far as the source shows, training only writes into the container at ``path`` (``train:LOSSES``), without
    reading it."""
    name, _, variable = path.partition(":")
    variable = variable.replace("[", ".").partition(".")[0]
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or file is None or not variable:
        return False
    written = 0
    later: list[int] = []
    for node, above in _nodes(module):
        if isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Load):
            if _is_written(node, above):
                written = max(written, node.lineno)
            elif any(isinstance(one, _INNER) for one in above):
                return False
            else:
                later.append(node.lineno)
    return written > 0 and all(line > written for line in later) and not _is_used_elsewhere(module, variable)


def _is_written(node: ast.AST, above: tuple[ast.AST, ...]) -> bool:
    """True if the code around the expression ``node`` only writes into it. ``above``: the nodes around it, the nearest first."""
    for number, one in enumerate(above):
        if isinstance(one, ast.Subscript) and one.value is node:
            if not isinstance(one.ctx, ast.Load):
                return True
            node = one
            continue
        call, statement = (*above[number + 1 : number + 3], None, None)[:2]
        is_call = isinstance(one, ast.Attribute) and one.attr in _WRITES and isinstance(call, ast.Call)
        return is_call and isinstance(statement, ast.Expr)
    return False


def _is_used_elsewhere(module: ModuleType, name: str) -> bool:
    """True if another of the user's imported modules, in the directory of ``module`` or below, uses an attribute ``name``, or
    imports that name or ``*``."""
    code = Path(str(module.__file__)).resolve().parent
    others = (other for other in modules_below(code).values() if other is not module)
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in (name, "*") for alias in node.names))
        for other in others
        for node, _ in _nodes(other)
    )


def _nodes(module: ModuleType) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Return the syntax nodes of the module's file (see ``parsed``)."""
    return parsed(str(module.__file__))


@lru_cache(maxsize=256)
def parsed(file: str) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Return a source file's syntax nodes, each with the nodes around it, the nearest first; empty if it cannot be parsed."""
    try:
        tree: Any = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [*_descend(tree, ())]


def _descend(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield ``node`` and all nodes inside it, each with the nodes around it, the nearest first. ``above``: those around
    ``node``."""
    yield node, above
    for child in ast.iter_child_nodes(node):
        yield from _descend(child, (node, *above))
