"""What the source of a task's module proves about its entrypoint, read with ``ast``: nothing of the user's is imported.

Only what is certain is a fault: a name that nothing in the module binds, a plain class without the methods of a task,
arguments that its constructor does not take. Where a star import, a decorator, a base class or ``__getattr__`` may make the
difference, the first attempt finds out, and ends the job at once if it is wrong.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec import TaskSpec
from ratchet_contract.spec_parse import nearest
from ratchet_service import syntax

_OPENING: Final = frozenset(
    {"exec", "eval", "globals", "f_globals", "vars", "locals", "setattr", "modules", "__dict__", "__builtins__"}
)
"""Names and attributes by which a module may bind what its source does not show."""
_SEE: Final = "see `python -m pydoc ratchet_worker.task` for what a task needs"


def check(source: bytes, task: TaskSpec, *, package: bool = False) -> FieldProblem | None:
    """The first certain fault of ``task`` in its module's ``source``. ``package``: it is an ``__init__.py``, whose submodules
    may be attributes too."""
    try:
        return _check(syntax.parse(source), task, package)
    except (SyntaxError, ValueError):  # perhaps of a newer Python than this one; the interpreter itself has looked
        return None
    except (RecursionError, MemoryError):  # nested too deeply to be looked into: long chains of elif or of operators
        return None


def _check(tree: ast.Module, task: TaskSpec, package: bool) -> FieldProblem | None:
    module, _, attribute = task.entrypoint.partition(":")
    first, _, rest = attribute.partition(".")
    bound = _bindings(tree.body)
    if _is_open(tree, bound):
        return None
    if first not in bound:
        return None if package else _missing(module, first, bound)
    found = bound[first]
    if rest or len(found) != 1:
        return None
    if isinstance(found[0], ast.ClassDef):
        return _check_class(found[0], task, _stored(tree))
    if isinstance(found[0], ast.FunctionDef) and not found[0].decorator_list:
        return _check_arguments(found[0].args, 0, task)
    return None


def _bindings(body: Sequence[ast.stmt]) -> dict[str, list[ast.AST]]:
    """Every name that the statements bind, with the statements that do; function and class bodies are left alone."""
    out: dict[str, list[ast.AST]] = {}
    for node in _statements(body):
        for name in _names(node):
            out.setdefault(name, []).append(node)
    return out


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(list(ast.iter_child_nodes(node)))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def _stored(tree: ast.AST) -> set[str]:
    """Every attribute that is assigned anywhere, of ``self``, of a class after its definition, or of anything else."""
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def _is_open(tree: ast.AST, bound: Mapping[str, object]) -> bool:
    """May there be names that the source does not show?"""
    if "*" in bound or "__getattr__" in bound:
        return True
    return any(
        isinstance(node, ast.Global)
        or (isinstance(node, ast.Name) and node.id in _OPENING)
        or (isinstance(node, ast.Attribute) and node.attr in _OPENING)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in _OPENING for alias in node.names))
        for node in ast.walk(tree)
    )


def _missing(module: str, name: str, bound: Mapping[str, list[ast.AST]]) -> FieldProblem:
    classes = [n for n, nodes in bound.items() if any(isinstance(node, ast.ClassDef) for node in nodes)]
    held = f"its classes are {', '.join(classes[:20])}" if classes else "it defines no class"
    text = f"module {module!r} has no {name!r}{nearest(name, classes)}; {held}"
    return FieldProblem(pointer="/task/entrypoint", code="entrypoint-missing", detail=text)


def _check_class(node: ast.ClassDef, task: TaskSpec, stored: Set[str]) -> FieldProblem | None:
    """``stored``: names of attributes that are assigned in the module; they count as given: a task's ``loss`` may be one."""
    plain = all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)
    if node.decorator_list or node.keywords or not plain:
        return None
    bound = _bindings(node.body)
    given = set(bound) | stored
    if "__getattr__" in given or "__getattribute__" in given:
        return None
    missing = [name for name in ("build", "loss") if name not in given]
    if "evaluate" not in given and any(isinstance(n, ast.FunctionDef) for n in bound.get("evaluation", [])):
        missing.append("evaluate")
    if missing:
        text = f"{task.entrypoint!r} is no task: it has no {' and no '.join(missing)}; {_SEE}"
        return FieldProblem(pointer="/task/entrypoint", code="entrypoint-wrong", detail=text)
    if given & {"__signature__", "__new__"} or "__init__" in stored:
        return None
    made = bound.get("__init__", [])
    if not made:
        return _check_arguments(ast.arguments([], [], None, [], [], None, []), 0, task)
    if len(made) != 1 or not isinstance(made[0], ast.FunctionDef) or made[0].decorator_list:
        return None
    return _check_arguments(made[0].args, 1, task)


def _check_arguments(takes: ast.arguments, skip: int, task: TaskSpec) -> FieldProblem | None:
    """``skip``: leading parameters that Python fills in (``self``)."""
    places = takes.posonlyargs + takes.args
    if len(places) < skip or takes.posonlyargs[skip:]:
        return None
    named = places[skip:]
    required = {a.arg for a in named[: max(0, len(named) - len(takes.defaults))]}
    required |= {a.arg for a, d in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if d is None}
    known = [a.arg for a in named + takes.kwonlyargs]
    it_takes = f"it takes {', '.join(_shown(name, name in required) for name in known) or 'none'}"
    for name in task.args:
        if name not in known and takes.kwarg is None:
            text = f"{task.entrypoint!r} takes no argument {name!r}{nearest(name, known)}; {it_takes}"
            pointer = f"/task/args/{_escaped(name)}"
            return FieldProblem(pointer=pointer, code="arguments-wrong", detail=text)
    absent = [name for name in known if name in required and name not in task.args]
    if absent:
        text = f"{task.entrypoint!r} needs the argument {' and '.join(map(repr, absent))}; {it_takes}"
        return FieldProblem(pointer="/task/args", code="arguments-wrong", detail=text)
    return None


def _shown(name: str, required: bool) -> str:
    return f"{name} (required)" if required else name


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
